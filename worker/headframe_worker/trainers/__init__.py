"""Trainers that read a dataset of hidden states directly, and the numbers they must be told."""
