"""`headframe bench`: load the job's model as a worker does, then measure ever more of the way, within a time.

    ceiling -> the model's matrix products -> its forward -> tokens to committed parts, on the job's medium

The job's output is read, never written: where it is not prepared, a sample of the dataset is prepared in scratch space, and
what the last step writes goes to a temporary place (see `place`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from headframe_api.errors import ConfigError, StoppedError
from headframe_api.job import ExtractionJob
from headframe_api.names import tokens_key
from headframe_api.plan import Plan
from headframe_worker.bench.commits import CommitMeter
from headframe_worker.bench.estimate import Estimate, estimate
from headframe_worker.bench.matmuls import ceiling, record_products, replay_seconds
from headframe_worker.bench.place import free_bytes, temporary_place
from headframe_worker.bench.timing import median_seconds
from headframe_worker.bench.trial import Trial, TrialRunner
from headframe_worker.bench.workload import ShardBatch, count_tokens, evenly, padding, shard_batches, token_ids
from headframe_worker.engine.engine import Engine, StartSeconds
from headframe_worker.engine.loading import choose_devices
from headframe_worker.engine.pipeline import WRITERS
from headframe_worker.engine.states import TORCH_DTYPE
from headframe_worker.extract.run_record import versions
from headframe_worker.extract.stage import Extractor
from headframe_worker.meter import Meter
from headframe_worker.prepare.resume import read_plan
from headframe_worker.prepare.stage import prepare
from headframe_worker.prepare.tokens_file import TokensShard, read_tokens
from headframe_worker.stores.base import Store
from headframe_worker.stores.local import LocalStore
from headframe_worker.stores.observer import tell
from headframe_worker.stores.open import open_store

_CEILING, _MATMULS, _FORWARD, _END_TO_END = 0.03, 0.2, 0.2, 0.45
"""Shares of the time after the model is loaded."""
_ONE_PASS = 0.07
"""Of that time, what one pass over the batches of a forward takes; it is warmed up first, and repeated."""
_LEAST = 0.25
"""Of the whole time, what is measured in where loading took longer."""
_ROOM = 0.5
"""Of the free disk, what the trial may fill."""
_PARTS = 12
"""At least so many, for the pipeline to run steadily."""


@dataclass(frozen=True)
class BenchOptions:
    """What the command line adds to the manifest."""

    seconds: float
    """About how long all of it may take; loading the model counts, and is not cut short."""
    sample_rows: int
    """Rows of the dataset to prepare where the output is not prepared."""
    output: str | None
    """Where the trial's parts go; None takes a place beside the job's output."""
    scratch: Path


@dataclass(frozen=True)
class BenchResult:
    """What one replica of the model makes of the job on this machine. Rates are of real tokens: padding is time, not work."""

    device: str
    versions: dict[str, str]
    fusions: list[str]
    slow_path: list[str]
    plan: Plan
    """The job's, or that of a sample of its dataset."""
    is_sample: bool
    batch_tokens: int
    out_of_memory_retries: int
    padding_fraction: float
    """Of the batches of one whole shard."""
    start_seconds: StartSeconds
    ceiling_flops: float
    """FLOP/s of a square matrix product, all devices of the replica together."""
    flops_per_token: float
    """Of the model's matrix products, for each real token; what padding costs is in it."""
    matmul_tokens_per_second: float
    forward_tokens_per_second: float
    trial: Trial
    estimate: Estimate | None
    """Of the job's plan; None where only a sample is prepared."""


def bench(
    job: ExtractionJob,
    options: BenchOptions,
    *,
    on_step: Callable[[str], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> BenchResult:
    """Measure a job on this machine. Raises what preparing and extracting it would raise, StoppedError after the wish to stop."""
    started = time.monotonic()
    stop = stop or threading.Event()
    devices = choose_devices(job.spec.model.gpus)
    meter = CommitMeter()

    def step(name: str) -> None:
        if stop.is_set():
            raise StoppedError("stopped as asked; what was written is removed")
        on_step(name)

    with temporary_place(job.spec.output.uri, options.output, job.spec.s3, tell(meter, stop)) as place:
        step("tokens")
        with _prepared(job, options, stop) as (source, plan, is_sample):
            extractor = Extractor(job, plan, source, devices=devices, scratch=options.scratch, meter=meter, stop=stop)
            with closing(extractor):
                step("loading the model")
                engine = extractor.load()
                if engine is None:
                    raise ConfigError(f"{job.spec.dataset.source}: gives no samples, so there is nothing to measure")
                left = max(options.seconds - (time.monotonic() - started), _LEAST * options.seconds)
                shard = max(plan.shards, key=lambda entry: entry.tokens)
                tokens = read_tokens(source.fetch(tokens_key(shard.index), options.scratch))
                runner = TrialRunner(job, plan, tokens, engine, devices, meter, place, options.scratch, stop)
                return _measure(runner, is_sample, left, step)


def _measure(runner: TrialRunner, is_sample: bool, left: float, step: Callable[[str], None]) -> BenchResult:
    """All that needs the model, in about `left` seconds."""
    engine, plan, devices = runner.engine, runner.plan, runner.devices
    batches = shard_batches(plan, runner.tokens, engine.batch_tokens)
    step("ceiling")
    dtype = TORCH_DTYPE[plan.model.dtype]
    flops = len(devices) * ceiling(devices[0], dtype, within_seconds=_CEILING * left)
    step("forward")
    forward = _measure_forward(engine, runner.tokens, batches, devices, left)
    step("end to end")
    seconds = _END_TO_END * left
    trial = _measure_end_to_end(runner, batches, forward.tokens_per_second * seconds, seconds)
    facts = engine.facts
    return BenchResult(
        device=facts.device,
        versions=versions(),
        fusions=list(facts.fusions.applied),
        slow_path=list(facts.slow_path),
        plan=plan,
        is_sample=is_sample,
        batch_tokens=engine.batch_tokens,
        out_of_memory_retries=runner.meter.out_of_memory_retries,
        padding_fraction=padding(batches),
        start_seconds=facts.start_seconds,
        ceiling_flops=flops,
        flops_per_token=forward.flops_per_token,
        matmul_tokens_per_second=forward.matmul_tokens_per_second,
        forward_tokens_per_second=forward.tokens_per_second,
        trial=trial,
        estimate=None if is_sample else _hours(runner.job, plan, trial, facts.load_seconds),
    )


def _hours(job: ExtractionJob, plan: Plan, trial: Trial, load_seconds: float) -> Estimate:
    return estimate(
        [shard.tokens for shard in plan.shards],
        tokens_per_second=trial.tokens_per_second,
        load_seconds=load_seconds,
        workers=job.spec.workers,
    )


@contextmanager
def _prepared(job: ExtractionJob, options: BenchOptions, stop: threading.Event) -> Iterator[tuple[Store, Plan, bool]]:
    """(store of tokens/, plan, whether it is a sample's): the job's own where it is prepared."""
    output = open_store(job.spec.output.uri, job.spec.s3)
    with closing(output):
        plan = read_plan(output)
        if plan is not None:
            # This writes nothing: it compares the plan that is there with the manifest.
            prepare(
                job,
                output,
                scratch=options.scratch,
                meter=Meter("prepare"),
                part_target_bytes=plan.part_target_bytes,
                stop=stop,
            )
            yield output, plan, False
            return
    sample = LocalStore(options.scratch / "sample")
    prepared = prepare(
        _sample_job(job, options.sample_rows), sample, scratch=options.scratch, meter=Meter("prepare"), stop=stop
    )
    yield sample, prepared.plan, True


def _sample_job(job: ExtractionJob, rows: int) -> ExtractionJob:
    spec = job.spec
    limit = min(rows, spec.dataset.limit or rows)
    sampled = spec.model_copy(
        update={
            "dataset": spec.dataset.model_copy(update={"limit": limit}),
            "shards": 1,
            # A few bad rows may all be among the first.
            "failure_policy": spec.failure_policy.model_copy(update={"max_quarantined_fraction": 1.0}),
        }
    )
    return job.model_copy(update={"spec": sampled})


@dataclass(frozen=True)
class _Forward:
    tokens_per_second: float
    matmul_tokens_per_second: float
    flops_per_token: float


def _measure_forward(
    engine: Engine, tokens: TokensShard, batches: Sequence[ShardBatch], devices: Sequence[torch.device], left: float
) -> _Forward:
    """The stack alone, nothing captured, on batches from all over the shard; then its matrix products alone."""
    stack = engine.stack
    probe = token_ids(tokens, batches[len(batches) // 2], devices[0])
    with torch.inference_mode():
        probe_seconds = median_seconds(lambda: stack.forward(probe), devices, repeats=1)
    per_token = probe_seconds / batches[len(batches) // 2].batch.tokens
    drawn = evenly(batches, math.ceil(_ONE_PASS * left / per_token))
    inputs = [token_ids(tokens, entry, devices[0]) for entry in drawn]

    def forward() -> None:
        for ids in inputs:
            stack.forward(ids)

    with torch.inference_mode():
        forward_seconds = median_seconds(forward, devices, within_seconds=_FORWARD * left)
    products = record_products(forward)
    matmul_seconds = replay_seconds(products, within_seconds=_MATMULS * left)
    real = count_tokens(drawn)
    return _Forward(real / forward_seconds, real / matmul_seconds, sum(product.flops for product in products) / real)


def _measure_end_to_end(runner: TrialRunner, batches: Sequence[ShardBatch], wanted: float, seconds: float) -> Trial:
    """Of about `wanted` tokens, or of as many as the medium takes in so many seconds, and half of its room."""
    if (free := free_bytes(runner.place)) is not None:
        wanted = min(wanted, _ROOM * free / runner.token_bytes)
    part_tokens = min(wanted / _PARTS, runner.plan.part_target_bytes / runner.token_bytes)
    warm = runner.run(evenly(batches, int(part_tokens)), parts=1)
    writable = WRITERS * warm.write_bytes_per_second * seconds / runner.token_bytes
    return runner.run(evenly(batches, int(min(wanted, writable))), parts=_PARTS)
