"""One sample as a trainer wants it, and the decoding of its stored bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headframe_api.plan import StatesLayout
from headframe_api.spec import StateDtype
from headframe_worker.reader.stored_part import StoredPart

TORCH_DTYPE: dict[StateDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


class Sample(NamedTuple):
    """One sample of T tokens. A named tuple, so that DataLoader pins and moves it."""

    row: int
    """Its row in tokens/, over all shards."""
    sample_id: str
    token_ids: torch.Tensor
    """[T] int64"""
    loss_mask: torch.Tensor
    """[T] int64: 1 where a trainer is to learn the token."""
    hidden_states: torch.Tensor
    """[T, L, H]: the residual stream after each of the layers, in their stored order."""
    last: torch.Tensor | None
    """[T, H]: the last decoder layer's output, before or after the final norm as the dataset says; None where not kept."""


class StatesDecoder:
    """From stored bytes to states in the dtype that was asked for."""

    def __init__(self, layout: StatesLayout, hidden_size: int, dtype: torch.dtype | None) -> None:
        self.stored = TORCH_DTYPE[layout.dtype]
        """What the states are stored as."""
        self.dtype = dtype or (torch.bfloat16 if layout.dtype == "float8_e4m3fn" else self.stored)
        """What they are given out as: as stored unless another was asked for; float8 becomes bfloat16."""
        self._shape = (-1, layout.slots, hidden_size)
        self._layers = len(layout.layers)

    def states(self, stored: torch.Tensor, scales: NDArray[np.float32] | None) -> torch.Tensor:
        """[T, S, H] out of the stored bytes [T * S * H * item], and for float8 scales [T, S]."""
        states = stored.view(self.stored).view(self._shape)
        if scales is None:
            return states.to(self.dtype)
        return (states.to(torch.float32) * torch.tensor(scales)[..., None]).to(self.dtype)

    def sample(self, part: StoredPart, index: int, sample_id: str, states: torch.Tensor) -> Sample:
        """The sample at a place in a part, with its states [T, S, H]."""
        tokens = slice(int(part.offsets[index]), int(part.offsets[index + 1]))
        return Sample(
            int(part.rows[index]),
            sample_id,
            torch.from_numpy(part.token_ids[tokens].astype(np.int64)),
            torch.from_numpy(part.loss_mask[tokens].astype(np.int64)),
            states[:, : self._layers],
            states[:, self._layers] if states.shape[1] > self._layers else None,
        )

    def samples(
        self, part: StoredPart, indexes: Sequence[int], sample_ids: Sequence[str], stored: torch.Tensor
    ) -> list[Sample]:
        """Samples that follow one another in a part, out of their stored bytes as one tensor."""
        first = int(part.offsets[indexes[0]])
        scales = None if part.scales is None else part.scales[first : int(part.offsets[indexes[-1] + 1])]
        states = self.states(stored, scales)
        return [
            self.sample(
                part, index, name, states[int(part.offsets[index]) - first : int(part.offsets[index + 1]) - first]
            )
            for index, name in zip(indexes, sample_ids, strict=True)
        ]
