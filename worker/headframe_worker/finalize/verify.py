"""`headframe verify`: everything in a finished dataset read again and held against everything it says of itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from headframe_api.errors import ConfigError, DataError
from headframe_api.manifests import DatasetManifest
from headframe_api.names import (
    MANIFEST_KEY,
    PLAN_KEY,
    SAMPLES_KEY,
    STATES_PREFIX,
    SUCCESS_KEY,
    part_key,
    shard_manifest_key,
)
from headframe_api.plan import Plan
from headframe_worker.documents import read_manifest, read_plan
from headframe_worker.finalize.beside_states import (
    extract_quarantine_faults,
    prepare_quarantine_faults,
    tokens_directory_faults,
)
from headframe_worker.finalize.fault import Fault
from headframe_worker.finalize.index_check import index_faults, manifest_faults
from headframe_worker.finalize.part_content import content_faults
from headframe_worker.finalize.samples_index import SamplesWriter
from headframe_worker.finalize.shard_check import check_shard
from headframe_worker.finalize.stage import stray_shards
from headframe_worker.finalize.totals import DatasetTotals
from headframe_worker.in_order import in_order
from headframe_worker.stores.base import Store
from headframe_worker.stores.missing import MissingObjectError

_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Verification:
    """What was read, and every fault that was found."""

    faults: list[Fault]
    samples: int
    tokens: int
    bytes: int
    parts: int


@dataclass(frozen=True)
class _Found:
    """What a pass over all shards leaves."""

    faults: list[Fault]
    totals: DatasetTotals
    parts: int


def verify(
    store: Store, *, scratch: Path, on_size: Callable[[int], object], on_bytes: Callable[[int], object]
) -> Verification:
    """Read every part of a finished dataset and check it; `on_size` gets the bytes to read, `on_bytes` those just read.

    Raises ConfigError where the dataset is not finished: there is nothing to verify yet.
    """
    plan, manifest, faults = _documents(store)
    if plan is None or manifest is None:
        return Verification(faults, 0, 0, 0, 0)
    sizes = {info.key: info.size_bytes for info in store.list(STATES_PREFIX)}
    parts_bytes = sum(size for key, size in sizes.items() if key.endswith(".safetensors"))
    on_size(parts_bytes)
    scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=scratch, prefix="verify-") as name:
        folder = Path(name)
        expected = folder / SAMPLES_KEY
        found = _read_shards(plan, manifest, store, sizes, expected, on_bytes)
        faults += [*found.faults, *tokens_directory_faults(plan, store), *prepare_quarantine_faults(plan, store)]
        if not found.faults:  # else all that follows would differ too, and say nothing new
            faults += manifest_faults(manifest, found.totals.manifest(""))
            faults += _stored_index_faults(store, manifest, expected, folder)
    return Verification(sorted(set(faults)), manifest.samples, manifest.tokens, parts_bytes, found.parts)


def _documents(store: Store) -> tuple[Plan | None, DatasetManifest | None, list[Fault]]:
    """plan.json and manifest.json; a file that is there but wrong is a fault, one that is not there is a ConfigError."""
    faults: list[Fault] = []
    plan = manifest = None
    try:
        plan = read_plan(store)
    except (ConfigError, DataError) as error:
        if error.reason == "MissingObject":
            raise
        faults.append(Fault(PLAN_KEY, error.message))
    try:
        manifest = read_manifest(store)
    except DataError as error:
        faults.append(Fault(MANIFEST_KEY, error.message))
    try:
        success = store.read(SUCCESS_KEY).decode(errors="replace").strip()
    except MissingObjectError as error:
        raise ConfigError(
            f"{store.uri}: has no {SUCCESS_KEY}: the dataset is not finished; run `headframe finalize`",
            reason="NotFinished",
        ) from error
    digest = f"sha256:{hashlib.sha256(store.read(MANIFEST_KEY)).hexdigest()}"
    if success != digest:
        faults.append(Fault(MANIFEST_KEY, f"has the digest {digest}, {SUCCESS_KEY} says {success[:80]}"))
    return plan, manifest, faults


def _read_shards(
    plan: Plan,
    manifest: DatasetManifest,
    store: Store,
    sizes: Mapping[str, int],
    index: Path,
    on_bytes: Callable[[int], object],
) -> _Found:
    """Check every shard and read all its parts; write to `index` what samples.parquet should say."""
    faults, totals, parts = stray_shards(plan, sizes), DatasetTotals(plan), 0
    check = partial(check_shard, plan, store=store, sizes=sizes, scratch=index.parent)

    def keys_to_read() -> Iterator[str]:
        with SamplesWriter(index) as writer:
            for shard in in_order(check, plan.shards, threads=_THREADS):
                faults.extend(shard.faults)
                if not shard.faults:
                    totals.add(shard)
                    writer.add(shard.samples)
                if shard.manifest is not None:
                    faults.extend(extract_quarantine_faults(shard.manifest, store))
                    damaged = {fault.place for fault in shard.faults}
                    keys = [part_key(shard.plan.index, entry.part) for entry in shard.manifest.parts]
                    yield from (key for key in keys if key in sizes and key not in damaged)
                elif not shard.faults and shard.plan.index not in manifest.failed_shards:
                    faults.append(Fault(shard_manifest_key(shard.plan.index), "is missing"))

    def read(key: str) -> list[Fault]:
        found = content_faults(plan, key, sizes[key], store)
        on_bytes(sizes[key])
        return found

    for found in in_order(read, keys_to_read(), threads=_THREADS):
        faults.extend(found)
        parts += 1
    return _Found(faults, totals, parts)


def _stored_index_faults(store: Store, manifest: DatasetManifest, expected: Path, scratch: Path) -> list[Fault]:
    try:
        stored = store.fetch(SAMPLES_KEY, scratch / "stored")
    except MissingObjectError:
        return [Fault(SAMPLES_KEY, "is missing")]
    faults = list(index_faults(stored, expected))
    with stored.open("rb") as file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    if digest != manifest.samples_digest:
        faults.append(Fault(SAMPLES_KEY, f"has the digest {digest}, the manifest says {manifest.samples_digest}"))
    return faults
