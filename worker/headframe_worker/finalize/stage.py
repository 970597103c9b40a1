"""The stage finalize: all shards checked against the plan, then the index, the manifest, the report, and `_SUCCESS` last.

A dataset is finished by exactly one thing: `_SUCCESS`, which holds the digest of manifest.json.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

from headframe_api.errors import ConfigError, DataError, StoppedError, TemporaryError
from headframe_api.job import ExtractionJob
from headframe_api.manifests import DatasetManifest
from headframe_api.names import MANIFEST_KEY, REPORT_KEY, SAMPLES_KEY, STATES_PREFIX, SUCCESS_KEY, shard_manifest_key
from headframe_api.plan import TOO_LONG, Plan
from headframe_api.spec import FailurePolicy
from headframe_worker.documents import read_manifest, read_plan
from headframe_worker.finalize.fault import Fault, fault_list
from headframe_worker.finalize.report import render_report
from headframe_worker.finalize.samples_index import SamplesWriter
from headframe_worker.finalize.shard_check import check_shard
from headframe_worker.finalize.totals import DatasetTotals
from headframe_worker.in_order import in_order
from headframe_worker.meter import Meter
from headframe_worker.stores.base import Store
from headframe_worker.stores.missing import MissingObjectError

_THREADS = 8


def finalize(
    job: ExtractionJob, output: Store, *, scratch: Path, meter: Meter, stop: Event | None = None
) -> DatasetManifest:
    """Check that every sample of the plan is stored once and as tokens/ has it, then finish the dataset.

    Run again on a finished output, it checks everything again and leaves the files as they are.

    Raises TemporaryError where more shards are missing than failurePolicy.maxFailedShards allows (extract may still
    bring them), DataError with the list of faults, or where more samples are in quarantine than
    failurePolicy.maxQuarantinedFraction allows, ConfigError where plan.json is not what it was, StoppedError once `stop`
    is set.
    """
    plan = read_plan(output)
    policy = job.spec.failure_policy
    sizes = {info.key: info.size_bytes for info in output.list(STATES_PREFIX)}
    _check_missing(plan, output, sizes, policy)
    meter.begin_stage(samples_total=plan.samples, tokens_total=plan.tokens)
    with _scratch(scratch) as folder:
        index = folder / SAMPLES_KEY
        totals = _check_shards(plan, output, sizes, folder, index, meter, stop or Event())
        _refuse_missing(plan, totals.failed, policy)  # again: a listing may show a manifest that is gone
        _check_quarantine(plan, totals.quarantined - plan.quarantined.get(TOO_LONG, 0), policy)
        manifest = totals.manifest(_sha256(index))
        finished = _finished(output, manifest, folder)
        if finished is None:
            _write(output, plan, manifest, index)
        output.clean_up(STATES_PREFIX, settled=True)
    meter.set_state("done")
    return finished or manifest


def _check_missing(plan: Plan, output: Store, sizes: dict[str, int], policy: FailurePolicy) -> None:
    unlisted = [shard.index for shard in plan.shards if shard_manifest_key(shard.index) not in sizes]
    there = in_order(lambda shard: output.exists(shard_manifest_key(shard)), unlisted, threads=_THREADS)
    _refuse_missing(plan, [shard for shard, is_there in zip(unlisted, there, strict=True) if not is_there], policy)


def _refuse_missing(plan: Plan, missing: Sequence[int], policy: FailurePolicy) -> None:
    if len(missing) > policy.max_failed_shards:
        raise TemporaryError(
            f"{len(missing)} of {len(plan.shards)} shards are not extracted yet: {_some(missing)}; extract them "
            f"(`headframe extract --shard N`), or let spec.failurePolicy.maxFailedShards ({policy.max_failed_shards}) allow it",
            reason="MissingShards",
        )


def _check_shards(
    plan: Plan, output: Store, sizes: dict[str, int], scratch: Path, index: Path, meter: Meter, stop: Event
) -> DatasetTotals:
    """Check every shard and write its lines to the index; raise DataError with all faults."""
    totals, faults = DatasetTotals(plan), list[Fault]()
    check = partial(check_shard, plan, store=output, sizes=sizes, scratch=scratch)
    with SamplesWriter(index) as writer:
        for shard in in_order(check, plan.shards, threads=_THREADS):
            if stop.is_set():
                raise StoppedError("stopped while checking the shards; run finalize again")
            faults += shard.faults
            if not shard.faults:
                totals.add(shard)
                writer.add(shard.samples)
            meter.advance(samples=shard.plan.samples, tokens=shard.plan.tokens)
    faults += stray_shards(plan, sizes)
    if faults:
        raise DataError(
            f"{output.uri}: the states are not what the plan and tokens/ say, {len(faults)} faults:\n{fault_list(faults)}\n"
            "Delete the named shards' folders and extract them again.",
            reason="StatesDiffer",
        )
    return totals


def stray_shards(plan: Plan, sizes: Mapping[str, int]) -> list[Fault]:
    """Objects under states/ that belong to no shard of the plan."""
    planned = {shard_manifest_key(shard.index).rpartition("/")[0] for shard in plan.shards}
    return [Fault(key, "belongs to no shard of the plan") for key in sizes if key.rpartition("/")[0] not in planned]


def _check_quarantine(plan: Plan, quarantined: int, policy: FailurePolicy) -> None:
    if quarantined > policy.max_quarantined_fraction * plan.rows_in:
        raise DataError(
            f"{quarantined:,} of {plan.rows_in:,} input samples are in quarantine, more than "
            f"spec.failurePolicy.maxQuarantinedFraction ({policy.max_quarantined_fraction:g}) allows; "
            f"quarantine/*.jsonl says which and why",
            reason="TooManyQuarantined",
        )


def _finished(output: Store, manifest: DatasetManifest, scratch: Path) -> DatasetManifest | None:
    """The manifest that a finished output has, if it says what was found just now."""
    try:
        success = output.read(SUCCESS_KEY).decode().strip()
        data = output.read(MANIFEST_KEY)
        if (
            success != _digest(data)
            or _sha256(output.fetch(SAMPLES_KEY, scratch / "stored"))
            != (stored := read_manifest(output)).samples_digest
        ):
            return None
    except (MissingObjectError, UnicodeDecodeError, ConfigError):
        return None
    # Another version of pyarrow may write the same index as other bytes.
    volatile = {"created_at": "", "versions": {}, "samples_digest": ""}
    return stored if stored.model_copy(update=volatile) == manifest.model_copy(update=volatile) else None


def _write(output: Store, plan: Plan, manifest: DatasetManifest, index: Path) -> None:
    output.delete([SUCCESS_KEY])
    output.write_file(SAMPLES_KEY, index)
    output.write(REPORT_KEY, [memoryview(render_report(output, plan, manifest, index).encode())])
    data = manifest.to_json()
    output.write(MANIFEST_KEY, [memoryview(data)])
    output.write(SUCCESS_KEY, [memoryview(f"{_digest(data)}\n".encode())])


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix="finalize-") as name:
        yield Path(name)


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:20]))
    return f"{shown} and {len(numbers) - 20} more" if len(numbers) > 20 else shown
