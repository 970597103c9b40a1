"""Reading a dataset of hidden states, for training: `from headframe_worker.reader import StatesDataset`."""

from headframe_worker.reader.dataset import StatesDataset
from headframe_worker.reader.sample import Sample

__all__ = ["Sample", "StatesDataset"]
