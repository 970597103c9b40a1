"""Cutting a part into forward passes of a bounded number of padded tokens, and laying out one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BISECTIONS = 12


@dataclass(frozen=True)
class Batch:
    """Consecutive samples of a part that go through the model together."""

    first: int
    """Index of the first sample in its part."""
    samples: int
    start: int
    """Its first token in the part."""
    tokens: int
    """T, without padding."""
    longest: int
    """L, the padded length."""

    @property
    def padded_tokens(self) -> int:
        """B * L."""
        return self.samples * self.longest


def cut_batches(lengths: Sequence[int] | NDArray[np.int64], budget: int, *, first: int = 0) -> list[Batch]:
    """Batches of the samples from `first` on, each of at most `budget` padded tokens, or one longer sample alone.

    Lengths come longest first. No batch is left with the crumbs: the samples are spread so that as many batches as the
    budget makes necessary are about equally large.
    """
    values = [int(length) for length in lengths]
    count = len(_cut(values, budget, first))
    low, high = 1, budget
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        if len(_cut(values, middle, first)) <= count:
            high = middle
        else:
            low = middle + 1
    return _cut(values, high, first)


def _cut(lengths: Sequence[int], budget: int, first: int) -> list[Batch]:
    batches: list[Batch] = []
    start = sum(lengths[:first])
    while first < len(lengths):
        longest, stop, tokens = lengths[first], first, 0
        while stop < len(lengths) and (stop == first or (stop - first + 1) * longest <= budget):
            tokens += lengths[stop]
            stop += 1
        batches.append(Batch(first, stop - first, start, tokens, longest))
        first, start = stop, start + tokens
    return batches


def pad_right(token_ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(ids [B, L], places [T]): samples that lie one after the other, padded to the longest, and where each token went in B * L.

    Padding repeats a sample's last token, so that it brings in no id that the sample has not: a broken embedding of a
    padding token harms nobody, and no model sees its own padding id and draws conclusions.
    """
    ends = np.cumsum(lengths)
    position = np.arange(int(lengths.max()))
    index = np.minimum((ends - lengths)[:, None] + position, (ends - 1)[:, None])
    return token_ids[index].astype(np.int64), np.flatnonzero(position < lengths[:, None])
