"""From a row of the dataset to a sample: which columns mean what, and what is wrong with a row that has not got them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headframe_api.errors import ConfigError
from headframe_worker.prepare.chat import Chat, chat_from_messages, chat_from_prompt_completion
from headframe_worker.prepare.refusal import RefusedRowError

Format = Literal["messages", "promptCompletion", "text", "tokens"]


@dataclass(frozen=True)
class Text:
    """Plain text; the part behind the prompt is to be learned, or all of it."""

    text: str
    prompt_characters: int = 0


@dataclass(frozen=True)
class Tokens:
    """A sample that comes as tokens."""

    input_ids: list[int]
    loss_mask: list[int] | None


Sample = Chat | Text | Tokens


@dataclass(frozen=True)
class Columns:
    """The user's column for each of ours."""

    renamed: Mapping[str, str] = field(default_factory=dict)

    def name(self, column: str) -> str:
        """What the dataset calls it."""
        return self.renamed.get(column, column)

    def get(self, row: Mapping[str, Any], column: str) -> Any:
        """The row's value; None where it has none."""
        return row.get(self.name(column))

    def messages(self, row: Mapping[str, Any]) -> Any:
        """The row's chat: `messages`, or `conversations` where the user named no column."""
        value = self.get(row, "messages")
        return row.get("conversations") if value is None and "messages" not in self.renamed else value


def decide_format(columns: Columns, names: Iterable[str]) -> tuple[Format, str] | None:
    """The format that a row's columns speak for, and why in words; None where they speak for none."""
    present = set(names)
    chat = columns.name("messages")
    if "messages" not in columns.renamed and chat not in present and "conversations" in present:
        chat = "conversations"
    tests: tuple[tuple[Format, tuple[str, ...]], ...] = (
        ("tokens", (columns.name("input_ids"),)),
        ("messages", (chat,)),
        ("promptCompletion", (columns.name("prompt"), columns.name("completion"))),
        ("text", (columns.name("text"),)),
    )
    for name, needed in tests:
        if present.issuperset(needed):
            return name, f"the rows have {' and '.join(needed)}"
    return None


def undecided(columns: Columns, names: Iterable[str]) -> ConfigError:
    """What to tell a user whose columns speak for no format: the ones that `columns` names and that are not there, else all."""
    present = set(names)
    vain = sorted(f"{theirs} (for {ours})" for ours, theirs in columns.renamed.items() if theirs not in present)
    if vain:
        return ConfigError(
            f"spec.dataset.columns: the dataset has no column {' or '.join(vain)}; it has {', '.join(sorted(present)) or 'none'}",
            reason="UnknownFormat",
        )
    return ConfigError(
        f"spec.dataset.format: auto finds none of messages, conversations, prompt with completion, text or input_ids among the "
        f"columns ({', '.join(sorted(present)) or 'none'}); name yours in spec.dataset.columns, such as {{text: body}}",
        reason="UnknownFormat",
    )


def sample_of(row: Mapping[str, Any], row_format: Format, columns: Columns) -> Sample:
    """The row as a sample of the format. Raises RefusedRowError."""
    if row_format == "messages":
        return chat_from_messages(_needed(columns.messages(row), columns.name("messages")), columns.get(row, "tools"))
    if row_format == "promptCompletion":
        return _prompt_completion(row, columns)
    if row_format == "text":
        text = _string(row, columns, "text")
        if not text:
            raise _empty(columns.name("text"))
        return Text(text)
    return _tokens(row, columns)


def _prompt_completion(row: Mapping[str, Any], columns: Columns) -> Sample:
    if isinstance(columns.get(row, "prompt"), list):
        prompt, completion = columns.get(row, "prompt"), _needed(columns.get(row, "completion"), "completion")
        return chat_from_prompt_completion(prompt, completion, columns.get(row, "tools"))
    prompt, completion = _string(row, columns, "prompt"), _string(row, columns, "completion")
    if not completion:
        raise _empty(columns.name("completion"))
    return Text(prompt + completion, len(prompt))


def _tokens(row: Mapping[str, Any], columns: Columns) -> Tokens:
    ids = _integers(_needed(columns.get(row, "input_ids"), columns.name("input_ids")), columns.name("input_ids"))
    if not ids:
        raise _empty(columns.name("input_ids"))
    given = columns.get(row, "loss_mask")
    if given is None:
        return Tokens(ids, None)
    mask = _integers(given, columns.name("loss_mask"))
    if len(mask) != len(ids):
        raise RefusedRowError("LengthMismatch", f"{len(ids)} input_ids but {len(mask)} values of loss_mask")
    if not set(mask) <= {0, 1}:
        raise RefusedRowError("WrongType", f"{columns.name('loss_mask')} holds values other than 0 and 1")
    return Tokens(ids, [int(value) for value in mask])


def _integers(value: object, column: str) -> list[int]:
    # [[...]] is what a tensor of batch size 1 becomes.
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not all(type(entry) in (int, bool) for entry in value):
        raise RefusedRowError("WrongType", f"{column} is not a list of integers")
    return value


def _string(row: Mapping[str, Any], columns: Columns, column: str) -> str:
    value = _needed(columns.get(row, column), columns.name(column))
    if not isinstance(value, str):
        raise RefusedRowError("WrongType", f"{columns.name(column)} is {type(value).__name__}, not a string")
    return value


def _needed(value: Any, column: str) -> Any:
    if value is None:
        raise RefusedRowError("MissingColumn", f"has no {column}")
    return value


def _empty(column: str) -> RefusedRowError:
    return RefusedRowError("EmptySample", f"{column} is empty")
