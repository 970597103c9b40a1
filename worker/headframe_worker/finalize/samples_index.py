"""samples.parquet: where each stored sample lies, in the order of their rows, written as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("part", pa.int32(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("loss_tokens", pa.int32(), nullable=False),
    ]
)
_GROUP_ROWS = 1 << 17


class SamplesWriter:
    """Collects shards' lines into row groups of like size, so that many small shards do not make many small groups."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SAMPLES_SCHEMA, compression="zstd")
        self._waiting: list[pa.Table] = []

    def add(self, table: pa.Table) -> None:
        """Append one shard's lines."""
        self._waiting.append(table)
        if sum(map(len, self._waiting)) >= _GROUP_ROWS:
            self._flush()

    def __enter__(self) -> SamplesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write_table(pa.concat_tables([SAMPLES_SCHEMA.empty_table(), *self._waiting]), _GROUP_ROWS)
        self._waiting.clear()


def read_columns(path: Path, names: list[str]) -> Iterator[dict[str, NDArray[np.int64]]]:
    """Some integer columns of samples.parquet, batch by batch."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=names):
            yield {name: batch.column(name).to_numpy().astype(np.int64, copy=False) for name in names}
