"""What a finished run prints: what was made, and the next command to try."""

from __future__ import annotations

import os
import shutil
import sys

from rich.table import Table
from rich.text import Text

from headframe_api.job import ExtractionJob
from headframe_api.manifests import DatasetManifest
from headframe_worker.cli.console import out
from headframe_worker.size import human_bytes


def print_summary(job: ExtractionJob, dataset: DatasetManifest) -> None:
    """A short table on standard output."""
    uri = job.spec.output.uri
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    quarantined = sum(dataset.quarantined.values())
    rows = {
        "output": uri,
        "model": f"{dataset.model.source} ({dataset.model.architecture}, {dataset.model.num_layers} layers)",
        "samples": f"{dataset.samples:,}" + (f"  ({quarantined:,} in quarantine)" if quarantined else ""),
        "tokens": f"{dataset.tokens:,}  ({dataset.loss_tokens:,} in the loss mask)",
        "states": f"{', '.join(dataset.slot_names)}  x {dataset.hidden_size}  {dataset.states.dtype}",
        "size": f"{human_bytes(dataset.bytes)} in {len(dataset.shards)} {'shard' if len(dataset.shards) == 1 else 'shards'}",
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    out.print(table)
    out.print()
    headframe = "headframe" if shutil.which("headframe") else os.path.relpath(sys.argv[0])
    out.print(Text.assemble(("next  ", "dim"), f"{headframe} inspect {uri} --row 0"))
    out.print(Text.assemble(("      ", "dim"), f"{headframe} verify {uri} --deep"))
    out.print(Text.assemble(("      ", "dim"), f"open {uri.rstrip('/')}/report.html"))
