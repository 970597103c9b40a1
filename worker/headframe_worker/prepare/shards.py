"""How many shards, and which rows each has: contiguous ranges with about the same number of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headframe_api.plan import STATE_DTYPE_BYTES
from headframe_api.spec import ExtractionJobSpec
from headframe_worker.prepare.model_structure import ModelSize

START_SECONDS = 20.0
"""From a process' start to the begin of loading: interpreter, Torch, the device."""
LOAD_BYTES_PER_SECOND = 2e9
"""A careful guess between a network volume and a local disk."""
GPU_FLOPS = 3e14
CPU_FLOPS = 3e11
LOADING_SHARE = 0.02
SHARD_SECONDS = 1800.0
SHARDS_PER_WORKER = 8


def count_shards(spec: ExtractionJobSpec, size: ModelSize, *, samples: int, tokens: int) -> int:
    """The number of shards; an explicit one is only lowered to the number of samples.

    `auto` wants 8 shards a worker, so that the last ones to finish leave little idle, and at most half an hour of work in
    each, so that a failed one costs little. It is held to the number at which loading takes 2 % of a shard's time, and at
    that to no less than one a worker and no more than one a sample:

        seconds = 2 * active parameters * tokens / FLOP/s          (3e14 on GPUs, 3e11 on the CPU)
        loading = 20 + weight bytes / 2e9
        shards  = max(workers, min(max(8 * workers, seconds / 1800), seconds * 0.02 / (0.98 * loading)))
    """
    if samples == 0:
        return 0
    if spec.shards != "auto":
        return min(spec.shards, samples)
    flops = GPU_FLOPS if spec.model.gpus else CPU_FLOPS
    seconds = 2.0 * size.active_parameters * tokens / flops
    loading_seconds = START_SECONDS + size.parameters * STATE_DTYPE_BYTES[spec.model.dtype] / LOAD_BYTES_PER_SECOND
    workers = max(1, spec.workers)
    wanted = max(SHARDS_PER_WORKER * workers, math.ceil(seconds / SHARD_SECONDS))
    affordable = math.floor(seconds * LOADING_SHARE / ((1 - LOADING_SHARE) * loading_seconds))
    return min(samples, max(workers, min(wanted, affordable)))


class ShardCutter:
    """Walks over the samples' lengths once and says where a shard ends: as near as can be to its share of all tokens."""

    def __init__(self, *, shards: int, samples: int, tokens: int) -> None:
        self._shards, self._samples_left, self._tokens = shards, samples, tokens
        self.shard = 0
        self._in_shard = 0
        self._done = 0

    def split(self, lengths: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
        """(shard, samples of this block that belong to it), in order; a shard goes on from one block into the next."""
        start = 0
        for index, length in enumerate(lengths.tolist()):
            if self._ends_before(length):
                if index > start:
                    yield self.shard, slice(start, index)
                start = index
                self.shard += 1
                self._in_shard = 0
            self._in_shard += 1
            self._samples_left -= 1
            self._done += length
        if start < len(lengths):
            yield self.shard, slice(start, len(lengths))

    def _ends_before(self, length: int) -> bool:
        shards_after = self._shards - self.shard - 1
        if not self._in_shard or not shards_after:
            return False
        if self._samples_left <= shards_after:
            return True  # each of the later ones needs a sample
        target = (self.shard + 1) * self._tokens / self._shards
        return self._done + length / 2 > target


def percentile(counts: Sequence[int] | NDArray[np.int64], share: float) -> int:
    """The length below or at which this share of the samples lies (nearest rank); counts[l] samples have length l."""
    cumulative = np.cumsum(counts)
    rank = max(1, math.ceil(share * int(cumulative[-1])))
    return int(np.searchsorted(cumulative, rank))
