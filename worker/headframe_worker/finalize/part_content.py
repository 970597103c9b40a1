"""What only reading a part whole can tell: its digest, and its states against the statistics taken before they were stored."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from headframe_api.errors import DataError
from headframe_api.manifests import SlotStatistics
from headframe_api.plan import STATE_DTYPE_BYTES, Plan
from headframe_api.spec import StateDtype
from headframe_worker.checksum import crc64, digest_text
from headframe_worker.finalize.fault import Fault
from headframe_worker.reader.sample import TORCH_DTYPE
from headframe_worker.reader.stored_part import StoredPart, read_header, read_small_tensors
from headframe_worker.stores.base import Store

_CHUNK_BYTES = 16 << 20
ROUNDING: dict[StateDtype, float] = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}
"""Largest relative error of rounding to the dtype: half a unit in the last of 24, 11, 8 or 4 binary digits."""
SMALLEST: dict[StateDtype, float] = {"float32": 0.0, "float16": 2**-25, "bfloat16": 0.0, "float8_e4m3fn": 2**-10}
"""Largest absolute error of rounding where numbers are too small for that (of float8 before it is scaled)."""
SUMMING = 1e-5
"""Relative error allowed to the engine's own float32 sums and norms."""


class _Slots:
    """Running sums over tokens, [S] each in float64."""

    def __init__(self, slots: int) -> None:
        self.sums, self.magnitudes, self.norm_sums, self.norm_max = np.zeros((4, slots))
        self.norm_min = np.full(slots, np.inf)
        self.floors = np.zeros(slots)
        """Sum over tokens of the largest absolute rounding error of one value."""


def content_faults(plan: Plan, key: str, size_bytes: int, store: Store) -> list[Fault]:
    """Read one part to its end and say what is wrong with its bytes; its header was found to fit the plan."""
    try:
        part = read_small_tensors(store, key, read_header(store, key, at_least_bytes=size_bytes))
        return list(_content_faults(plan, part, store))
    except DataError as error:
        return [Fault(key, error.message)]


def _content_faults(plan: Plan, part: StoredPart, store: Store) -> Iterator[Fault]:
    place = part.header.tensors["hidden_states"]
    start = min(tensor.start for tensor in part.header.tensors.values())
    checksum = _checksum(store, part.key, start, place.start, 0)
    slots, hidden = plan.states.slots, plan.model.hidden_size
    sums = _Slots(slots)
    token_bytes = slots * hidden * STATE_DTYPE_BYTES[plan.states.dtype]
    chunk_tokens = max(1, _CHUNK_BYTES // token_bytes)
    buffer = np.empty(min(chunk_tokens, len(part.token_ids)) * token_bytes, np.uint8)
    norms = np.empty((len(part.token_ids), slots), np.float32)
    finite = np.ones(len(norms), bool)
    for first in range(0, len(norms), chunk_tokens):
        tokens = min(chunk_tokens, len(norms) - first)
        chunk = buffer[: tokens * token_bytes]
        store.read_into(part.key, place.start + first * token_bytes, chunk.data)
        checksum = crc64([chunk.data], checksum)
        states = torch.from_numpy(chunk).view(TORCH_DTYPE[plan.states.dtype]).view(tokens, slots, hidden).float()
        span = slice(first, first + tokens)
        if part.scales is not None:
            states *= torch.tensor(part.scales[span])[..., None]
        norms[span], finite[span] = _add(sums, states, part, span, plan.states.dtype)
    checksum = _checksum(store, part.key, place.start + place.size_bytes, part.header.size_bytes, checksum)
    if digest_text(checksum) != part.header.metadata.digest:
        yield Fault(
            part.key, f"its content has the digest {digest_text(checksum)}, should be {part.header.metadata.digest}"
        )
    yield from _odd_samples(part, norms, finite, plan)
    if finite.all() and len(norms):
        yield from _statistics_faults(plan, part.key, part.header.metadata.statistics, sums, len(norms))


def _add(
    sums: _Slots, states: torch.Tensor, part: StoredPart, span: slice, dtype: StateDtype
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Add a chunk of states [t, S, H] to the sums; its norms [t, S], and which tokens [t] are finite."""
    finite = torch.isfinite(states).all(-1).all(-1).numpy()
    norms = torch.linalg.vector_norm(states, dim=-1).numpy()
    sums.sums += states.sum(dim=(0, 2), dtype=torch.float64).numpy()
    sums.magnitudes += states.abs().sum(dim=(0, 2), dtype=torch.float64).numpy()
    sums.norm_sums += norms.sum(0, dtype=np.float64)
    sums.norm_min = np.minimum(sums.norm_min, norms.min(0))
    sums.norm_max = np.maximum(sums.norm_max, norms.max(0))
    scales = np.ones_like(norms) if part.scales is None else part.scales[span]
    sums.floors += SMALLEST[dtype] * scales.sum(0, dtype=np.float64)
    return norms, finite


def _odd_samples(
    part: StoredPart, norms: NDArray[np.float32], finite: NDArray[np.bool_], plan: Plan
) -> Iterator[Fault]:
    starts = part.offsets[:-1]
    if not len(starts) or not len(norms):
        return
    for sample in np.flatnonzero(~np.logical_and.reduceat(finite, starts)):
        token = int(np.flatnonzero(~finite[starts[sample] :])[0])
        yield Fault(f"{part.key} row {part.rows[sample]}", f"states are NaN or infinite, first at token {token}")
    for sample, slot in np.argwhere(np.maximum.reduceat(norms, starts) == 0):
        yield Fault(f"{part.key} row {part.rows[sample]}", f"states of {plan.states.slot_names[slot]} are all zero")


def _statistics_faults(
    plan: Plan, key: str, expected: list[SlotStatistics], sums: _Slots, tokens: int
) -> Iterator[Fault]:
    relative = ROUNDING[plan.states.dtype] + SUMMING
    hidden = plan.model.hidden_size
    for slot, (name, wanted) in enumerate(zip(plan.states.slot_names, expected, strict=True)):
        floor = sums.floors[slot] * hidden
        found = {
            "sum": (sums.sums[slot], relative * sums.magnitudes[slot] + floor),
            "norm_mean": (sums.norm_sums[slot] / tokens, relative * wanted.norm_mean + floor),
            "norm_min": (sums.norm_min[slot], relative * wanted.norm_min + floor),
            "norm_max": (sums.norm_max[slot], relative * wanted.norm_max + floor),
        }
        for statistic, (value, tolerance) in found.items():
            was = getattr(wanted, statistic)
            if not abs(value - was) <= tolerance:
                yield Fault(
                    key, f"{statistic} of {name} is {value:.6g}, was {was:.6g} when extracted (± {tolerance:.2g})"
                )


def _checksum(store: Store, key: str, start: int, stop: int, checksum: int) -> int:
    for first in range(start, stop, _CHUNK_BYTES):
        data = store.read_range(key, first, min(_CHUNK_BYTES, stop - first))
        checksum = crc64([memoryview(data)], checksum)
    return checksum
