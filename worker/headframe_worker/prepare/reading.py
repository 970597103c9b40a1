"""What the dataset turns out to be: its format, its template, how masks are made, and the encoder that follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import jinja2

from headframe_api.errors import ConfigError
from headframe_api.plan import ModelIdentity, TokensIdentity
from headframe_api.spec import ExtractionJobSpec
from headframe_worker.model_source import ModelFiles
from headframe_worker.prepare.blocks import Block, read_blocks
from headframe_worker.prepare.encoder import Encoder, parsed_rows
from headframe_worker.prepare.samples import Columns, Format, decide_format, undecided
from headframe_worker.prepare.sources import find_source
from headframe_worker.prepare.template import ChatRenderer
from headframe_worker.prepare.tokenizing import TextTokenizer, text_tokenizer
from headframe_worker.stores.observer import UNOBSERVED, StoreObserver

_PEEKED_BLOCKS = 4
_NO_TOKENIZER = "none"
MaskMethod = Literal["generation", "prefix", "completion", "all", "given"]


@dataclass(frozen=True)
class Reading:
    """The dataset, opened."""

    blocks: Iterator[Block]
    """All its rows; can be taken once."""
    encoder: Encoder
    identity: TokensIdentity


def open_reading(
    spec: ExtractionJobSpec,
    files: ModelFiles,
    model: ModelIdentity,
    *,
    scratch: Path,
    observer: StoreObserver = UNOBSERVED,
) -> Reading:
    """Find the dataset and decide how its rows become tokens. Raises ConfigError where they cannot."""
    dataset = spec.dataset
    if model.context_length is not None and dataset.max_length > model.context_length:
        raise ConfigError(
            f"spec.dataset.maxLength: {dataset.max_length} is over the model's own limit of {model.context_length} tokens; "
            f"set it to at most {model.context_length}",
            reason="MaxLengthOverModelLimit",
        )
    source = find_source(dataset, spec.s3, observer=observer)
    columns = Columns(dataset.columns)
    blocks = read_blocks(source, columns, scratch=scratch, limit=dataset.limit)
    peeked = list(islice(blocks, _PEEKED_BLOCKS))
    row_format, reason, with_mask = _format(spec, columns, peeked)
    tokenizer: TextTokenizer | None = None
    renderer: ChatRenderer | None = None
    if row_format != "tokens":
        loaded = files.tokenizer()
        tokenizer = text_tokenizer(loaded)
        renderer = _renderer(spec, row_format, loaded)
    loss_mask, method = _mask(spec, row_format, renderer, with_mask=with_mask)
    identity = TokensIdentity(
        source=dataset.source,
        format=row_format,
        format_reason=reason,
        files_digest=source.digest,
        tokenizer_digest=tokenizer.digest if tokenizer else _NO_TOKENIZER,
        chat_template_digest=renderer.digest if renderer else None,
        loss_mask=loss_mask,
        mask_method=method,
        max_length=dataset.max_length,
        on_too_long=dataset.on_too_long,
        limit=dataset.limit,
    )
    encoder = Encoder(
        row_format=row_format,
        columns=columns,
        loss_mask=loss_mask,
        max_length=dataset.max_length,
        on_too_long=dataset.on_too_long,
        vocab_size=model.vocab_size,
        tokenizer=tokenizer,
        renderer=renderer,
    )
    return Reading(chain(peeked, blocks), encoder, identity)


def _format(spec: ExtractionJobSpec, columns: Columns, peeked: list[Block]) -> tuple[Format, str, bool]:
    """(format, why, whether its rows carry a loss mask), from the first rows that can be read."""
    rows = [row for block in peeked for row in parsed_rows(block)]
    if not any(block.numbers for block in peeked):
        raise ConfigError(f"spec.dataset.source: {spec.dataset.source} holds no rows", reason="EmptyDataset")
    with_mask = any(columns.get(row, "loss_mask") is not None for row in rows)
    if spec.dataset.format != "auto":
        return spec.dataset.format, "spec.dataset.format says so", with_mask
    decisions = (decide_format(columns, row) for row in rows)
    decided = next((decision for decision in decisions if decision), None)
    if decided is None:
        raise undecided(columns, {name for row in rows for name in row})
    return *decided, with_mask


def _renderer(spec: ExtractionJobSpec, row_format: Format, tokenizer: Any) -> ChatRenderer | None:
    template: str | dict[str, str] | None = None
    if row_format in ("messages", "promptCompletion"):
        given = spec.dataset.chat_template
        template = _given_template(given) if given else tokenizer.chat_template
    if template is None:
        if row_format == "messages":
            raise ConfigError(
                f"spec.dataset.chatTemplate: the tokenizer of {spec.model.source} has no chat template; give one there, "
                f"or give the dataset as plain text with format: text",
                reason="NoChatTemplate",
            )
        return None
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    renderer = ChatRenderer(template, dict(tokenizer.special_tokens_map), added)
    try:
        renderer.check_syntax()
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"spec.dataset.chatTemplate: not a Jinja template: line {error.lineno}: {error.message}",
            reason="BadChatTemplate",
        ) from error
    return renderer


def _given_template(text: str) -> str:
    """The template itself, or what is in the file that it names."""
    if "{%" in text or "{{" in text:
        return text
    path = Path(text).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"spec.dataset.chatTemplate: {text} holds no Jinja and cannot be read as a file: {getattr(error, 'strerror', error)}",
            reason="BadChatTemplate",
        ) from error


def _mask(
    spec: ExtractionJobSpec, row_format: Format, renderer: ChatRenderer | None, *, with_mask: bool
) -> tuple[Literal["assistant", "lastAssistant", "all"], MaskMethod]:
    wanted = spec.dataset.loss_mask
    if row_format in ("text", "tokens"):
        if wanted == "lastAssistant":
            raise ConfigError(f"spec.dataset.lossMask: format {row_format} has no turns; use all")
        given = row_format == "tokens" and with_mask and wanted != "all"
        return ("assistant", "given") if given else ("all", "all")
    if wanted == "all":
        return "all", "all"
    if row_format == "promptCompletion":
        return wanted, "completion"
    return wanted, "generation" if renderer is not None and renderer.marks_generation else "prefix"
