"""From the pace of one replica to hours for a plan."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """What extracting a whole plan takes."""

    replica_seconds: float
    """Of all workers together: loading the model for each shard, and computing it."""
    wall_seconds: float
    """Until the last worker is done."""


def estimate(shard_tokens: Sequence[int], *, tokens_per_second: float, load_seconds: float, workers: int) -> Estimate:
    """Each shard goes to the worker that is free first, in order, and loads the model anew, as pods do.

    `tokens_per_second` is one replica's. Shards without tokens take no time.
    """
    shards = [load_seconds + tokens / tokens_per_second for tokens in shard_tokens if tokens]
    free_at = [0.0] * max(1, workers)
    for shard_seconds in shards:
        heapq.heapreplace(free_at, free_at[0] + shard_seconds)
    return Estimate(sum(shards), max(free_at))
