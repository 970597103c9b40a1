"""`headframe prepare`: the first stage, as its pod runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headframe_api.progress import TerminationMessage
from headframe_worker.cli.console import Quiet, print_note
from headframe_worker.cli.pod_stage import Manifest, Port

Fresh = Annotated[
    bool, typer.Option("--fresh", help="First delete what Headframe wrote to the output, and begin anew.")
]
Processes = Annotated[int | None, typer.Option(min=1, help="Processes that tokenise; as many as CPUs by default.")]
Scratch = Annotated[
    Path | None, typer.Option(help="Directory for temporary files; about 5 bytes a token. TMPDIR by default.")
]


def command(
    manifest: Manifest = None,
    fresh: Fresh = False,
    processes: Processes = None,
    scratch: Scratch = None,
    port: Port = None,
    quiet: Quiet = False,
) -> None:
    """Turn the dataset into tokens and a plan: tokens/, plan.json and quarantine/ of the output."""
    from headframe_worker.cli.pod_stage import StageProcess, completed, run_stage
    from headframe_worker.job_file import load_job
    from headframe_worker.prepare.stage import prepare
    from headframe_worker.stores.observer import tell
    from headframe_worker.stores.open import open_store

    def work(process: StageProcess) -> TerminationMessage:
        job = load_job(manifest)
        output = open_store(job.spec.output.uri, job.spec.s3, observer=tell(process.meter, process.stop.event))
        try:
            prepared = prepare(
                job,
                output,
                scratch=process.scratch,
                meter=process.meter,
                processes=processes,
                fresh=fresh,
                stop=process.stop.event,
            )
        finally:
            output.close()
        if not quiet:
            for note in prepared.notes:
                print_note(note)
            print_note("reused what is there" if prepared.reused else "prepared")
        plan = prepared.plan
        return completed("prepare").model_copy(
            update={
                "samples": plan.samples,
                "tokens": plan.tokens,
                "bytes": process.meter.bytes_written,
                "quarantined": sum(plan.quarantined.values()),
                "plan": plan.summary(),
            }
        )

    run_stage("prepare", work, scratch=scratch, port=port)
