"""In which order a trainer sees the samples: shuffled, near-sequential on disk, alike on every rank, resumable.

Parts are shuffled and taken a few at a time; the samples of these are shuffled together. So reads stay within a few
parts at any time (page cache, read-ahead and the dataset's own memory of parts all work), and a batch still mixes samples
of different lengths and origins.

The whole order, and its cut into batches, is a function of seed and epoch alone; ranks take turns at its batches, so each
sample is seen by one rank and all ranks have equally many batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from headframe_worker.reader.dataset import StatesDataset


class PartBatchSampler(Sampler[list[int]]):
    """Batches of items of a StatesDataset, for DataLoader's `batch_sampler`.

    batch_samples or batch_tokens: a batch has so many samples, or as many as make at most so many tokens (a longer sample
    is a batch of its own). shuffle: else in stored order, part after part. parts_together: the parts that are shuffled
    together. rank, ranks: as torch.distributed has them; at the end of an epoch up to ranks - 1 batches, and with
    batch_samples an incomplete batch under `drop_last`, are left out.
    """

    def __init__(
        self,
        dataset: StatesDataset,
        *,
        batch_samples: int | None = None,
        batch_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        parts_together: int = 8,
        rank: int = 0,
        ranks: int = 1,
        drop_last: bool = False,
    ) -> None:
        if (batch_samples is None) == (batch_tokens is None):
            raise ValueError("give one of batch_samples and batch_tokens")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank: {rank} is not below ranks, {ranks}")
        self._batch_samples, self._batch_tokens = batch_samples, batch_tokens
        self._seed, self._shuffle, self._parts_together = seed, shuffle, parts_together
        self._rank, self._ranks, self._drop_last = rank, ranks, drop_last
        self._lengths = dataset.lengths
        self._parts = _by_part(dataset)
        self._epoch = 0
        self._done = 0
        self._cut: tuple[int, list[NDArray[np.int64]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """The next iteration begins this epoch, with an order of its own."""
        self._epoch, self._done = epoch, 0

    def __len__(self) -> int:
        return len(self._batches()) // self._ranks

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        for turn in range(self._done, len(batches) // self._ranks):
            self._done = turn + 1
            yield batches[turn * self._ranks + self._rank].tolist()
        self._done = 0

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Where this epoch stands, for a checkpoint.

        With DataLoader workers the sampler is ahead of the trainer by the batches that are prefetched: say how many the
        trainer has done in this epoch.
        """
        return {
            "epoch": self._epoch,
            "batches_done": self._done if batches_done is None else batches_done,
            "order": self._order_settings(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint stood. Raises ValueError where the order would be another one than then."""
        if state["order"] != self._order_settings():
            raise ValueError(f"the checkpoint's order {state['order']} is not this sampler's: {self._order_settings()}")
        self._epoch, self._done = state["epoch"], state["batches_done"]

    def _order_settings(self) -> dict[str, Any]:
        return {
            "samples": len(self._lengths),
            "tokens": int(self._lengths.sum()),
            "batch_samples": self._batch_samples,
            "batch_tokens": self._batch_tokens,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "parts_together": self._parts_together,
            "ranks": self._ranks,
            "drop_last": self._drop_last,
        }

    def _batches(self) -> list[NDArray[np.int64]]:
        """All ranks' batches of this epoch, in order."""
        if self._cut is None or self._cut[0] != self._epoch:
            order = self._order()
            if self._batch_tokens is not None:
                batches = _cut_by_tokens(order, self._lengths[order], self._batch_tokens)
            else:
                size = self._batch_samples or 1
                batches = [order[start : start + size] for start in range(0, len(order), size)]
                if self._drop_last and batches and len(batches[-1]) < size:
                    batches.pop()
            self._cut = (self._epoch, batches)
        return self._cut[1]

    def _order(self) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.concatenate([np.zeros(0, np.int64), *self._parts])
        random = np.random.default_rng([self._seed, self._epoch])
        parts = random.permutation(len(self._parts))
        order = [np.zeros(0, np.int64)]
        for start in range(0, len(parts), self._parts_together):
            together = np.concatenate([self._parts[part] for part in parts[start : start + self._parts_together]])
            order.append(random.permutation(together))
        return np.concatenate(order)


def _by_part(dataset: StatesDataset) -> list[NDArray[np.int64]]:
    """The dataset's items part by part, in the order in which they lie there."""
    index, positions = dataset.index, dataset.positions
    shards, parts = index.shards[positions], index.parts[positions]
    order = np.lexsort((index.starts[positions], parts, shards)).astype(np.int64)
    borders = np.flatnonzero(np.diff(shards[order]) | np.diff(parts[order])) + 1
    return [part for part in np.split(order, borders) if len(part)]


def _cut_by_tokens(order: NDArray[np.int64], lengths: NDArray[np.int32], budget: int) -> list[NDArray[np.int64]]:
    ends = np.cumsum(lengths, dtype=np.int64)
    batches, start, before = [], 0, 0
    while start < len(order):
        stop = max(start + 1, int(np.searchsorted(ends, before + budget, side="right")))
        batches.append(order[start:stop])
        start, before = stop, int(ends[stop - 1])
    return batches
