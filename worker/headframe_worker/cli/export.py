"""`headframe export OUT --to TRAINER --into PLACE`: the dataset as the files that a trainer reads."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from headframe_api.errors import ConfigError
from headframe_worker.cli.console import Quiet, err, out, print_note
from headframe_worker.cli.output_argument import Output, open_output
from headframe_worker.size import human_bytes

if TYPE_CHECKING:
    from headframe_api.spec import StateDtype
    from headframe_worker.exporters.export import Exporter
    from headframe_worker.exporters.samples import SourceDataset
    from headframe_worker.model_ends.checkpoint import ModelAccess


class Trainer(StrEnum):
    """What --to takes."""

    SPECULATORS = "speculators"
    SPECFORGE = "specforge"
    MODELOPT = "modelopt"
    DEEPSPEC = "deepspec"
    TORCH = "torch"


class Strategy(StrEnum):
    """What --strategy takes."""

    EAGLE3 = "eagle3"
    DFLASH = "dflash"
    DOMINO = "domino"
    DSPARK = "dspark"


class Dtype(StrEnum):
    """What --dtype takes."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT8 = "float8_e4m3fn"


Model = Annotated[
    str | None,
    typer.Option(
        help="Where the model lies now: hub id, s3:// or path. Default: where the job says. Only its final norm is read.",
        show_default=False,
    ),
]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model's repository carries.")]


def command(
    output: Output,
    to: Annotated[Trainer, typer.Option(help="The trainer.")],
    into: Annotated[str, typer.Option(help="Where the files go: a directory or s3://bucket/prefix.")],
    strategy: Annotated[
        Strategy | None, typer.Option(help="SpecForge's strategy; its files differ.", show_default=False)
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of the states. Default: as stored; float8 is decoded to bfloat16, but for speculators."),
    ] = None,
    min_loss_tokens: Annotated[
        int,
        typer.Option(min=0, help="DeepSpec: leave out samples with fewer supervised tokens; its own script takes 14."),
    ] = 0,
    model: Model = None,
    trust_remote_code: RemoteCode = False,
    share: Annotated[
        str, typer.Option(help="I/N: export every N-th part from the I-th on, so that N processes share the work.")
    ] = "1/1",
    quiet: Quiet = False,
) -> None:
    """Write a finished dataset as a trainer's files. Run it again after an interruption: it goes on with the next part."""
    from headframe_worker.exporters.export import export
    from headframe_worker.exporters.samples import SourceDataset
    from headframe_worker.model_ends.checkpoint import ModelAccess

    if (to is Trainer.SPECFORGE) != (strategy is not None):
        raise ConfigError(
            "--strategy: SpecForge needs one of eagle3, dflash, domino, dspark; no other trainer takes it"
        )
    if min_loss_tokens and to is not Trainer.DEEPSPEC:
        raise ConfigError(f"--min-loss-tokens: {to} takes all samples; it is for deepspec")
    access = ModelAccess(model, trust_remote_code=trust_remote_code)
    with open_output(output) as store, open_output(into) as target, _bar(quiet=quiet) as bar:
        source = SourceDataset.open(store)
        exporter = _exporter(source, to, strategy, dtype, min_loss_tokens, access)
        task = bar.add_task("", total=source.manifest.tokens, size="")
        written = 0

        def advance(_samples: int, tokens: int, size: int) -> None:
            nonlocal written
            written += size
            bar.update(task, advance=tokens, size=human_bytes(written))

        result = export(source, target, exporter, share=_share(share), advance=advance)
    if result.left_out:
        print_note(
            f"{result.left_out:,} samples were left out because the trainer would refuse them; "
            f"{target.uri}/headframe-export/done.json lists their rows"
        )
    if quiet:
        return
    if result.parts_missing:
        out.print(f"{target.uri}: this share is done; {result.parts_missing:,} parts are left to other processes")
    else:
        out.print(f"{target.uri}: {result.samples:,} samples, {human_bytes(result.bytes)}, for {to}")


def _exporter(
    source: SourceDataset,
    to: Trainer,
    strategy: Strategy | None,
    dtype: Dtype | None,
    min_loss_tokens: int,
    access: ModelAccess,
) -> Exporter:
    from headframe_worker.exporters.deepspec import DeepSpec
    from headframe_worker.exporters.modelopt import ModelOpt
    from headframe_worker.exporters.specforge import SpecForge
    from headframe_worker.exporters.speculators import Speculators
    from headframe_worker.exporters.torch_files import TorchFiles

    kept: StateDtype | None = None if dtype is None else dtype.value
    if to is Trainer.SPECULATORS:
        return Speculators(source.plan, dtype=kept)
    if to is Trainer.TORCH:
        return TorchFiles(source.plan, dtype=kept)
    if to is Trainer.MODELOPT:
        return ModelOpt(source.plan, access, dtype=kept)
    if to is Trainer.DEEPSPEC:
        if kept not in (None, "bfloat16"):
            raise ConfigError("--dtype: DeepSpec's cache is bfloat16, always")
        return DeepSpec(source.plan, access, min_loss_tokens=min_loss_tokens)
    if strategy is None:
        raise ConfigError("--strategy: SpecForge's files differ by it; name eagle3, dflash, domino or dspark")
    return SpecForge(source.plan, access, strategy=strategy.value, dtype=kept)


def _share(text: str) -> tuple[int, int]:
    """(0-based index, count) of I/N."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"--share: {text!r} is not I/N with 1 <= I <= N, such as 2/8")
    return int(index) - 1, int(count)


def _bar(*, quiet: bool) -> Progress:
    return Progress(
        TextColumn("[bold]export[/]"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:.0f} % {task.fields[size]}"),
        TimeRemainingColumn(),
        console=err,
        disable=quiet or not err.is_terminal,
        transient=True,
    )
