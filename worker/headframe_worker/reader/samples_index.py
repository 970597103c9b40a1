"""samples.parquet in memory: where each sample lies, in few bytes a sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headframe_api.errors import DataError


@dataclass(frozen=True)
class SamplesIndex:
    """N stored samples, in the order of their rows."""

    rows: NDArray[np.int64]
    sample_ids: pa.ChunkedArray
    shards: NDArray[np.int32]
    parts: NDArray[np.int32]
    starts: NDArray[np.int64]
    """First token within the part."""
    lengths: NDArray[np.int32]
    """In tokens."""
    loss_tokens: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.rows)


def load_samples_index(path: Path) -> SamplesIndex:
    """Read samples.parquet. Raises DataError where it is not one."""
    try:
        table = pq.read_table(path, memory_map=True)
        rows, shards, parts, starts, lengths, loss_tokens = (
            table.column(name).to_numpy() for name in ("row", "shard", "part", "start", "length", "loss_tokens")
        )
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataError(f"{path}: not an index of samples: {error}") from error
    return SamplesIndex(rows, table.column("sample_id"), shards, parts, starts, lengths, loss_tokens)
