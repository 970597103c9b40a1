"""The samples of one shard as `tokens/` holds them: an Arrow file of `save_to_disk`, mapped into memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headframe_api.errors import DataError


@dataclass(frozen=True)
class TokensShard:
    """The samples of one shard, N rows one after the other."""

    input_ids: NDArray[Any]
    """All rows' token ids, flat."""
    loss_mask: NDArray[Any]
    """All rows' loss masks, flat."""
    offsets: NDArray[np.int64]
    """[N + 1]: row i is offsets[i] to offsets[i + 1]."""
    seq_len: NDArray[np.int64]
    """[N], in tokens."""
    id_column: pa.Array
    """[N] strings."""


def read_tokens(path: Path) -> TokensShard:
    """Read one tokens file. Raises DataError where it is none, or its columns disagree."""
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_stream(source).read_all()
        ids, masks, lengths, names = (
            table.column(name).combine_chunks() for name in ("input_ids", "loss_mask", "seq_len", "sample_id")
        )
        offsets = _offsets(ids)
        if not np.array_equal(offsets, _offsets(masks)) or not np.array_equal(np.diff(offsets), lengths.to_numpy()):
            raise DataError(f"{path}: input_ids, loss_mask and seq_len differ in length")
        return TokensShard(ids.flatten().to_numpy(), masks.flatten().to_numpy(), offsets, np.diff(offsets), names)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataError(f"{path}: not a tokens file: {error}") from error


def _offsets(lists: Any) -> NDArray[np.int64]:
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0] if len(offsets) else np.zeros(1, np.int64)
