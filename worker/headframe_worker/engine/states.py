"""The states of some tokens as they will be stored, and what was measured on them before they were rounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headframe_api.spec import StateDtype
from headframe_worker.engine.pieces import pieces

TORCH_DTYPE: dict[StateDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
SUM, NORM, LARGEST = range(3)
MEASURES = 3
"""Of each token and slot, in float32: sum of the values, L2 norm, largest magnitude."""


@dataclass(frozen=True)
class StatesTensors:
    """T tokens, S slots: tensors of one device that are filled slot by slot."""

    states: Tensor
    """[T, S, H] in the stored dtype."""
    measures: Tensor
    """[T, S, MEASURES] float32."""
    scales: Tensor | None = None
    """[T, S] float32, float8 only: state = stored * scale."""

    @classmethod
    def empty(
        cls, tokens: int, slots: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> StatesTensors:
        """Uninitialised tensors."""
        scaled = dtype == torch.float8_e4m3fn
        return cls(
            torch.empty((tokens, slots, hidden_size), dtype=dtype, device=device),
            torch.empty((tokens, slots, MEASURES), dtype=torch.float32, device=device),
            torch.empty((tokens, slots), dtype=torch.float32, device=device) if scaled else None,
        )

    def tokens(self, start: int, count: int) -> StatesTensors:
        """A view of `count` tokens from `start`."""
        return StatesTensors(
            self.states[start : start + count],
            self.measures[start : start + count],
            None if self.scales is None else self.scales[start : start + count],
        )

    def put(self, slot: int, hidden: Tensor, places: Tensor | None) -> None:
        """Store one slot of a batch: hidden [B, L, H]; places [T] picks the real tokens out of B * L, None where all are real."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        if places is not None:
            flat = flat.index_select(0, places)
        for piece in pieces(len(flat)):
            wide = flat[piece].float()
            measures = self.measures[piece, slot]
            torch.sum(wide, dim=-1, out=measures[:, SUM])
            torch.linalg.vector_norm(wide, dim=-1, out=measures[:, NORM])
            largest = torch.linalg.vector_norm(wide, ord=float("inf"), dim=-1)
            measures[:, LARGEST] = largest
            if self.scales is None:
                self.states[piece, slot] = flat[piece]
                continue
            # One scale a token and slot maps its largest value to the largest float8; an all-zero token keeps scale 1.
            scale = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
            self.scales[piece, slot] = scale
            self.states[piece, slot] = (wide / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)

    def take(self, slot: int, other: StatesTensors) -> None:
        """Copy the only slot of others, of the same device, into this one."""
        for ours, theirs in zip(self._tensors(), other._tensors(), strict=True):
            ours[:, slot] = theirs[:, 0]

    def map(self, change: Callable[[Tensor], Tensor]) -> StatesTensors:
        """The tensors that `change` makes of these."""
        return StatesTensors(*map(change, self._tensors()))

    def _tensors(self) -> list[Tensor]:
        return [self.states, self.measures, *([] if self.scales is None else [self.scales])]

    def copy_from(self, other: StatesTensors) -> None:
        """Copy all tensors, asynchronously where one side is pinned host memory."""
        self.states.copy_(other.states, non_blocking=True)
        self.measures.copy_(other.measures, non_blocking=True)
        if self.scales is not None and other.scales is not None:
            self.scales.copy_(other.scales, non_blocking=True)
