"""Headframe's data plane: prepare, extract and finalize a dataset of hidden states, on one machine or in a pod."""
