"""Reading a dataset of hidden states for training."""
