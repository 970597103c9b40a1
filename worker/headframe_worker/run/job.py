"""The three stages one after the other, each of them resumable: what `headframe run` does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from headframe_api.errors import DataError, TemporaryError
from headframe_api.job import ExtractionJob
from headframe_api.manifests import DatasetManifest
from headframe_api.names import STATES_PREFIX, shard_manifest_key
from headframe_api.plan import Plan
from headframe_worker.finalize.stage import finalize
from headframe_worker.in_order import in_order
from headframe_worker.meter import Meter
from headframe_worker.prepare.stage import prepare
from headframe_worker.run.devices import worker_devices
from headframe_worker.run.display import ExtractDisplay
from headframe_worker.run.pool import WorkerPool
from headframe_worker.serve.server import MeterServer
from headframe_worker.signals import StopWish
from headframe_worker.stores.base import Store
from headframe_worker.stores.observer import StoreObserver
from headframe_worker.stores.open import open_store

_THREADS = 8


@dataclass(frozen=True)
class RunOptions:
    """What the command line adds to the manifest."""

    scratch: Path
    workers: int | None
    fresh: bool
    part_target_bytes: int
    quiet: bool
    port: int | None


def run_job(
    job: ExtractionJob, options: RunOptions, *, console: Console, note: Callable[[str], None], stop: StopWish
) -> DatasetManifest:
    """Prepare, extract, finalize. Raises a HeadframeError that carries the exit code."""
    output = open_store(job.spec.output.uri, job.spec.s3, observer=StoreObserver(stopping=stop.event.is_set))
    with closing(output):
        return _run_stages(job, output, options, console=console, note=note, stop=stop)


def _run_stages(
    job: ExtractionJob,
    output: Store,
    options: RunOptions,
    *,
    console: Console,
    note: Callable[[str], None],
    stop: StopWish,
) -> DatasetManifest:
    output.check_writable()
    # Before hours of tokenising, not after: a machine without the GPUs asked for cannot run the job.
    worker_devices(job.spec, 1, None)
    prepared = prepare(
        job,
        output,
        scratch=options.scratch,
        meter=Meter("prepare"),
        fresh=options.fresh,
        part_target_bytes=options.part_target_bytes,
        stop=stop.event,
    )
    for line in prepared.notes:
        note(line)
    _extract(job, prepared.plan, output, options, console=console, note=note, stop=stop)
    return finalize(job, output, scratch=options.scratch, meter=Meter("finalize"), stop=stop.event)


def _extract(
    job: ExtractionJob,
    plan: Plan,
    output: Store,
    options: RunOptions,
    *,
    console: Console,
    note: Callable[[str], None],
    stop: StopWish,
) -> None:
    committed = _committed_shards(output, plan)
    todo = [shard.index for shard in plan.shards if shard.index not in committed]
    if not todo:
        return
    output.clean_up()
    if committed:
        note(f"{len(committed)} of {len(plan.shards)} shards are done already; going on with the rest")
    devices = worker_devices(job.spec, len(todo), options.workers)
    pool = WorkerPool(job, plan, devices, scratch=options.scratch, stop=stop.event)
    by_index = {shard.index: shard for shard in plan.shards}
    with ExitStack() as shown:
        display = shown.enter_context(ExtractDisplay(console, plan, quiet=options.quiet))
        if options.port is not None:
            shown.enter_context(MeterServer(pool.meters, port=options.port))

        def update() -> None:
            done = [by_index[index] for index in (*committed, *pool.result.done)]
            running = [worker.meter for worker in pool.workers if worker.shard is not None or worker.process]
            display.update(
                done_samples=sum(shard.samples for shard in done),
                done_tokens=sum(shard.tokens for shard in done),
                meters=[meter for meter in running if meter.shard not in pool.result.done],
            )

        result = pool.run(todo, update)
    failed = result.failed
    if len(failed) > job.spec.failure_policy.max_failed_shards:
        first, message = next(iter(failed.items()))
        raise DataError(
            f"{len(failed)} shards failed, spec.failurePolicy.maxFailedShards allows "
            f"{job.spec.failure_policy.max_failed_shards}; shard {first}: {message}",
            reason="ShardsFailed",
        )
    if missing := set(todo) - set(result.done) - set(failed):
        raise TemporaryError(f"shards {sorted(missing)} are not done; run the same command again")


def _committed_shards(output: Store, plan: Plan) -> set[int]:
    keys = {info.key for info in output.list(STATES_PREFIX)}
    listed = [shard.index for shard in plan.shards if shard_manifest_key(shard.index) in keys]
    there = in_order(lambda shard: output.exists(shard_manifest_key(shard)), listed, threads=_THREADS)
    return {shard for shard, is_there in zip(listed, there, strict=True) if is_there}
