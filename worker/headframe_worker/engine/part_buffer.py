"""Host memory for one part's states, page-locked where a GPU copies into it, and used again for the next part."""

from __future__ import annotations

from typing import Any

import torch

from headframe_api.errors import TemporaryError
from headframe_worker.engine.states import StatesTensors


class PartBuffer:
    """Room for the states of `capacity_tokens` tokens."""

    def __init__(self, capacity_tokens: int, slots: int, hidden_size: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self.capacity_tokens = capacity_tokens
        self._tensors = StatesTensors.empty(capacity_tokens, slots, hidden_size, dtype, torch.device("cpu"))
        # Registered by hand: PyTorch's pinned allocator would round 1.1 GiB up to 2.
        self._registered = [self._register(tensor) for tensor in self._all()] if pinned else []

    def tokens(self, start: int, count: int) -> StatesTensors:
        """A view of `count` tokens from `start`."""
        return self._tensors.tokens(start, count)

    def close(self) -> None:
        """Unlock the memory."""
        runtime: Any = torch.cuda.cudart() if self._registered else None
        for address in self._registered:
            runtime.cudaHostUnregister(address)
        self._registered = []

    def _all(self) -> list[torch.Tensor]:
        tensors = [self._tensors.states, self._tensors.measures]
        return tensors if self._tensors.scales is None else [*tensors, self._tensors.scales]

    def _register(self, tensor: torch.Tensor) -> int:
        runtime: Any = torch.cuda.cudart()
        size_bytes = tensor.numel() * tensor.element_size()
        code = int(runtime.cudaHostRegister(tensor.data_ptr(), size_bytes, 0))
        if code != 0:
            raise TemporaryError(
                f"cannot page-lock {size_bytes:,} bytes of host memory (CUDA error {code}): give the worker more memory",
                reason="HostMemory",
            )
        return tensor.data_ptr()
