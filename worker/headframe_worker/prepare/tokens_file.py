"""The files of tokens/: one Arrow stream a shard, together a directory that `datasets.load_from_disk` opens.

Written by prepare; read by extract, finalize, verify and the reader. Lists are int64 and the format is `torch`, because
speculators compares `dataset[i]["input_ids"]` with a tensor of int64 token ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headframe_api.errors import DataError
from headframe_api.names import TOKENS_PREFIX, tokens_key

DATASET_INFO_KEY = f"{TOKENS_PREFIX}dataset_info.json"
STATE_KEY = f"{TOKENS_PREFIX}state.json"
_FEATURES = {
    "input_ids": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "loss_mask": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "seq_len": {"dtype": "int64", "_type": "Value"},
    "sample_id": {"dtype": "string", "_type": "Value"},
}
SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())),
        ("seq_len", pa.int64()),
        ("sample_id", pa.string()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


@dataclass(frozen=True)
class _Batch:
    """One record batch of the file; the token arrays are views of the mapped file."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.int64]
    offsets: NDArray[np.int64]


@dataclass(frozen=True)
class TokensShard:
    """The samples of one shard, N samples of T tokens together, read lazily from a mapped file."""

    path: Path
    batches: tuple[_Batch, ...]
    first_rows: NDArray[np.int64]
    """The first row of each batch, relative to the shard, and N at the end."""
    seq_len: NDArray[np.int64]
    """[N] lengths in tokens."""
    id_column: pa.ChunkedArray

    def __len__(self) -> int:
        return len(self.seq_len)

    def sample(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """(input_ids [t], loss_mask [t]) of one row, relative to the shard; only its own bytes are read."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        index = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        batch = self.batches[index]
        within = row - int(self.first_rows[index])
        span = slice(int(batch.offsets[within]), int(batch.offsets[within + 1]))
        return batch.input_ids[span], batch.loss_mask[span].astype(np.uint8)

    @cached_property
    def sample_ids(self) -> list[str]:
        """[N] ids; they need not be unique."""
        return [str(value) for value in self.id_column.to_pylist()]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[N + 1]: sample i is tokens offsets[i] to offsets[i + 1] of the flat arrays."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.seq_len)])

    @cached_property
    def input_ids(self) -> NDArray[np.int64]:
        """[T] of all samples: a view where the file has one batch, else a copy. `sample` never copies the whole."""
        return _joined([batch.input_ids for batch in self.batches])

    @cached_property
    def loss_mask(self) -> NDArray[np.uint8]:
        """[T] of all samples, a copy."""
        return _joined([batch.loss_mask for batch in self.batches]).astype(np.uint8)


def read_tokens(path: Path) -> TokensShard:
    """Map a shard's tokens file. Raises DataError where it is not one."""
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        if not table.schema.equals(SCHEMA):
            raise DataError(f"{path}: not a file of tokens: its columns are {', '.join(table.schema.names)}")
        table.validate(full=True)  # Arrow trusts a file's offsets: a damaged one would end the process
        batches = [_batch_views(batch, path) for batch in table.to_batches()]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as a file of tokens: {error}") from error
    rows = np.array([0, *(len(batch.offsets) - 1 for batch in batches)], dtype=np.int64)
    lengths = [np.diff(batch.offsets) for batch in batches]
    return TokensShard(path, tuple(batches), np.cumsum(rows), _joined(lengths), table.column("sample_id"))


def _batch_views(batch: pa.RecordBatch, path: Path) -> _Batch:
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    offsets = np.asarray(ids.offsets, dtype=np.int64)
    if ids.null_count or mask.null_count or not np.array_equal(offsets, np.asarray(mask.offsets, dtype=np.int64)):
        raise DataError(f"{path}: input_ids and loss_mask differ in length")
    if not np.array_equal(np.diff(offsets), batch.column("seq_len").to_numpy()):
        raise DataError(f"{path}: seq_len differs from the lengths of input_ids")
    values: NDArray[np.int64] = ids.values.to_numpy(zero_copy_only=True)
    learned: NDArray[np.int64] = mask.values.to_numpy(zero_copy_only=True)
    if np.any(learned & ~1):
        raise DataError(f"{path}: loss_mask holds values other than 0 and 1")
    return _Batch(values, learned, offsets)


def _joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


class TokensWriter:
    """Writes one shard's file batch by batch."""

    def __init__(self, writer: pa.RecordBatchStreamWriter) -> None:
        self._writer = writer

    def write(
        self,
        input_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        lengths: NDArray[np.int64],
        sample_ids: pa.Array,
    ) -> None:
        """Append samples: flat tokens [T] and masks [T], lengths [N], ids [N] as an Arrow string array."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int32)
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(input_ids.astype(np.int64))),
            pa.ListArray.from_arrays(offsets, pa.array(loss_mask.astype(np.int64))),
            pa.array(lengths.astype(np.int64)),
            sample_ids,
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


@contextmanager
def tokens_writer(path: Path) -> Iterator[TokensWriter]:
    """Create one shard's file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        yield TokensWriter(writer)


def directory_files(shards: int, digest: str) -> dict[str, bytes]:
    """The two JSON files, by key, that make the shards' files a `save_to_disk` directory; the digest names its content."""
    info = {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""}
    state: dict[str, object] = {
        "_data_files": [{"filename": tokens_key(shard).removeprefix(TOKENS_PREFIX)} for shard in range(shards)],
        "_fingerprint": hashlib.sha256(digest.encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    return {
        DATASET_INFO_KEY: json.dumps(info, indent=2).encode() + b"\n",
        STATE_KEY: json.dumps(state, indent=2).encode() + b"\n",
    }
