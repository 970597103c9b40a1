"""What a part's header must say and where its samples must lie, given the plan: nothing here reads the states themselves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headframe_api.manifests import PartEntry, PartMetadata
from headframe_api.plan import Plan
from headframe_worker.finalize.fault import Fault
from headframe_worker.format.part import SAFETENSORS_DTYPE, PartHeader
from headframe_worker.prepare.tokens_file import TokensShard
from headframe_worker.reader.stored_part import StoredPart

_MOST_ROWS_NAMED = 8


def header_faults(plan: Plan, shard: int, entry: PartEntry, key: str, header: PartHeader, size: int) -> Iterator[Fault]:
    """Differences between a part's header and what plan, manifest and size of the object demand."""
    metadata = header.metadata
    expected = {
        "plan": plan.digest,
        "shard": shard,
        "part": entry.part,
        "layers": plan.states.layers,
        "last": plan.states.last,
        "model": plan.model.source,
        "revision": plan.model.revision,
    }
    for name, value in expected.items():
        if getattr(metadata, name) != value:
            yield Fault(key, f"its header says {name} {getattr(metadata, name)!r}, should be {value!r}")
    differing = [name for name in type(entry).model_fields if getattr(header.entry, name) != getattr(entry, name)]
    if differing:
        yield Fault(key, f"its header and the shard's manifest differ in {', '.join(differing)}")
    shapes = _expected_tensors(plan, entry)
    found = {name: (place.dtype, place.shape) for name, place in header.tensors.items()}
    for name in sorted(shapes.keys() | found.keys()):
        if found.get(name) != shapes.get(name):
            yield Fault(
                key, f"tensor {name} is {_tensor(found.get(name))} in its header, should be {_tensor(shapes.get(name))}"
            )
    if header.size_bytes != size:
        yield Fault(key, f"has {size:,} bytes, its header needs {header.size_bytes:,}")
    yield from _statistics_faults(plan, entry, metadata, key)


def sample_faults(
    part: StoredPart, expected: NDArray[np.int64], tokens: TokensShard, first_row: int
) -> Iterator[Fault]:
    """Differences between a part's samples and the rows (relative to the shard) that it must hold, in order."""
    got = part.rows - first_row
    if not np.array_equal(got, expected):
        yield from _row_faults(part.key, got, expected, first_row)
        return
    lengths = tokens.seq_len[expected]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if not np.array_equal(part.offsets, offsets):
        wrong = int(np.flatnonzero(part.offsets != offsets)[0])
        row = first_row + int(expected[max(0, wrong - 1)])
        yield Fault(
            f"{part.key} row {row}",
            f"ends at token {int(part.offsets[wrong])}, by its length in tokens/ it ends at {int(offsets[wrong])}",
        )
        return
    for name, values, wanted in (
        ("token_ids", part.token_ids, tokens.input_ids),
        ("loss_mask", part.loss_mask, tokens.loss_mask),
    ):
        different = np.flatnonzero(values != gather(wanted, tokens.offsets, expected))
        if len(different):
            samples = np.unique(np.searchsorted(offsets, different, side="right") - 1)
            for sample in samples[:_MOST_ROWS_NAMED]:
                at = int(different[np.searchsorted(different, offsets[sample])] - offsets[sample])
                row = first_row + int(expected[sample])
                yield Fault(f"{part.key} row {row}", f"{name} differs from tokens/, first at token {at}")
            if len(samples) > _MOST_ROWS_NAMED:
                yield Fault(part.key, f"{name} differs in {len(samples) - _MOST_ROWS_NAMED:,} more samples")


def gather(flat: NDArray[np.generic], offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.generic]:
    """The values of some rows of a flat column, one after the other."""
    if not len(rows):
        return flat[:0]
    return np.concatenate([flat[offsets[row] : offsets[row + 1]] for row in rows])


def _row_faults(key: str, got: NDArray[np.int64], expected: NDArray[np.int64], first_row: int) -> Iterator[Fault]:
    values, counts = np.unique(got, return_counts=True)
    sets = {
        "is in it more than once": values[counts > 1],
        "is missing": np.setdiff1d(expected, got),
        "does not belong here": np.setdiff1d(got, expected),
    }
    for problem, rows in sets.items():
        for row in rows[:_MOST_ROWS_NAMED]:
            yield Fault(f"{key} row {first_row + int(row)}", problem)
        if len(rows) > _MOST_ROWS_NAMED:
            yield Fault(key, f"the same of {len(rows) - _MOST_ROWS_NAMED:,} more rows: {problem}")
    if not any(map(len, sets.values())):
        at = int(np.flatnonzero(got != expected)[0])
        yield Fault(f"{key} row {first_row + int(got[at])}", "stands in another place than the plan gives it")


def _expected_tensors(plan: Plan, entry: PartEntry) -> dict[str, tuple[str, tuple[int, ...]]]:
    slots, hidden = plan.states.slots, plan.model.hidden_size
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "hidden_states": (SAFETENSORS_DTYPE[plan.states.dtype], (entry.tokens, slots, hidden)),
        "token_ids": ("I32", (entry.tokens,)),
        "loss_mask": ("U8", (entry.tokens,)),
        "offsets": ("I64", (entry.samples + 1,)),
        "rows": ("I64", (entry.samples,)),
    }
    if plan.states.dtype == "float8_e4m3fn":
        tensors["scales"] = ("F32", (entry.tokens, slots))
    return tensors


def _statistics_faults(plan: Plan, entry: PartEntry, metadata: PartMetadata, key: str) -> Iterator[Fault]:
    if len(metadata.statistics) != plan.states.slots:
        yield Fault(key, f"has statistics of {len(metadata.statistics)} slots, should have {plan.states.slots}")
    for name, slot in zip(plan.states.slot_names, metadata.statistics, strict=False):
        if slot.tokens != entry.tokens:
            yield Fault(key, f"statistics of {name} count {slot.tokens:,} tokens, the part has {entry.tokens:,}")


def _tensor(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
