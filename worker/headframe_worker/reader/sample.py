"""One sample as a trainer wants it, and the decoding of its stored bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, repeat
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

    def samples(
        self, part: StoredPart, indexes: range, sample_ids: Sequence[str], stored: torch.Tensor
    ) -> list[Sample]:
        """Samples that follow one another in a part, out of their stored bytes as one tensor, of which theirs are views."""
        offsets = part.offsets[indexes.start : indexes.stop + 1].tolist()
        tokens, lengths = slice(offsets[0], offsets[-1]), [stop - start for start, stop in pairwise(offsets)]
        states = self.states(stored, None if part.scales is None else part.scales[tokens])
        has_last = states.shape[1] > self._layers
        return list(
            map(
                Sample,
                part.rows[indexes.start : indexes.stop].tolist(),
                sample_ids,
                torch.from_numpy(part.token_ids[tokens].astype(np.int64)).split(lengths),
                torch.from_numpy(part.loss_mask[tokens].astype(np.int64)).split(lengths),
                states[:, : self._layers].split(lengths),
                states[:, self._layers].split(lengths) if has_last else repeat(None),
            )
        )
