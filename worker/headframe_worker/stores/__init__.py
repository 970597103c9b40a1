"""Where objects lie: a small interface and its implementations."""
