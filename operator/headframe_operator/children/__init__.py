"""The objects that the operator makes, one builder a file."""
