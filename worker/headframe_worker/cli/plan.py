"""`headframe plan`: prepare a job and show what extracting it will take, before any GPU is used."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from headframe_api.plan import Plan
from headframe_worker.cli.console import Json, Quiet, counted, err, out, print_note
from headframe_worker.cli.pod_stage import Manifest
from headframe_worker.cli.prepare import Fresh, Processes, Scratch
from headframe_worker.size import human_bytes

_SECONDS_PER_HOUR = 3600.0


def command(
    manifest: Manifest = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(min=1, help="Speed of one replica of the model; with it the hours of extraction are told."),
    ] = None,
    fresh: Fresh = False,
    processes: Processes = None,
    scratch: Scratch = None,
    json_output: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prepare the job, then print its plan: samples, tokens, lengths, shards, bytes, and what was refused.

    What is prepared stays in the output; `headframe run` goes on from it.
    """
    import tempfile
    from pathlib import Path

    from headframe_worker.job_file import load_job
    from headframe_worker.meter import Meter
    from headframe_worker.prepare.stage import prepare
    from headframe_worker.stores.open import open_store

    job = load_job(manifest)
    output = open_store(job.spec.output.uri, job.spec.s3)
    with tempfile.TemporaryDirectory(prefix="headframe-", dir=scratch, ignore_cleanup_errors=True) as folder:
        try:
            prepared = prepare(
                job, output, scratch=Path(folder), meter=Meter("prepare"), processes=processes, fresh=fresh
            )
        finally:
            output.close()
    replicas = max(1, job.spec.workers)
    hours = prepared.plan.tokens / tokens_per_second / replicas / _SECONDS_PER_HOUR if tokens_per_second else None
    if json_output:
        document: dict[str, Any] = prepared.plan.model_dump(mode="json")
        document |= {"reused": prepared.reused, "notes": list(prepared.notes), "hours": hours}
        typer.echo(json.dumps(document, indent=2))
        return
    if not quiet:
        for note in prepared.notes:
            print_note(note)
        if prepared.reused:
            err.print("Reused the plan that is there.", style="dim")
    out.print(_table(prepared.plan, job.spec.output.uri, job.spec.model.gpus, replicas, hours))


def _table(plan: Plan, uri: str, gpus: int, replicas: int, hours: float | None) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    lengths, states = plan.lengths, plan.states
    layers = ", ".join(map(str, states.layers)) or "none"
    rows = [
        (
            "model",
            f"{plan.model.source} ({plan.model.architecture}, {plan.model.num_layers} layers, hidden size {plan.model.hidden_size})",
        ),
        ("revision", plan.model.revision),
        (
            "dataset",
            f"{plan.tokens_from.source} ({plan.tokens_from.format}, loss mask {plan.tokens_from.loss_mask} by {plan.tokens_from.mask_method})",
        ),
        (
            "layers",
            f"{layers} (Hugging Face: {', '.join(map(str, states.hugging_face_indexes)) or 'none'}); last: {states.last}; {states.dtype}",
        ),
        ("samples", f"{plan.samples:,} of {plan.rows_in:,} rows"),
        ("tokens", f"{plan.tokens:,}, of which {plan.loss_tokens:,} are to be learned"),
        (
            "lengths",
            f"{lengths.minimum} to {lengths.maximum}, mean {lengths.mean:.1f}, p50 {lengths.p50}, p90 {lengths.p90}, p99 {lengths.p99}",
        ),
        ("shards", f"{len(plan.shards)}, {counted(sum(shard.parts for shard in plan.shards), 'part')}"),
        ("bytes", f"{human_bytes(plan.bytes)} in {uri}"),
        ("quarantined", ", ".join(f"{reason} {count:,}" for reason, count in plan.quarantined.items()) or "none"),
    ]
    if gpus > 1:
        rows.append(("GPUs", f"{gpus} a replica, its layers spread over them"))
    if hours is not None:
        rows.append(("hours", f"{hours:.2f} on {replicas} {'replica' if replicas == 1 else 'replicas'}"))
    for name, value in rows:
        table.add_row(name, Text(value))  # the user's own words are no markup
    return table
