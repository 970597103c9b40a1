"""`headframe run JOB`: the whole job on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from headframe_api.errors import StoppedError
from headframe_api.exit_codes import ExitCode
from headframe_api.plan import PART_TARGET_BYTES
from headframe_worker.cli.console import Json, Quiet, err, out, print_note
from headframe_worker.job_file import load_job
from headframe_worker.log import set_up_log
from headframe_worker.signals import StopWish

JobFile = Annotated[
    Path, typer.Argument(metavar="JOB", help="The ExtractionJob manifest (YAML or JSON).", show_default=False)
]


def command(
    job: JobFile,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; by default one a GPU, on the CPU spec.workers.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete what the output holds of an earlier run and start over.")
    ] = False,
    scratch: Annotated[
        Path | None, typer.Option(help="Directory for temporary files; by default a new one that is removed again.")
    ] = None,
    part_bytes: Annotated[
        int, typer.Option(min=1, help="About how large a part of states becomes.")
    ] = PART_TARGET_BYTES,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve /metrics, /progress, /healthz and /readyz here; 0 takes a free port."
        ),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run a whole job on this machine: prepare, extract, finalize.

    Run the same command again after an interruption: it goes on where it stopped, part by part.
    """
    manifest = load_job(job)
    set_up_log()
    stop = StopWish()
    from headframe_worker.run.job import RunOptions, run_job
    from headframe_worker.run.summary import print_summary

    with (
        stop.heard(),
        tempfile.TemporaryDirectory(prefix="headframe-", dir=scratch, ignore_cleanup_errors=True) as folder,
    ):
        options = RunOptions(Path(folder), workers, fresh, part_bytes, quiet, port)
        note = (lambda _text: None) if quiet else print_note
        try:
            dataset = run_job(manifest, options, console=err, note=note, stop=stop)
        except (StoppedError, KeyboardInterrupt):
            err.print(f"stopped; nothing is lost. Go on with: headframe run {job}")
            raise typer.Exit(stop.exit_code if stop.event.is_set() else ExitCode.INTERRUPTED) from None
    if json:
        out.print_json(dataset.model_dump_json())
    elif not quiet:
        print_summary(manifest, dataset)
