"""Where a command's words go: results to standard output, all else to standard error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headframe_api.errors import HeadframeError

_PLAIN_WIDTH = 160  # in a pipe or a file there is no edge to wrap at


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


out = _console(stderr=False)
"""Results. Plain text when not a terminal."""
err = _console(stderr=True)
"""Progress, notes, warnings, errors."""

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """A line for each name and value; values are the user's data and are never read as markup."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def counted(count: int, noun: str) -> str:
    """`1 part`, `2,048 parts`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def print_error(error: HeadframeError) -> None:
    """`error: ...`; the text is the user's data and is never read as markup."""
    err.print(Text.assemble(("error: ", "bold red"), error.message))


def print_note(text: str) -> None:
    """Something worth knowing, which is not an error."""
    err.print(Text(text, style="dim"))


def print_warning(text: str) -> None:
    """Something that a user should change."""
    err.print(Text.assemble(("warning: ", "bold yellow"), text))
