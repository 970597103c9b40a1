"""The second stage: from a shard of tokens to its parts of hidden states."""
