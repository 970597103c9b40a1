"""Text to token ids, with the way from characters of the text to tokens: fast tokenizers by offsets, others by prefixes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing

Span = tuple[int, int]


class Tokenized(Protocol):
    """One text's tokens."""

    @property
    def ids(self) -> list[int]:
        """Token ids, special tokens included where they were asked for."""
        ...

    def token_span(self, span: Span) -> Span | None:
        """The tokens that hold any character of a span of the text; None where that cannot be told."""
        ...


class TextTokenizer(Protocol):
    """What prepare needs of a tokenizer; picklable, so that every process has its own."""

    digest: str

    def tokenize(self, texts: Sequence[str], *, special_tokens: bool, spans: bool) -> Sequence[Tokenized]:
        """Token ids of each text, with the tokenizer's own special tokens around it if asked; `spans` keeps the way back."""
        ...


def text_tokenizer(tokenizer: Any) -> TextTokenizer:
    """The fast way where the tokenizer has one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return FastTokenizer(backend) if isinstance(backend, Tokenizer) else SlowTokenizer(tokenizer)


class FastTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, backend: Tokenizer) -> None:
        plain = Tokenizer.from_str(backend.to_str())
        plain.encode_special_tokens = backend.encode_special_tokens
        plain.no_truncation()
        plain.no_padding()
        self.digest = f"sha256:{hashlib.sha256(plain.to_str().encode()).hexdigest()}"
        probe = plain.encode("a")
        inner = [index for index, special in enumerate(probe.special_tokens_mask) if not special]
        first, last = (inner[0], inner[-1] + 1) if inner else (0, 0)
        self._before, self._after = probe.ids[:first], probe.ids[last:]
        # What the post-processor adds is known now. Without it no offset is trimmed: a space belongs to its token.
        plain.post_processor = TemplateProcessing(single="$A", special_tokens=[])
        self._backend = plain

    def tokenize(self, texts: Sequence[str], *, special_tokens: bool, spans: bool) -> Sequence[Tokenized]:
        """See TextTokenizer."""
        encode = self._backend.encode_batch if spans else self._backend.encode_batch_fast
        before, after = (self._before, self._after) if special_tokens else ([], [])
        return [_Encoded(entry, before, after) for entry in encode(list(texts), add_special_tokens=False)]


class _Encoded:
    def __init__(self, encoding: Encoding, before: list[int], after: list[int]) -> None:
        self._encoding, self._before, self._after = encoding, before, after

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self._encoding.ids
        return [*self._before, *ids, *self._after] if self._before or self._after else ids

    def token_span(self, span: Span) -> Span | None:
        encoding = self._encoding
        offset = len(self._before)
        # A character that the tokenizer drops belongs to no token: the next one counts.
        first = next((token for at in range(*span) if (token := encoding.char_to_token(at)) is not None), None)
        last = next((token for at in reversed(range(*span)) if (token := encoding.char_to_token(at)) is not None), None)
        if first is None or last is None:
            return None
        # Several tokens may make one character.
        while last + 1 < len(encoding) and encoding.token_to_chars(last + 1) == encoding.token_to_chars(last):
            last += 1
        return first + offset, last + 1 + offset


class SlowTokenizer:
    """Any other tokenizer of Transformers, one text at a time; a place in the text is found by tokenising what comes before it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        identity = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map]
        self.digest = f"sha256:{hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()}"

    def ids(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of one text."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        return ids

    def tokenize(self, texts: Sequence[str], *, special_tokens: bool, spans: bool) -> Sequence[Tokenized]:  # noqa: ARG002
        """See TextTokenizer."""
        return [_ByPrefix(self, text, special_tokens) for text in texts]


class _ByPrefix:
    def __init__(self, tokenizer: SlowTokenizer, text: str, special_tokens: bool) -> None:
        self._tokenizer, self._text = tokenizer, text
        self.ids = tokenizer.ids(text, special_tokens=special_tokens)
        bare = tokenizer.ids(text, special_tokens=False)
        self._bare = bare
        self._before = next((at for at in range(len(self.ids)) if self.ids[at : at + len(bare)] == bare), None)

    def token_span(self, span: Span) -> Span | None:
        ends = []
        for position in span:
            prefix = self._tokenizer.ids(self._text[:position], special_tokens=False)
            if self._before is None or self._bare[: len(prefix)] != prefix:
                return None
            ends.append(len(prefix) + self._before)
        return ends[0], ends[1]
