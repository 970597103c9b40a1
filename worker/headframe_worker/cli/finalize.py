"""`headframe finalize`: the stage that checks all shards and finishes the dataset."""

from __future__ import annotations

from headframe_api.names import MANIFEST_KEY
from headframe_api.progress import TerminationMessage
from headframe_api.status import OutputSummary
from headframe_worker.cli.console import Json, Quiet, out
from headframe_worker.cli.output_argument import Scratch
from headframe_worker.cli.pod_stage import Manifest, StageProcess, completed, run_stage
from headframe_worker.job_file import load_job
from headframe_worker.size import human_bytes
from headframe_worker.stores.observer import tell
from headframe_worker.stores.open import open_store


def command(
    manifest: Manifest = None,
    scratch: Scratch = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Check that every sample is stored once and right, then write samples.parquet, report.html, manifest.json and _SUCCESS.

    Run again on a finished dataset, it checks everything again and changes nothing.
    """

    def work(process: StageProcess) -> TerminationMessage:
        from headframe_worker.finalize.stage import finalize

        job = load_job(manifest)
        store = open_store(job.spec.output.uri, job.spec.s3, observer=tell(process.meter, process.stop.event))
        try:
            dataset = finalize(job, store, scratch=process.scratch, meter=process.meter, stop=process.stop.event)
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
