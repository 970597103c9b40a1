"""Host memory for one part's states, page-locked where a GPU copies into it, and used again for the next part."""

from __future__ import annotations

import mmap
import weakref
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headframe_api.errors import TemporaryError
from headframe_worker.engine.states import StatesTensors


class PartBuffer:
    """Room for the states of `capacity_tokens` tokens, in one mapping of its own."""

    def __init__(self, capacity_tokens: int, slots: int, hidden_size: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self.capacity_tokens = capacity_tokens
        shapes = StatesTensors.empty(capacity_tokens, slots, hidden_size, dtype, torch.device("meta"))
        wanted = [shapes.states, shapes.measures, *([] if shapes.scales is None else [shapes.scales])]
        ends = list(accumulate(_whole_pages(tensor) for tensor in wanted))
        memory = mmap.mmap(-1, max(ends[-1], mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        tensors = [
            flat[end - _whole_pages(tensor) :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, end in zip(wanted, ends, strict=True)
        ]
        self._tensors = StatesTensors(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)
        # Locked by hand: PyTorch's own page-locked allocator would round 1.1 GiB up to 2.
        if pinned:
            _lock(flat)
        # Whoever forgets to close, the lock ends before the memory does.
        self._unlock = weakref.finalize(self, _unlock, flat) if pinned else None

    def tokens(self, start: int, count: int) -> StatesTensors:
        """A view of `count` tokens from `start`."""
        return self._tensors.tokens(start, count)

    def close(self) -> None:
        """Unlock the memory."""
        if self._unlock is not None:
            self._unlock()


def _whole_pages(tensor: Tensor) -> int:
    """Bytes of a tensor, rounded up to whole pages."""
    return -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _lock(memory: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code != 0:
        raise TemporaryError(
            f"cannot page-lock {memory.nbytes:,} bytes of host memory (CUDA error {code}): give the worker more memory",
            reason="HostMemory",
        )


def _unlock(memory: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(memory.data_ptr())
