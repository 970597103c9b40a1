"""`headframe import DATASET --from speculators`: the job that extracts states for rows that a trainer's own preparation made."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from headframe_worker.cli.console import Quiet, print_note


class Preparation(StrEnum):
    """What --from takes."""

    SPECULATORS = "speculators"


class Preset(StrEnum):
    """What --preset takes."""

    DFLASH = "dflash"
    EAGLE3 = "eagle3"


def command(
    dataset: Annotated[
        str,
        typer.Argument(
            help="What `speculators prepare-data` wrote: a directory or s3://bucket/prefix (an endpoint as AWS_ENDPOINT_URL).",
            show_default=False,
        ),
    ],
    source: Annotated[Preparation, typer.Option("--from", help="Whose preparation it is.", show_default=False)],
    model: Annotated[str, typer.Option(help="The verifier: hub id, directory or s3://.", show_default=False)],
    output: Annotated[str, typer.Option(help="Where the states go: s3://bucket/prefix or a path.", show_default=False)],
    preset: Annotated[Preset, typer.Option(help="Which layers to keep.")] = Preset.DFLASH,
    name: Annotated[str, typer.Option(help="Of the job.")] = "imported",
    quiet: Quiet = False,
) -> None:
    """Print the manifest of a job over rows that are tokens already; rows and masks are taken one to one, or not at all.

    Every row is read first. Then: `headframe run`, or `kubectl apply`.
    """
    import yaml

    from headframe_api.parse import parse_job
    from headframe_api.spec import S3Spec
    from headframe_worker.prepare.given_tokens import read_given_tokens

    del source  # there is one
    with tempfile.TemporaryDirectory(prefix="headframe-", ignore_cleanup_errors=True) as folder:
        found = read_given_tokens(dataset, S3Spec(), scratch=Path(folder))
    manifest: dict[str, Any] = {
        "apiVersion": "headframe.dev/v1alpha1",
        "kind": "ExtractionJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": model},
            "dataset": {"source": dataset, "format": "tokens", "maxLength": found.longest, "onTooLong": "fail"},
            "states": {"preset": preset.value},
            "output": {"uri": output},
        },
    }
    parse_job(manifest, where="the imported job")
    if not quiet:
        print_note(
            f"{found.rows:,} rows, {found.tokens:,} tokens, of which {found.loss_tokens:,} are to be learned; the longest has {found.longest:,}"
        )
    typer.echo(yaml.safe_dump(manifest, sort_keys=False), nl=False)
