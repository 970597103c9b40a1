"""`headframe verify OUT`: is the dataset what it says it is?"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headframe_api.errors import DataError
from headframe_api.names import JOB_KEY
from headframe_worker.cli.console import Json, Quiet, counted, err, out, print_note
from headframe_worker.cli.export import Model, RemoteCode
from headframe_worker.cli.output_argument import Output, Scratch, open_output
from headframe_worker.size import human_bytes

if TYPE_CHECKING:
    from headframe_worker.model_ends.head_check import HeadCheck


def command(
    output: Output,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also compute 1 % of the samples (8 or more) again by plain Transformers.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Chooses the samples of --deep and --with-head.")] = 0,
    with_head: Annotated[
        bool,
        typer.Option(
            "--with-head", help="Also check that the last states, by the model's final norm and head, predict the text."
        ),
    ] = False,
    model: Model = None,
    trust_remote_code: RemoteCode = False,
    scratch: Scratch = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Read everything again and check it: digests, tokens, masks, order, statistics, counts, index and manifest.

    Lists every fault with its place and exits with 65 if there is any.
    """
    from headframe_worker.documents import read_plan
    from headframe_worker.finalize.deep import DeepCheck, deep_check
    from headframe_worker.finalize.fault import fault_list
    from headframe_worker.finalize.verify import verify
    from headframe_worker.job_file import parse_text

    checked: DeepCheck | None = None
    with (
        open_output(output) as store,
        tempfile.TemporaryDirectory(prefix="headframe-", dir=scratch, ignore_cleanup_errors=True) as folder,
    ):
        with _bar("verify", DownloadColumn(binary_units=True), quiet=quiet) as bar:
            task = bar.add_task("", total=None)
            result = verify(
                store,
                scratch=Path(folder),
                on_size=lambda size: bar.update(task, total=size),
                on_bytes=lambda size: bar.advance(task, size),
            )
        if deep and not result.faults:
            plan, job = read_plan(store), parse_text(store.read(JOB_KEY).decode(), where=f"{store.uri}/{JOB_KEY}")
            with _bar("recompute", MofNCompleteColumn(), quiet=quiet) as bar:
                task = bar.add_task("", total=None)
                checked = deep_check(
                    plan,
                    job,
                    output,
                    scratch=Path(folder),
                    seed=seed,
                    on_size=lambda size: bar.update(task, total=size),
                    on_sample=lambda: bar.advance(task),
                )
        head = _head(output, model, trust_remote_code, seed, quiet=quiet) if with_head and not result.faults else None
    faults = result.faults + (checked.faults if checked else []) + (head.faults if head else [])
    if json:
        out.print_json(
            data={
                "uri": store.uri,
                "sound": not faults,
                "faults": [{"place": fault.place, "problem": fault.problem} for fault in faults],
                "samples": result.samples,
                "tokens": result.tokens,
                "parts": result.parts,
                "bytes": result.bytes,
                "head": head and asdict(head),
                "deep": checked
                and {"samples": checked.samples, "tolerance": checked.tolerance, "worst": checked.worst},
            }
        )
    if faults:
        raise DataError(f"{store.uri}: {len(faults)} faults:\n{fault_list(faults)}", reason="Unsound")
    if not quiet and not json:
        out.print(
            f"{store.uri} is sound: {counted(result.samples, 'sample')}, {result.tokens:,} tokens, {counted(result.parts, 'part')}, "
            f"{human_bytes(result.bytes)} read"
        )
        if head:
            out.print(
                f"{head.tokens:,} last states predict their next tokens: {head.loss:.2f} nats a token "
                f"({head.frequency_loss:.2f} by their frequencies), {head.correct:.0%} exactly, temperature {head.temperature:g}"
            )
            for note in head.notes:
                print_note(note)
        if checked:
            worst = max(checked.worst.values(), default=0.0)
            out.print(
                f"{checked.samples} samples computed again by plain Transformers: largest error {worst:.2g} of "
                f"{checked.tolerance:.2g} allowed"
            )


def _head(uri: str, model: str | None, trust_remote_code: bool, seed: int, *, quiet: bool) -> HeadCheck:
    from headframe_worker.model_ends.checkpoint import ModelAccess
    from headframe_worker.model_ends.ends import load_ends
    from headframe_worker.model_ends.head_check import head_check
    from headframe_worker.reader import StatesDataset

    dataset = StatesDataset(uri)
    ends = load_ends(dataset.manifest.model, ModelAccess(model, trust_remote_code=trust_remote_code), head=True)
    with _bar("head", MofNCompleteColumn(), quiet=quiet) as bar:
        task = bar.add_task("", total=None)
        return head_check(dataset, ends, seed=seed, on_tokens=lambda tokens: bar.advance(task, tokens))


def _bar(what: str, counts: DownloadColumn | MofNCompleteColumn, *, quiet: bool) -> Progress:
    return Progress(
        TextColumn(f"[bold]{what}[/]"),
        BarColumn(bar_width=30),
        counts,
        TimeRemainingColumn(),
        console=err,
        disable=quiet or not err.is_terminal,
        transient=True,
    )
