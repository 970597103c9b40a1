"""The files of the dataset of hidden states, as docs/format.md specifies them: written and read here alone."""
