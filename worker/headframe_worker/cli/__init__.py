"""The command line `headframe`: one file a command."""
