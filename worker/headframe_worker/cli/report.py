"""`headframe report OUT`: the dataset's report, made again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from headframe_api.names import REPORT_KEY, SAMPLES_KEY
from headframe_worker.cli.console import Quiet, out
from headframe_worker.cli.output_argument import Output, Scratch, open_output


def command(
    output: Output,
    to: Annotated[
        Path | None, typer.Option(help="Write it to this file instead of OUT/report.html.", show_default=False)
    ] = None,
    scratch: Scratch = None,
    quiet: Quiet = False,
) -> None:
    """Write one HTML file that shows what was made and how it went: speed, stages, lengths, norms, quarantine, provenance."""
    from headframe_worker.documents import read_manifest, read_plan
    from headframe_worker.finalize.report import render_report

    with (
        open_output(output) as store,
        tempfile.TemporaryDirectory(prefix="headframe-", dir=scratch, ignore_cleanup_errors=True) as folder,
    ):
        manifest = read_manifest(store)
        html = render_report(store, read_plan(store), manifest, store.fetch(SAMPLES_KEY, Path(folder)))
        if to is None:
            store.write(REPORT_KEY, [memoryview(html.encode())])
            written = f"{store.uri}/{REPORT_KEY}"
        else:
            to.write_text(html, encoding="utf-8")
            written = str(to)
    if not quiet:
        out.print(written)
