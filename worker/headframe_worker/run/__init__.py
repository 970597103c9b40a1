"""A whole job on one machine: the three stages in one command, with one worker process a GPU."""
