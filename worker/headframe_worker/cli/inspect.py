"""`headframe inspect OUT`: what is in a dataset, or in one of its samples."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from headframe_api.errors import HeadframeError
from headframe_api.manifests import DatasetManifest
from headframe_api.names import JOB_KEY
from headframe_worker.cli.console import Json, counted, facts_table, out, print_note
from headframe_worker.cli.export import Trainer
from headframe_worker.cli.output_argument import Output, open_output
from headframe_worker.size import human_bytes

if TYPE_CHECKING:
    from headframe_worker.reader.contents import SampleContents


def command(
    output: Output,
    row: Annotated[
        int | None, typer.Option(min=0, help="Show this row's tokens, mask and norms.", show_default=False)
    ] = None,
    trainer: Annotated[
        Trainer | None, typer.Option("--for", help="Show what this trainer must be told.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show what a dataset holds: model, layers in both numberings, norms, counts, quarantine; or one sample by --row."""
    from headframe_worker.documents import read_manifest

    if trainer is not None:
        with open_output(output) as store:
            _print_numbers(read_manifest(store), trainer, json=json)
        return
    if row is None:
        with open_output(output) as store:
            manifest = read_manifest(store)
        if json:
            out.print_json(manifest.to_json().decode())
        else:
            out.print(facts_table(_summary_lines(output, manifest)))
        return
    from headframe_worker.reader.contents import sample_contents
    from headframe_worker.reader.dataset import StatesDataset

    contents = sample_contents(StatesDataset(output), row, _tokenizer(output))
    if json:
        out.print_json(data=contents.to_dict())
    else:
        out.print(_tokens(contents))


def _print_numbers(manifest: DatasetManifest, trainer: Trainer, *, json: bool) -> None:
    from headframe_worker.trainers.numbers import trainer_numbers

    numbers = trainer_numbers(manifest, trainer.value)
    if json:
        out.print_json(data={"trainer": trainer.value, "settings": numbers.settings, "notes": numbers.notes})
        return
    for name, value in numbers.settings.items():
        out.print(Text(f"{name} {value}"))
    for note in numbers.notes:
        print_note(note)


def _summary_lines(uri: str, manifest: DatasetManifest) -> list[tuple[str, str]]:
    states, model = manifest.states, manifest.model
    last = {
        "preNorm": f"output of layer {states.last_layer}, before the final norm",
        "postNorm": f"output of layer {states.last_layer}, after the final norm",
        "none": "not kept",
    }[states.last]
    gain = {"weight": "multiplies by w", "1+weight": "multiplies by 1 + w", "none": "has no gain"}[model.norm_gain]
    quarantined = ", ".join(f"{count:,} {reason}" for reason, count in manifest.quarantined.items()) or "none"
    lines = [
        ("dataset", uri),
        ("model", f"{model.source} ({model.architecture}, {model.num_layers} layers, revision {model.revision})"),
        ("computed in", f"{model.dtype}; attention {', '.join(manifest.attention)}"),
        (
            "states",
            f"[T, {len(manifest.slot_names)}, {manifest.hidden_size}] {states.dtype}: {', '.join(manifest.slot_names)}",
        ),
        ("layers (0-based outputs)", _numbers(states.layers)),
        ("Hugging Face hidden_states", _numbers(states.hugging_face_indexes)),
        ("speculators", f"--target-layer-ids {' '.join(map(str, states.layers_from_one))}"),
        ("last", last),
        ("final norm", f"{model.norm_type}, {gain}, epsilon {model.norm_epsilon}"),
        ("samples", f"{manifest.samples:,} of {manifest.rows_in:,} rows"),
        (
            "tokens",
            f"{manifest.tokens:,}, {manifest.loss_tokens:,} of them to learn ({manifest.tokens_from.loss_mask})",
        ),
        ("lengths", _lengths(manifest)),
        ("size", f"{human_bytes(manifest.bytes)} in {counted(sum(shard.parts for shard in manifest.shards), 'part')}"),
        ("shards", f"{len(manifest.shards):,}"),
        ("quarantine", quarantined),
        ("made", f"{manifest.created_at} from {manifest.tokens_from.source} ({manifest.tokens_from.format})"),
        ("plan", manifest.plan),
    ]
    if manifest.failed_shards:
        lines.append(("MISSING", f"shards {_numbers(manifest.failed_shards)}: {manifest.missing_samples:,} samples"))
    return lines


def _lengths(manifest: DatasetManifest) -> str:
    lengths = manifest.lengths
    return (
        f"{lengths.minimum} to {lengths.maximum} tokens, median {lengths.p50}, 90 % up to {lengths.p90}, "
        f"99 % up to {lengths.p99}"
    )


def _tokens(contents: SampleContents) -> Table:
    table = Table(
        title=f"row {contents.row} ({contents.sample_id}), {len(contents.tokens)} tokens, in {contents.part}",
        caption="● tokens are learned; numbers are L2 norms",
    )
    table.add_column("#", justify="right", style="dim")
    table.add_column("id", justify="right")
    table.add_column("token")
    table.add_column("loss", justify="center")
    for name in contents.slots:
        table.add_column(name, justify="right")
    for line in contents.tokens:
        text = Text("" if line.text is None else repr(line.text)[1:-1], style="green" if line.learned else "")
        table.add_row(
            str(line.position),
            str(line.token_id),
            text,
            "●" if line.learned else "",
            *(f"{norm:.4g}" for norm in line.norms),
        )
    return table


def _tokenizer(uri: str) -> Any:
    """The model's tokenizer where it can be had here; a dataset can be looked at without it."""
    from headframe_worker.job_file import parse_text
    from headframe_worker.model_source import locate_model

    try:
        with open_output(uri) as store:
            job = parse_text(store.read(JOB_KEY).decode(), where=JOB_KEY)
        with tempfile.TemporaryDirectory(prefix="headframe-") as folder:
            return locate_model(job.spec.model, job.spec.s3, scratch=Path(folder), weights=False).tokenizer()
    except HeadframeError as error:
        print_note(f"tokens are shown by number: {error.message}")
        return None


def _numbers(values: Sequence[int | None]) -> str:
    return ", ".join("none" if value is None else str(value) for value in values) or "none"
