"""`headframe extract`: one shard through the model, as its pod runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headframe_api.names import SHARD_ENVIRONMENT, shard_prefix
from headframe_api.progress import TerminationMessage
from headframe_worker.cli.console import Quiet, counted, print_note
from headframe_worker.cli.pod_stage import Manifest, Port

Shard = Annotated[
    int, typer.Option(min=0, envvar=SHARD_ENVIRONMENT, help="Which shard; Kubernetes sets it in the environment.")
]
Scratch = Annotated[
    Path | None,
    typer.Option(help="Directory for a tokens file, and for a model that comes from S3. TMPDIR by default."),
]


def command(
    shard: Shard, manifest: Manifest = None, scratch: Scratch = None, port: Port = None, quiet: Quiet = False
) -> None:
    """Compute one shard's hidden states and write its parts; go on where an earlier run stopped."""
    from headframe_worker.cli.pod_stage import StageProcess, completed, run_stage
    from headframe_worker.documents import read_plan
    from headframe_worker.engine.loading import choose_devices
    from headframe_worker.extract.stage import Extractor
    from headframe_worker.job_file import load_job
    from headframe_worker.stores.observer import tell
    from headframe_worker.stores.open import open_store

    def work(process: StageProcess) -> TerminationMessage:
        job = load_job(manifest)
        output = open_store(job.spec.output.uri, job.spec.s3, observer=tell(process.meter, process.stop.event))
        output.check_writable()  # before minutes of loading a model
        output.clean_up(shard_prefix(shard))
        extractor = Extractor(
            job,
            read_plan(output),
            output,
            devices=choose_devices(job.spec.model.gpus),
            scratch=process.scratch,
            meter=process.meter,
            stop=process.stop.event,
        )
        try:
            result = extractor.run(shard)
        finally:
            extractor.close()
            output.close()
        quarantined = sum(len(part.quarantined) for part in result.parts)
        if not quiet:
            print_note(
                f"shard {shard}: {counted(result.samples, 'sample')}, {result.tokens:,} tokens in {counted(len(result.parts), 'part')}"
                + (f", {counted(quarantined, 'sample')} in quarantine" if quarantined else "")
            )
        return completed("extract").model_copy(
            update={
                "shard": shard,
                "samples": result.samples,
                "tokens": result.tokens,
                "bytes": result.bytes,
                "quarantined": quarantined,
                "slow_path": list(process.meter.slow_path),
            }
        )

    run_stage("extract", work, scratch=scratch, shard=shard, port=port)
