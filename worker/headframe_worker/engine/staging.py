"""One batch's states on the device where they come together, while its forward fills them slot by slot."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headframe_worker.engine.capture import Capture
from headframe_worker.engine.states import StatesTensors


class StagedBatch:
    """Room for T tokens in all slots of a capture; `put` is its sink.

    A slot of another device is stripped of padding and rounded there, so that only what is stored travels.
    """

    def __init__(self, capture: Capture, places: NDArray[np.int64] | None, tokens: int, dtype: torch.dtype) -> None:
        """`places` [T]: where each token went in B * L; None where all of them are real."""
        self._capture = capture
        self._dtype = dtype
        self._places = None if places is None else on_host(places, pinned=capture.last_device.type == "cuda")
        self._places_by_device: dict[torch.device, Tensor] = {}
        self.states = StatesTensors.empty(tokens, capture.slots, capture.hidden_size, dtype, capture.last_device)

    def put(self, slot: int, hidden: Tensor) -> None:
        """Take a slot's states [B, L, H] from the device that computed them."""
        places = self._places_on(hidden.device)
        if self._capture.is_last_stage(slot):
            self.states.put(slot, hidden, places)
            return
        tokens, ways = self.states.states.shape[0], self._capture.ways
        assert ways is not None, "a stack of one stage has no others"  # noqa: S101
        alone = StatesTensors.empty(tokens, 1, self._capture.hidden_size, self._dtype, hidden.device)
        alone.put(0, hidden, places)
        self.states.take(slot, alone.map(ways.to_last))

    def _places_on(self, device: torch.device) -> Tensor | None:
        if self._places is None:
            return None
        if device not in self._places_by_device:
            self._places_by_device[device] = self._places.to(device, non_blocking=True)
        return self._places_by_device[device]


def on_host(array: NDArray[np.int64], *, pinned: bool) -> Tensor:
    """A tensor over the array, page-locked where a GPU will fetch it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pinned else tensor
