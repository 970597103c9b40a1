"""A part before and after the model: tokens go in, states and what was found wrong with single samples come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headframe_api.manifests import SlotStatistics
from headframe_worker.engine.states import LARGEST, NORM, SUM, StatesTensors

_MOVE_TOKENS = 1024


@dataclass(frozen=True)
class TokenPart:
    """N samples of T tokens together, longest first."""

    part: int
    rows: NDArray[np.int64]
    """[N]: each sample's row in tokens/, over all shards."""
    lengths: NDArray[np.int64]
    """[N], each at least 1."""
    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T]"""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.token_ids)


@dataclass(frozen=True)
class RefusedSample:
    """A sample whose states are not worth storing."""

    row: int
    reason: str
    """NonFinite or AllZero."""
    message: str


@dataclass(frozen=True)
class FilledPart:
    """A part with its states, without the samples that were refused. The arrays are views of a buffer that is used again."""

    part: int
    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    states: NDArray[np.uint8]
    """The bytes of [T, S, H] in the stored dtype."""
    scales: NDArray[np.float32] | None
    """[T, S], float8 only."""
    refused: tuple[RefusedSample, ...]
    statistics: tuple[SlotStatistics, ...]


def fill(part: TokenPart, tensors: StatesTensors, slot_names: Sequence[str]) -> FilledPart:
    """Judge each sample by its measures, close the gaps of refused ones, and sum up the rest.

    `tensors` hold the part's T tokens on the host.
    """
    measures = tensors.measures.numpy()
    refused = _refused(part, measures, _largest_storable(tensors.states.dtype), slot_names)
    kept = ~np.isin(part.rows, [sample.row for sample in refused])
    token_kept = np.repeat(kept, part.lengths)
    if refused:
        _close_gaps(tensors, part.lengths, kept)
        measures = measures[: int(token_kept.sum())]
    count = len(measures)
    return FilledPart(
        part=part.part,
        rows=part.rows[kept],
        lengths=part.lengths[kept],
        token_ids=part.token_ids[token_kept],
        loss_mask=part.loss_mask[token_kept],
        states=tensors.states[:count].view(torch.uint8).numpy().reshape(-1),
        scales=None if tensors.scales is None else tensors.scales[:count].numpy(),
        refused=refused,
        statistics=tuple(_statistics(measures[:, slot]) for slot in range(len(slot_names))),
    )


def _largest_storable(dtype: torch.dtype) -> float:
    """float8 is scaled to fit; the others must hold the value as it is."""
    return float("inf") if dtype == torch.float8_e4m3fn else torch.finfo(dtype).max


def _refused(
    part: TokenPart, measures: NDArray[np.float32], storable: float, slot_names: Sequence[str]
) -> tuple[RefusedSample, ...]:
    """A sample with NaN or infinity anywhere; one of whose layers is zero throughout."""
    starts = np.cumsum(part.lengths) - part.lengths
    # The maximum of a sample's magnitudes is NaN where one of them is.
    largest = np.maximum.reduceat(measures[:, :, LARGEST], starts, axis=0)
    broken = ~(largest <= storable)
    zero = (largest == 0) & np.array([name != "embeddings" for name in slot_names])
    found = []
    for index in np.flatnonzero((broken | zero).any(axis=1)):
        is_broken = bool(broken[index].any())
        slot = int(np.argmax(broken[index] if is_broken else zero[index]))
        value = "NaN, infinity or a value that the stored dtype cannot hold" if is_broken else "nothing but zeros"
        found.append(
            RefusedSample(
                int(part.rows[index]),
                "NonFinite" if is_broken else "AllZero",
                f"{value} in {slot_names[slot]} ({int(part.lengths[index])} tokens)",
            )
        )
    return tuple(found)


def _close_gaps(tensors: StatesTensors, lengths: NDArray[np.int64], kept: NDArray[np.bool_]) -> None:
    """Move the kept samples together, in order. NumPy copies overlapping ranges soundly; small steps bound its copy."""
    arrays = [tensors.states.view(torch.uint8).numpy(), tensors.measures.numpy()]
    if tensors.scales is not None:
        arrays.append(tensors.scales.numpy())
    source = target = 0
    for length, is_kept in zip(lengths.tolist(), kept.tolist(), strict=True):
        if is_kept and source != target:
            for step in range(0, length, _MOVE_TOKENS):
                count = min(_MOVE_TOKENS, length - step)
                for array in arrays:
                    array[target + step : target + step + count] = array[source + step : source + step + count]
        source += length
        target += length if is_kept else 0


def _statistics(measures: NDArray[np.float32]) -> SlotStatistics:
    norms = measures[:, NORM].astype(np.float64)
    if not len(norms):
        return SlotStatistics(tokens=0, sum=0.0, norm_mean=0.0, norm_min=0.0, norm_max=0.0)
    return SlotStatistics(
        tokens=len(norms),
        sum=float(measures[:, SUM].sum(dtype=np.float64)),
        norm_mean=float(norms.mean()),
        norm_min=float(norms.min()),
        norm_max=float(norms.max()),
    )
