"""The first stage: from a dataset to tokens and a plan, on the CPU, once."""
