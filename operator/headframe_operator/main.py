"""Entry point of the operator."""
