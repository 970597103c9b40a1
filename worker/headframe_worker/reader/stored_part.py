"""A part where it lies in a store: all but its states in a few small reads, then any run of samples in one.

Everything but states and loss mask lies before the states, so what a part says of its samples takes two requests, or
three where it is long; it is about a thousandth of the part and is worth keeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headframe_api.errors import DataError
from headframe_worker.format.part import PartHeader, decode_header, header_bytes
from headframe_worker.stores.base import Store

_FIRST_READ_BYTES = 32 << 10
_NUMPY_DTYPE: dict[str, type[np.generic]] = {"I64": np.int64, "I32": np.int32, "U8": np.uint8, "F32": np.float32}


@dataclass(frozen=True)
class StoredPart:
    """A part without its states; the arrays are as in PartArrays, and read-only."""

    key: str
    header: PartHeader
    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    scales: NDArray[np.float32] | None


def read_header(store: Store, key: str, *, at_least_bytes: int) -> PartHeader:
    """The header of a part, by one request as a rule.

    `at_least_bytes` is a size that the object is known not to fall below. Raises DataError where the object is no part,
    MissingObjectError where there is none.
    """
    first = store.read_range(key, 0, min(at_least_bytes, _FIRST_READ_BYTES))
    needed = header_bytes(first)
    if needed > len(first):
        first = store.read_range(key, 0, needed)
    return decode_header(first, where=f"{store.uri}/{key}")


def read_small_tensors(store: Store, key: str, header: PartHeader) -> StoredPart:
    """All tensors of a part but its states, by two requests. Raises DataError where the object ends before them."""
    states = header.tensors["hidden_states"]
    names = (
        ["rows", "offsets", "token_ids", "scales"] if "scales" in header.tensors else ["rows", "offsets", "token_ids"]
    )
    places = {name: header.tensors[name] for name in names}
    start = min(place.start for place in places.values())
    front = store.read_range(key, start, states.start - start)
    mask = header.tensors["loss_mask"]
    data = store.read_range(key, mask.start, mask.size_bytes) if mask.size_bytes else b""
    try:
        arrays: dict[str, NDArray[Any]] = {
            name: np.frombuffer(front, _NUMPY_DTYPE[place.dtype], prod(place.shape), place.start - start).reshape(
                place.shape
            )
            for name, place in places.items()
        }
    except (ValueError, KeyError) as error:
        raise DataError(f"{store.uri}/{key}: its header does not fit its tensors: {error}") from error
    return StoredPart(
        key,
        header,
        arrays["rows"],
        arrays["offsets"],
        arrays["token_ids"],
        np.frombuffer(data, np.uint8),
        arrays.get("scales"),
    )
