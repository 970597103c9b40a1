"""`headframe train-with speculators OUT -- ...`: train on a dataset as it lies, with every number it knows filled in."""

from __future__ import annotations

import os
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headframe_worker.cli.console import out, print_note
from headframe_worker.cli.output_argument import Output, open_output


class Trainer(StrEnum):
    """Trainers that read a dataset without an export."""

    SPECULATORS = "speculators"


def command(
    trainer: Annotated[Trainer, typer.Argument(help="The trainer.")],
    output: Output,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="The trainer's own arguments; they win.")
    ] = None,
    work: Annotated[
        Path,
        typer.Option(help="Where the trainer's small files go: links to tokens/, token frequencies, vocabulary maps."),
    ] = Path("headframe-training"),
    processes: Annotated[int, typer.Option(min=1, help="GPUs on this machine; more than one starts torchrun.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
) -> None:
    """Train a drafter with speculators on a finished dataset, local or on S3, without an export."""
    from headframe_worker.exporters.samples import SourceDataset
    from headframe_worker.trainers.speculators_launch import need_speculators, speculators_command

    del trainer  # there is one
    with open_output(output) as store:
        line = speculators_command(SourceDataset.open(store), work, arguments or [], processes=processes)
    if dry_run:
        out.print(shlex.join(line), markup=False)
        return
    need_speculators()
    print_note(shlex.join(line))
    os.execv(line[0], line)  # noqa: S606  (the trainer takes this process' place, and its signals)
