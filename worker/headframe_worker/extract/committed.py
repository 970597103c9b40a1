"""What earlier runs, or another worker at this moment, committed of a shard; a part that is there is never computed again."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from headframe_api.errors import ConfigError, DataError
from headframe_api.manifests import PartEntry
from headframe_api.names import part_key
from headframe_api.plan import Plan
from headframe_worker.format.cut import PartPlan
from headframe_worker.reader.stored_part import read_header
from headframe_worker.stores.base import Store
from headframe_worker.stores.missing import MissingObjectError

_PARALLEL_READS = 16
_LENGTH_FIELD_BYTES = 8


def committed_parts(
    plan: Plan, shard: int, planned: Mapping[int, PartPlan], sizes: Mapping[str, int], store: Store
) -> dict[int, PartEntry]:
    """The entries of the parts that exist, by number; their headers are read by ranged requests, several at a time.

    `sizes`: the listing of the shard's prefix. Raises ConfigError where a part belongs to another plan, DataError where it
    is damaged or holds other samples than planned.
    """
    keys = {number: part_key(shard, number) for number in planned}
    found = [number for number, key in keys.items() if key in sizes]
    with ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="headers") as threads:
        entries = threads.map(
            lambda number: _listed_part(plan, shard, planned[number], store, sizes[keys[number]]), found
        )
        return {number: entry for number, entry in zip(found, entries, strict=True) if entry is not None}


def _listed_part(plan: Plan, shard: int, planned: PartPlan, store: Store, size_bytes: int) -> PartEntry | None:
    try:
        return committed_part(plan, shard, planned, store, size_bytes=size_bytes)
    except MissingObjectError:  # the listing lags behind its deletion
        return None


def committed_part(
    plan: Plan, shard: int, planned: PartPlan, store: Store, *, size_bytes: int | None = None
) -> PartEntry:
    """The entry of a part that exists, after its header was checked."""
    key = part_key(shard, planned.part)
    header = read_header(store, key, at_least_bytes=_LENGTH_FIELD_BYTES if size_bytes is None else size_bytes)
    where, metadata, entry = f"{store.uri}/{key}", header.metadata, header.entry
    if metadata.plan != plan.digest:
        raise ConfigError(
            f"{where}: belongs to plan {metadata.plan}, not to {plan.digest}; choose another spec.output.uri, or delete what is there",
            reason="ForeignOutput",
        )
    if (metadata.shard, metadata.part) != (shard, planned.part):
        raise DataError(
            f"{where}: says that it is part {metadata.part} of shard {metadata.shard}", reason="DamagedOutput"
        )
    if size_bytes is not None and size_bytes != header.size_bytes:
        raise DataError(
            f"{where}: has {size_bytes:,} bytes, its header needs {header.size_bytes:,}; delete it and run again",
            reason="DamagedOutput",
        )
    if entry.samples + len(entry.quarantined) != len(planned.rows):
        raise DataError(
            f"{where}: holds {entry.samples:,} samples and {len(entry.quarantined):,} in quarantine, planned were "
            f"{len(planned.rows):,}; delete it and run again",
            reason="DamagedOutput",
        )
    return entry
