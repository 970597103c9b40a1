"""samples.parquet and manifest.json against what the shards hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headframe_api.manifests import DatasetManifest
from headframe_api.names import MANIFEST_KEY, SAMPLES_KEY
from headframe_worker.finalize.fault import Fault

_BATCH_ROWS = 1 << 16
_VOLATILE = frozenset(("created_at", "versions", "samples_digest"))


def manifest_faults(stored: DatasetManifest, found: DatasetManifest) -> Iterator[Fault]:
    """Fields in which the stored manifest differs from one made of the shards as they are."""
    for name in DatasetManifest.model_fields:
        was, now = getattr(stored, name), getattr(found, name)
        if name not in _VOLATILE and was != now:
            yield Fault(MANIFEST_KEY, f"{name} is {_short(was)}, the shards say {_short(now)}")


def index_faults(stored: Path, expected: Path) -> Iterator[Fault]:
    """The first line in which samples.parquet differs from one made of the shards as they are."""
    try:
        with pq.ParquetFile(stored) as one, pq.ParquetFile(expected) as other:
            if not one.schema_arrow.equals(other.schema_arrow):
                yield Fault(SAMPLES_KEY, f"has the columns {', '.join(one.schema_arrow.names)}")
                return
            if one.metadata.num_rows != other.metadata.num_rows:
                yield Fault(
                    SAMPLES_KEY, f"has {one.metadata.num_rows:,} lines, the shards {other.metadata.num_rows:,} samples"
                )
            batches = zip_longest(one.iter_batches(_BATCH_ROWS), other.iter_batches(_BATCH_ROWS))
            for number, (found, wanted) in enumerate(batches):
                if found is None or wanted is None or not found.equals(wanted):
                    yield _first_difference(found, wanted, number * _BATCH_ROWS)
                    return
    except (pa.ArrowException, OSError) as error:
        yield Fault(SAMPLES_KEY, f"cannot be read: {' '.join(str(error).split())[:200]}")


def _first_difference(found: pa.RecordBatch | None, wanted: pa.RecordBatch | None, before: int) -> Fault:
    lines = zip_longest(found.to_pylist() if found else [], wanted.to_pylist() if wanted else [])
    number, (one, other) = next((number, pair) for number, pair in enumerate(lines) if pair[0] != pair[1])
    return Fault(f"{SAMPLES_KEY} line {before + number}", f"says {one or 'nothing'}, should say {other or 'nothing'}")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
