"""A part where it lies in a store: its header and its small tensors, by as few ranged reads as can be."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headframe_worker.format.part import PartHeader, decode_header, header_bytes
from headframe_worker.stores.base import Store

_FIRST_READ_BYTES = 32 << 10
_NUMPY_DTYPE: dict[str, type[np.generic]] = {"I64": np.int64, "I32": np.int32, "U8": np.uint8, "F32": np.float32}


def read_header(store: Store, key: str, *, size_bytes: int | None = None) -> PartHeader:
    """The header of a part, by one request where the object's size is known, else by two.

    Raises DataError where the object is no part, MissingObjectError where there is none.
    """
    first = store.read_range(key, 0, 8 if size_bytes is None else min(size_bytes, _FIRST_READ_BYTES))
    needed = header_bytes(first)
    if needed > len(first):
        first = store.read_range(key, 0, needed)
    return decode_header(first, where=f"{store.uri}/{key}")


def read_tensor(store: Store, key: str, header: PartHeader, name: str) -> NDArray[Any]:
    """One tensor of a part other than the states, by one request; read-only, in the shape that the header states."""
    place = header.tensors[name]
    data = store.read_range(key, place.start, place.size_bytes) if place.size_bytes else b""
    return np.frombuffer(data, _NUMPY_DTYPE[place.dtype]).reshape(place.shape)
