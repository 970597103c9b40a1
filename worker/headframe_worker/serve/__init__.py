"""What a worker shows of itself over HTTP."""
