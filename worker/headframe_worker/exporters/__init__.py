"""A dataset of hidden states as the files that a trainer reads: one file a trainer."""
