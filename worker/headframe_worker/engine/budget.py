"""How many padded tokens one forward pass may have: found at start, halved when memory runs out, remembered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headframe_worker.engine.batches import cut_batches, pad_right
from headframe_worker.engine.capture import Capture
from headframe_worker.engine.staging import StagedBatch

GPU_TOKENS = 16_384
"""Throughput is flat from about 4,096 tokens on; more only makes the pipeline's steps coarser."""
CPU_TOKENS = 512
"""Enough to keep a CPU's cores at their peak; more would only add padding."""
_STAGED_BATCHES = 3
"""Batches whose states lie on one device at the same time: one computed, one copied, one waiting."""


class TokenBudget:
    """Padded tokens of a batch."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def shrink(self, failed_tokens: int) -> None:
        """A batch of `failed_tokens` did not fit: half of it may."""
        self.tokens = max(1, min(self.tokens, failed_tokens) // 2)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a smaller batch may go through, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def default_tokens(device: torch.device) -> int:
    """Where `auto` starts."""
    return GPU_TOKENS if device.type == "cuda" else CPU_TOKENS


def staged_batches(capture: Capture) -> int:
    """Batches whose states lie on the last device at the same time: each other device has one more in the works."""
    return _STAGED_BATCHES + len(capture.devices) - 1


def fit(
    budget: TokenBudget,
    capture: Capture,
    token_ids: NDArray[np.int32],
    lengths: Sequence[int] | NDArray[np.int64],
    dtype: torch.dtype,
) -> int:
    """Run the most demanding batch of real samples (longest first) and shrink the budget until it goes through.

    It also warms up kernels on the shapes to come. Returns how often memory ran out. A single sample that does not fit
    alone is left for the run to name.
    """
    failures = 0
    while True:
        batch = cut_batches(lengths, budget.tokens)[0]
        if _goes_through(capture, token_ids[: batch.tokens], np.asarray(lengths[: batch.samples], np.int64), dtype):
            return failures
        release_memory(capture.devices)
        if batch.samples == 1:
            return failures
        failures += 1
        budget.shrink(batch.padded_tokens)


def release_memory(devices: Sequence[torch.device]) -> None:
    """Give cached blocks back, so that differently sized ones can be made of them."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if devices[0].type == "cuda":
        torch.cuda.empty_cache()  # of all devices


def _goes_through(
    capture: Capture, token_ids: NDArray[np.int32], lengths: NDArray[np.int64], dtype: torch.dtype
) -> bool:
    try:
        ids, places = pad_right(token_ids, lengths)
        staged = [StagedBatch(capture, places, len(places), dtype) for _ in range(staged_batches(capture))]
        capture.run(torch.from_numpy(ids).to(capture.devices[0]), staged[0].put)
        for device in capture.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
