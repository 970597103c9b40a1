"""One block of rows in, tokens and refusals out: the work that is shared among processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headframe_api.errors import ConfigError
from headframe_api.plan import TOO_LONG
from headframe_worker.prepare.blocks import MAX_ROW_BYTES, Block
from headframe_worker.prepare.chat import Chat
from headframe_worker.prepare.refusal import Reason, RefusedRowError, printable
from headframe_worker.prepare.samples import Columns, Format, Text, Tokens, sample_of
from headframe_worker.prepare.template import ChatRenderer, Rendered
from headframe_worker.prepare.tokenizing import TextTokenizer, Tokenized


@dataclass(frozen=True)
class Refusal:
    """One row for the quarantine."""

    where: str
    sample_id: str
    reason: Reason
    message: str


@dataclass(frozen=True)
class EncodedBlock:
    """A block's samples: N samples of T tokens together, in the order of its rows, and what was refused."""

    rows_in: int
    input_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T]"""
    lengths: NDArray[np.int64]
    """[N]"""
    sample_ids: list[str]
    refusals: list[Refusal]
    truncated: int
    """Samples that were cut at maxLength."""
    without_loss: int
    """Samples in which nothing is left to learn, after they were cut or because their given mask says so."""
    uncertain_turns: int
    """Assistant turns left out of masks."""


@dataclass
class _Growing:
    """An EncodedBlock in the making."""

    input_ids: list[NDArray[np.int32]] = field(default_factory=list)
    loss_mask: list[NDArray[np.uint8]] = field(default_factory=list)
    sample_ids: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    truncated: int = 0
    without_loss: int = 0
    uncertain_turns: int = 0


@dataclass(frozen=True)
class _Row:
    """A row that was understood."""

    where: str
    sample_id: str
    content: Tokens | Rendered
    special_tokens: bool = False
    """Whether the tokenizer is to add its own: a chat template has written them itself, and twice would be wrong."""


@dataclass(frozen=True)
class Encoder:
    """Everything that decides how a row becomes tokens. Picklable: each process gets its own."""

    row_format: Format
    columns: Columns
    loss_mask: Literal["assistant", "lastAssistant", "all"]
    max_length: int
    on_too_long: Literal["truncate", "drop", "fail"]
    vocab_size: int
    tokenizer: TextTokenizer | None
    """None where the dataset is tokens."""
    renderer: ChatRenderer | None
    """None where there is no chat template."""

    def encode(self, block: Block) -> EncodedBlock:
        """The block's rows as tokens. Raises ConfigError for a sample that is too long where the job is to fail then."""
        out = _Growing()
        refusals: dict[int, Refusal] = {}
        rows: dict[int, _Row] = {}
        for index, (number, raw) in enumerate(zip(block.numbers, _raw_rows(block), strict=True)):
            where = f"{block.file}:{number}"
            sample_id = where
            try:
                row = _parsed(raw)
                sample_id = self._sample_id(row, where)
                rows[index] = self._understood(row, where, sample_id)
            except RefusedRowError as refusal:
                refusals[index] = Refusal(where, sample_id, refusal.reason, printable(refusal.message))
        tokenized = self._tokenized(rows)
        for index, understood in rows.items():
            try:
                ids, mask = _masked(understood.content, tokenized.get(index))
                self._append(out, understood, ids, mask)
            except RefusedRowError as refusal:
                refusals[index] = Refusal(understood.where, understood.sample_id, refusal.reason, refusal.message)
        return EncodedBlock(
            rows_in=len(block.numbers),
            input_ids=np.concatenate(out.input_ids) if out.input_ids else np.zeros(0, np.int32),
            loss_mask=np.concatenate(out.loss_mask) if out.loss_mask else np.zeros(0, np.uint8),
            lengths=np.array([len(ids) for ids in out.input_ids], dtype=np.int64),
            sample_ids=out.sample_ids,
            refusals=[refusals[index] for index in sorted(refusals)],
            truncated=out.truncated,
            without_loss=out.without_loss,
            uncertain_turns=out.uncertain_turns,
        )

    def _sample_id(self, row: Mapping[str, Any], where: str) -> str:
        given = self.columns.get(row, "id")
        if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
            return where
        try:
            str(given).encode()
        except UnicodeEncodeError as error:
            raise RefusedRowError(
                "InvalidUnicode", f"its id holds a lone surrogate: {printable(str(given))}"
            ) from error
        return str(given)

    def _understood(self, row: Mapping[str, Any], where: str, sample_id: str) -> _Row:
        sample = sample_of(row, self.row_format, self.columns)
        if isinstance(sample, Tokens):
            given = sample if self.loss_mask != "all" else Tokens(sample.input_ids, None)
            return _Row(where, sample_id, given)
        rendered = self._rendered(sample)
        try:
            rendered.text.encode()
        except UnicodeEncodeError as error:
            code = ord(rendered.text[error.start])
            raise RefusedRowError("InvalidUnicode", f"its text holds the lone surrogate U+{code:04X}") from error
        return _Row(where, sample_id, rendered, special_tokens=isinstance(sample, Text))

    def _rendered(self, sample: Chat | Text) -> Rendered:
        everything = self.loss_mask == "all"
        if isinstance(sample, Text):
            start = 0 if everything else sample.prompt_characters
            return Rendered(sample.text, ((start, len(sample.text)),) if start else None)
        if self.renderer is None:
            raise RefusedRowError("TemplateRefused", "a row of messages, but the tokenizer has no chat template")
        if everything:
            return Rendered(self.renderer.text(sample), None)
        if sample.prompt_messages is not None:
            return self.renderer.completion(sample)
        return self.renderer.assistant(sample, last_only=self.loss_mask == "lastAssistant")

    def _tokenized(self, rows: Mapping[int, _Row]) -> dict[int, Tokenized]:
        result: dict[int, Tokenized] = {}
        for special_tokens in (False, True):
            texts = {
                index: row.content
                for index, row in rows.items()
                if isinstance(row.content, Rendered) and row.special_tokens is special_tokens
            }
            if texts and self.tokenizer is not None:
                spans = any(content.spans is not None for content in texts.values())
                batch = [content.text for content in texts.values()]
                tokens = self.tokenizer.tokenize(batch, special_tokens=special_tokens, spans=spans)
                result.update(zip(texts, tokens, strict=True))
        return result

    def _append(self, out: _Growing, row: _Row, ids: NDArray[np.int64], mask: NDArray[np.uint8]) -> None:
        if len(ids) == 0:
            raise RefusedRowError("EmptySample", "it gives no token")
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise RefusedRowError(
                "TokenOutOfRange", f"token {outside[0]} is not in the model's vocabulary of {self.vocab_size}"
            )
        if len(ids) > self.max_length:
            self._too_long(row, len(ids))
            ids, mask = ids[: self.max_length], mask[: self.max_length]
            out.truncated += 1
        out.input_ids.append(ids.astype(np.int32))
        out.loss_mask.append(mask)
        out.sample_ids.append(row.sample_id)
        out.without_loss += not mask.any()
        if isinstance(row.content, Rendered):
            out.uncertain_turns += row.content.uncertain_turns

    def _too_long(self, row: _Row, length: int) -> None:
        message = f"{length} tokens, over maxLength {self.max_length}"
        if self.on_too_long == "drop":
            raise RefusedRowError(TOO_LONG, message)
        if self.on_too_long == "fail":
            raise ConfigError(
                f"{row.where}: {message}; raise spec.dataset.maxLength, or set onTooLong to truncate or drop",
                reason=TOO_LONG,
            )


def parsed_rows(block: Block) -> Iterator[Mapping[str, Any]]:
    """The rows of a block that can be read at all."""
    for raw in _raw_rows(block):
        try:
            yield _parsed(raw)
        except RefusedRowError:
            continue


def _raw_rows(block: Block) -> Iterator[bytes | dict[str, Any] | None]:
    if block.table is None:
        yield from block.lines or ()
        return
    for batch in pa.ipc.open_stream(block.table):
        yield from (_without_nulls(row) for row in batch.to_pylist())


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all fields that any of them has: a null in one is a field that its row never had."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(entry) for entry in value]
    return value


def _parsed(raw: bytes | dict[str, Any] | None) -> Mapping[str, Any]:
    if isinstance(raw, dict):
        return raw
    if raw is None:
        raise RefusedRowError("RowTooLarge", f"longer than {MAX_ROW_BYTES >> 20} MiB")
    try:
        row = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise RefusedRowError("InvalidUnicode", f"not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise RefusedRowError("InvalidJson", f"not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise RefusedRowError("NotAnObject", "not a JSON object")
    return row


def _masked(content: Tokens | Rendered, tokenized: Tokenized | None) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Token ids and loss mask of one sample, before any cut."""
    if isinstance(content, Tokens):
        return _given(content)
    if tokenized is None:
        raise ValueError("text was not tokenised")
    ids = np.array(tokenized.ids, dtype=np.int64)
    if content.spans is None:
        return ids, np.ones(len(ids), np.uint8)
    mask = np.zeros(len(ids), np.uint8)
    for span in content.spans:
        tokens = tokenized.token_span(span)
        if tokens is None:
            raise RefusedRowError("MaskUnsound", "a turn to be learned cannot be placed among the tokens")
        mask[slice(*tokens)] = 1
    return ids, mask


def _given(content: Tokens) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    try:
        ids = np.array(content.input_ids, dtype=np.int64)
    except OverflowError as error:
        raise RefusedRowError("TokenOutOfRange", "a token id is no 64-bit integer") from error
    mask = np.ones(len(ids), np.uint8) if content.loss_mask is None else np.array(content.loss_mask, dtype=np.uint8)
    return ids, mask
