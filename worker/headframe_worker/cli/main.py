"""The command `headframe`: which subcommands there are, and what becomes of an error."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from headframe_api.errors import HeadframeError
from headframe_api.exit_codes import ExitCode
from headframe_worker.cli import (
    bench,
    export,
    extract,
    finalize,
    import_tokens,
    inspect,
    plan,
    prepare,
    report,
    run,
    train_with,
    verify,
)
from headframe_worker.cli.console import print_error

app = typer.Typer(
    name="headframe",
    help="Lift hidden states out of language models: one manifest in, a verified dataset out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_EVERYDAY, _DATASETS, _STAGES = "Run a job", "Look at a dataset of hidden states", "Stages, as pods run them"

app.command("run", rich_help_panel=_EVERYDAY)(run.command)
app.command("plan", rich_help_panel=_EVERYDAY)(plan.command)
app.command("bench", rich_help_panel=_EVERYDAY)(bench.command)
app.command("import", rich_help_panel=_EVERYDAY)(import_tokens.command)
app.command("prepare", rich_help_panel=_STAGES)(prepare.command)
app.command("extract", rich_help_panel=_STAGES)(extract.command)
app.command("finalize", rich_help_panel=_STAGES)(finalize.command)
app.command("inspect", rich_help_panel=_DATASETS)(inspect.command)
app.command("verify", rich_help_panel=_DATASETS)(verify.command)
app.command("report", rich_help_panel=_DATASETS)(report.command)
app.command("export", rich_help_panel=_DATASETS)(export.command)
app.command("train-with", rich_help_panel=_DATASETS)(train_with.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headframe {version('headframe-worker')}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: errors meant for a user become one message and the exit code that the design gives them."""
    # Threads that wait at a barrier sleep rather than spin: on a machine that is shared, spinning made a forward pass on
    # the CPU five times slower. Libraries' own progress bars stay out of ours. Both are read when torch and tqdm load.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app()
    except HeadframeError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not our error, and nothing left to say it to.
        sys.stderr.close()
        sys.exit(ExitCode.OK)


if __name__ == "__main__":
    main()
