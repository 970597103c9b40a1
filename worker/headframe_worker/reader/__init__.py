"""Reading a dataset of hidden states, for training: `from headframe_worker.reader import StatesDataset`."""

from headframe_worker.reader.dataset import StatesDataset
from headframe_worker.reader.packing import PackedBatch, collate_packed
from headframe_worker.reader.sample import Sample
from headframe_worker.reader.sampler import PartBatchSampler
from headframe_worker.reader.stream import StatesStream

__all__ = ["PackedBatch", "PartBatchSampler", "Sample", "StatesDataset", "StatesStream", "collate_packed"]
