"""`headframe bench JOB`: what this machine makes of the job, before hours of it are spent."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from headframe_api.errors import StoppedError
from headframe_worker.cli.console import Json, Quiet, counted, err, facts_table, out, print_note, print_warning
from headframe_worker.cli.output_argument import Scratch
from headframe_worker.cli.run import JobFile
from headframe_worker.job_file import load_job
from headframe_worker.log import set_up_log
from headframe_worker.meter import WAITS
from headframe_worker.run.display import duration
from headframe_worker.signals import StopWish
from headframe_worker.size import human_bytes, human_flops

if TYPE_CHECKING:
    from headframe_api.job import ExtractionJob
    from headframe_worker.bench.estimate import Estimate
    from headframe_worker.bench.measure import BenchResult
    from headframe_worker.bench.trial import Trial

_SECONDS_PER_HOUR = 3600.0
_WORDS = {
    "self_check": "self-check",
    "warm_up": "warm-up",
    "waiting_data": "waiting for tokens",
    "waiting_write": "waiting for writes",
    "data": "reading tokens",
    "copy": "copying to the host",
    "write": "writing",
}


def command(
    job: JobFile,
    seconds: Annotated[
        float, typer.Option(min=1, help="About how long it may take. Loading the model counts, but is never cut short.")
    ] = 120.0,
    samples: Annotated[
        int,
        typer.Option(min=1, help="Where the output is not prepared: rows of the dataset to prepare and measure on."),
    ] = 2000,
    output: Annotated[
        str | None,
        typer.Option(
            help="Where parts are written and removed again: a directory or s3://bucket/prefix. Default: beside the job's output.",
            show_default=False,
        ),
    ] = None,
    scratch: Scratch = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure this machine on this job: matrix products, the model's forward, and from tokens to committed parts.

    Says what to expect of the whole job. The job's output is read, never written.
    """
    manifest = load_job(job)
    set_up_log()
    stop = StopWish()
    status = err.status("starting") if err.is_terminal and not quiet else None
    from headframe_worker.bench.measure import BenchOptions, bench

    def on_step(name: str) -> None:
        if status is not None:
            status.update(f"bench: {name}")

    with (
        stop.heard(),
        status or nullcontext(),
        tempfile.TemporaryDirectory(prefix="headframe-", dir=scratch, ignore_cleanup_errors=True) as folder,
    ):
        options = BenchOptions(seconds, samples, output, Path(folder))
        try:
            result = bench(manifest, options, on_step=on_step, stop=stop.event)
        except StoppedError:
            err.print("stopped; what was written is removed")
            raise typer.Exit(stop.exit_code) from None
    if json:
        out.print_json(data=_document(manifest, result))
        return
    if not quiet:
        for kernel in result.slow_path:
            print_warning(f"{kernel} runs on the slow torch path: its kernels are not installed, or cannot run here")
        if result.is_sample:
            print_note(
                f"{manifest.spec.output.uri} is not prepared: measured on the first {result.plan.rows_in:,} rows. "
                f"For the hours of the whole: headframe plan {job}, then this again"
            )
    out.print(_speeds(result))
    out.print()
    out.print(facts_table(_lines(manifest, result)))


def _document(job: ExtractionJob, result: BenchResult) -> dict[str, Any]:
    """The result as --json prints it; the plan as its totals."""
    document = {key: value for key, value in asdict(result).items() if key not in ("plan", "estimate")}
    hours, gpus = result.estimate, job.spec.model.gpus or None
    return document | {
        "plan": {
            "is_sample": result.is_sample,
            "samples": result.plan.samples,
            "tokens": result.plan.tokens,
            "bytes": result.plan.bytes,
            "shards": len(result.plan.shards),
            "lengths": result.plan.lengths.model_dump(),
        },
        "expected": {
            "workers": max(1, job.spec.workers),
            "tokens_per_second": result.trial.tokens_per_second,
            "bytes_per_second": _write_rate(result),
            "gpu_hours": hours and gpus and hours.replica_seconds * gpus / _SECONDS_PER_HOUR,
            "replica_hours": hours and hours.replica_seconds / _SECONDS_PER_HOUR,
            "wall_hours": hours and hours.wall_seconds / _SECONDS_PER_HOUR,
        },
    }


def _write_rate(result: BenchResult) -> float:
    """Bytes per second that one worker writes at the pace to expect."""
    return result.trial.tokens_per_second * result.trial.bytes / result.trial.tokens


def _speeds(result: BenchResult) -> Table:
    """Ever more of the way, each against the step before it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    for name in ("tokens/s", "FLOP/s", "of the line above"):
        table.add_column(name, justify="right")
    before: float | None = None
    for name, rate in (
        ("square matrix product", result.ceiling_flops / result.flops_per_token),
        ("the model's matrix products", result.matmul_tokens_per_second),
        ("forward", result.forward_tokens_per_second),
        ("end to end", result.trial.tokens_per_second),
    ):
        share = "" if before is None else f"{rate / before:.1%}"
        table.add_row(Text(name, style="bold"), f"{rate:,.0f}", human_flops(rate * result.flops_per_token), share)
        before = rate
    return table


def _lines(job: ExtractionJob, result: BenchResult) -> Iterator[tuple[str, str]]:
    trial, plan, start = result.trial, result.plan, result.start_seconds
    yield "device", f"{result.device}, {len(result.fusions)} fusions"
    yield (
        "model ready",
        f"in {start.total:.1f} s: " + ", ".join(f"{_WORDS.get(k, k)} {v:.1f}" for k, v in asdict(start).items()),
    )
    retries = f", {result.out_of_memory_retries} times out of memory" if result.out_of_memory_retries else ""
    yield "batches", f"{result.batch_tokens:,} tokens, of which padding {result.padding_fraction:.1%}{retries}"
    yield (
        "measured end to end",
        f"{trial.tokens:,} tokens in {trial.seconds:.1f} s, {counted(trial.parts, 'part')}, {human_bytes(trial.bytes)} to {trial.uri}",
    )
    yield "where the time goes", _shares(trial, ("forward", *WAITS), rest="start and last write")
    yield "beside the forward", _shares(trial, ("data", "copy", "write"))
    yield "a worker writes", f"{human_bytes(_write_rate(result))}/s at this pace"
    if result.estimate is None:
        return
    workers = max(1, job.spec.workers)
    shards = sum(1 for shard in plan.shards if shard.tokens)
    yield (
        "plan",
        f"{plan.samples:,} samples, {plan.tokens:,} tokens in {shards} shards, {human_bytes(plan.bytes)} to write",
    )
    yield "expect", _expectation(result.estimate, job.spec.model.gpus, workers, shards * start.total)


def _expectation(hours: Estimate, gpus: int, workers: int, load_seconds: float) -> str:
    total = hours.replica_seconds / _SECONDS_PER_HOUR
    cost = f"{_figure(total * gpus)} GPU-hours" if gpus else f"{_figure(total)} hours of one machine"
    return (
        f"{cost}, {load_seconds / hours.replica_seconds:.1%} of them loading the model once a shard; "
        f"{duration(hours.wall_seconds)} by the clock with {workers} worker{'s' if workers > 1 else ''} like this one"
    )


def _figure(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2g}"


def _shares(trial: Trial, stages: Sequence[str], *, rest: str | None = None) -> str:
    shares = {name: trial.stage_seconds[name] / trial.seconds for name in stages}
    if rest is not None:
        shares[rest] = max(0.0, 1 - sum(shares.values()))
    return ", ".join(f"{_WORDS.get(name, name)} {share:.1%}" for name, share in shares.items())
