"""`headframe finalize`: the stage that checks all shards and finishes the dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headframe_api.names import MANIFEST_KEY
from headframe_api.progress import TerminationMessage
from headframe_api.status import OutputSummary
from headframe_worker.cli.console import Json, Quiet, out
from headframe_worker.cli.output_argument import Scratch
from headframe_worker.cli.pod_stage import StageProcess, completed, run_stage
from headframe_worker.job_file import load_job
from headframe_worker.size import human_bytes
from headframe_worker.stores.observer import tell
from headframe_worker.stores.open import open_store


def command(
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB",
            help="The ExtractionJob manifest (YAML or JSON); by default $HEADFRAME_JOB.",
            show_default=False,
        ),
    ] = None,
    scratch: Scratch = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Check that every sample is stored once and right, then write samples.parquet, report.html, manifest.json and _SUCCESS.

    Run again on a finished dataset, it checks everything again and changes nothing.
    """

    def work(process: StageProcess) -> TerminationMessage:
        from headframe_worker.finalize.stage import finalize

        manifest = load_job(job)
        store = open_store(manifest.spec.output.uri, manifest.spec.s3, observer=tell(process.meter, process.stop.event))
        try:
            dataset = finalize(manifest, store, scratch=process.scratch, meter=process.meter, stop=process.stop.event)
        finally:
            store.close()
        return completed("finalize").model_copy(
            update={
                "samples": dataset.samples,
                "tokens": dataset.tokens,
                "bytes": dataset.bytes,
                "quarantined": sum(dataset.quarantined.values()),
                "output": OutputSummary(uri=store.uri, bytes=dataset.bytes, manifest=f"{store.uri}/{MANIFEST_KEY}"),
            }
        )

    message = run_stage("finalize", work, scratch=scratch)
    if json:
        out.print_json(message.to_text())
    elif not quiet:
        out.print(
            f"{message.samples:,} samples, {message.tokens:,} tokens, {human_bytes(message.bytes)} "
            f"in {message.output.uri if message.output else '?'}; {message.quarantined:,} in quarantine"
        )
