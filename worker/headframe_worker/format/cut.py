"""Which rows form which part: a function of the plan alone, so that every run of a shard cuts it alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headframe_api.plan import Plan


@dataclass(frozen=True)
class PartPlan:
    """One part: its samples in stored order."""

    part: int
    rows: NDArray[np.int64]
    """Rows relative to the shard's file, longest sample first; equally long ones in the order of their rows."""
    lengths: NDArray[np.int64]
    """Their lengths in tokens."""

    @property
    def tokens(self) -> int:
        """T, the part's tokens."""
        return int(self.lengths.sum())


def cut_parts(lengths: Sequence[int] | NDArray[np.int64], *, bytes_per_token: int, target_bytes: int) -> list[PartPlan]:
    """Sort a shard's samples by length, longest first, and cut them into parts of about `target_bytes`.

    A part takes samples until it holds `target_bytes` or more; so only a single sample that is larger by itself, or the
    last one of a part, exceeds it. Longest first lets a batch that does not fit fail at once rather than at the end.
    """
    all_lengths = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-all_lengths, kind="stable").astype(np.int64)
    target_tokens = max(1, target_bytes // bytes_per_token)
    parts: list[PartPlan] = []
    ends = np.cumsum(all_lengths[order])
    start, done = 0, 0
    while start < len(order):
        stop = min(int(np.searchsorted(ends, done + target_tokens, side="left")) + 1, len(order))
        rows = order[start:stop]
        parts.append(PartPlan(len(parts), rows, all_lengths[rows]))
        start, done = stop, int(ends[stop - 1])
    return parts


def shard_parts(plan: Plan, lengths: Sequence[int] | NDArray[np.int64]) -> list[PartPlan]:
    """The parts of one shard of a plan, given its samples' lengths (`seq_len` of its tokens file)."""
    return cut_parts(
        lengths,
        bytes_per_token=plan.states.bytes_per_token(plan.model.hidden_size),
        target_bytes=plan.part_target_bytes,
    )
