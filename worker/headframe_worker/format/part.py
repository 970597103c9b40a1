"""One part as a safetensors file: its header written and read, and where each tensor lies.

The layout is safetensors' own (8 bytes of header length, JSON, data). We write it ourselves so that the states go from
the engine's buffer to disk or network without a copy, and read it ourselves so that one sample is one ranged read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headframe_api.errors import DataError
from headframe_api.manifests import PartEntry, PartMetadata
from headframe_api.spec import StateDtype
from headframe_worker.checksum import crc64, digest_text

SAFETENSORS_DTYPE: dict[StateDtype, str] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
}
_ITEM_BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}
_LENGTH_BYTES = 8
_HEADER_ALIGNMENT = 64
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""


@dataclass(frozen=True)
class PartArrays:
    """What a part holds: N samples of T tokens together, S slots of H values a token."""

    hidden_states: NDArray[np.uint8]
    """The raw bytes of [T, S, H] in the stored dtype (NumPy has no bfloat16)."""
    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T]"""
    offsets: NDArray[np.int64]
    """[N + 1]: sample i is tokens offsets[i] to offsets[i + 1]."""
    rows: NDArray[np.int64]
    """[N]: the sample's row in tokens/, over all shards."""
    scales: NDArray[np.float32] | None = None
    """[T, S], float8 only: state = stored * scale."""


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of a part: where its bytes lie in the object."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True)
class PartHeader:
    """A part's header, read."""

    tensors: dict[str, TensorPlace]
    size_bytes: int
    """Size of the whole object."""
    _strings: dict[str, str]
    _where: str

    @cached_property
    def metadata(self) -> PartMetadata:
        """What the part says of itself; readers of states do without. Raises DataError where it does not say it."""
        try:
            return _metadata_of(self._strings)
        except (ValueError, TypeError, AttributeError) as error:
            raise _not_a_part(self._where, error) from error

    @property
    def entry(self) -> PartEntry:
        """How the shard's manifest lists this part."""
        return PartEntry(
            part=self.metadata.part,
            samples=self.tensors["rows"].shape[0],
            tokens=self.tensors["token_ids"].shape[0],
            bytes=self.size_bytes,
            digest=self.metadata.digest,
            quarantined=self.metadata.quarantined,
            statistics=self.metadata.statistics,
        )

    def sample_range(self, start_token: int, length: int) -> tuple[int, int]:
        """(first byte, number of bytes) of a sample's states."""
        place = self.tensors["hidden_states"]
        token_bytes = place.size_bytes // max(1, place.shape[0])
        return place.start + start_token * token_bytes, length * token_bytes


def encode_part(
    arrays: PartArrays, metadata: PartMetadata, *, slots: int, hidden_size: int, dtype: StateDtype
) -> list[memoryview]:
    """The object's bytes as buffers to be written one after the other; the arrays are not copied.

    Tensors lie in order of their items' size, largest first, so that each is aligned whatever T is. The metadata's
    digest is filled in here.
    """
    tokens = len(arrays.token_ids)
    tensors: list[tuple[str, str, tuple[int, ...], NDArray[Any]]] = [
        ("offsets", "I64", arrays.offsets.shape, arrays.offsets),
        ("rows", "I64", arrays.rows.shape, arrays.rows),
        ("token_ids", "I32", (tokens,), arrays.token_ids),
        ("hidden_states", SAFETENSORS_DTYPE[dtype], (tokens, slots, hidden_size), arrays.hidden_states),
        ("loss_mask", "U8", (tokens,), arrays.loss_mask),
    ]
    if arrays.scales is not None:
        tensors.insert(2, ("scales", "F32", (tokens, slots), arrays.scales))
    buffers = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for *_, array in tensors if array.nbytes]
    metadata = metadata.model_copy(update={"digest": digest_text(crc64(buffers))})
    header: dict[str, Any] = {"__metadata__": _metadata_strings(metadata)}
    position = 0
    for name, item, shape, array in tensors:
        if array.nbytes != int(np.prod(shape, dtype=np.int64)) * _ITEM_BYTES[item]:
            raise ValueError(f"{name}: {array.nbytes} bytes do not make {shape} of {item}")
        header[name] = {"dtype": item, "shape": list(shape), "data_offsets": [position, position + array.nbytes]}
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _HEADER_ALIGNMENT)
    return [memoryview(struct.pack("<Q", len(text)) + text), *buffers]


def header_bytes(first_bytes: bytes) -> int:
    """How many bytes from the start of the object the header takes, its length field included; needs the first 8."""
    length = (
        int(struct.unpack_from("<Q", first_bytes)[0]) if len(first_bytes) >= _LENGTH_BYTES else MAX_HEADER_BYTES + 1
    )
    if length > MAX_HEADER_BYTES:
        raise DataError("not a safetensors file: no valid header length in its first 8 bytes")
    return _LENGTH_BYTES + length


def decode_header(first_bytes: bytes, *, where: str) -> PartHeader:
    """The header out of an object's first bytes (at least `header_bytes` of them). Raises DataError where it is not a part's."""
    end = header_bytes(first_bytes)
    try:
        header = json.loads(first_bytes[_LENGTH_BYTES:end])
        strings = header.pop("__metadata__")
        tensors = {
            name: TensorPlace(
                entry["dtype"],
                tuple(entry["shape"]),
                end + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_a_part(where, error) from error
    size_bytes = max((place.start + place.size_bytes for place in tensors.values()), default=end)
    return PartHeader(tensors, size_bytes, strings, where)


def _not_a_part(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: not a part of format version 1: {error}")


def _metadata_strings(metadata: PartMetadata) -> dict[str, str]:
    """safetensors metadata holds strings only: structures as JSON, plain strings as they are."""
    values = metadata.model_dump(mode="json")
    return {
        key: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for key, value in values.items()
    }


_PLAIN = frozenset(("plan", "last", "model", "revision", "digest"))


def _metadata_of(strings: Mapping[str, str]) -> PartMetadata:
    values = {
        key: value if key in _PLAIN else json.loads(value)
        for key, value in strings.items()
        if key in PartMetadata.model_fields
    }
    return PartMetadata.model_validate_json(json.dumps(values))
