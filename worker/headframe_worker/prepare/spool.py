"""Tokens between the two passes: all samples in one scratch file, so that memory does not grow with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headframe_worker.prepare.encoder import EncodedBlock

_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("sample_id", pa.string())]
)


@dataclass(frozen=True)
class SpooledBlock:
    """A block's samples as they come back."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    sample_ids: pa.Array


class Spool:
    """Written once from front to back, then read once from front to back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_stream(self._sink, _SCHEMA)

    def append(self, block: EncodedBlock) -> None:
        """Add a block's samples."""
        if not len(block.lengths):
            return
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(block.lengths)]).astype(np.int32)
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(block.input_ids)),
            pa.ListArray.from_arrays(offsets, pa.array(block.loss_mask)),
            pa.array(block.sample_ids, pa.string()),
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))

    def finish(self) -> None:
        """No more blocks come."""
        self._writer.close()
        self._sink.close()

    def blocks(self) -> Iterator[SpooledBlock]:
        """All samples in order, block by block, through ordinary reads: a mapped file would count as our memory."""
        with pa.OSFile(str(self._path)) as data:
            for batch in pa.ipc.open_stream(data):
                ids, mask = batch.column("input_ids"), batch.column("loss_mask")
                offsets: NDArray[np.int64] = ids.offsets.to_numpy().astype(np.int64)
                yield SpooledBlock(
                    ids.values.to_numpy(),
                    mask.values.to_numpy(),
                    np.diff(offsets),
                    batch.column("sample_id"),
                )
