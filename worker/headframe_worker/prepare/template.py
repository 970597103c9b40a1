"""Rendering chats by a chat template, and where in the rendered text the assistant speaks.

The start of an assistant turn is the end of the rendered prompt before it; its end is where the model would stop. Both are
proved for each sample on the rendered text itself: a template may rewrite earlier turns (Qwen3 drops earlier thinking), and
then a turn whose place or content is not certain is left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from headframe_api.errors import ConfigError
from headframe_worker.prepare.chat import Chat, Message
from headframe_worker.prepare.refusal import RefusedRowError

Span = tuple[int, int]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
_PROBE = "headframe"


@dataclass(frozen=True)
class Rendered:
    """A chat as text, and the assistant's turns in it."""

    text: str
    spans: tuple[Span, ...] | None
    """Character ranges that a trainer is to learn, in order; None: everything."""
    uncertain_turns: int = 0
    """Assistant turns that could not be placed, or that do not stand as their message says; they have no span."""


@dataclass(frozen=True)
class _Marks:
    """What stands before and after every assistant turn, learned from the template by probing it."""

    header: str
    """What the generation prompt adds, such as `<|im_start|>assistant` and a newline."""
    end: str
    """The special token that ends a turn, such as `<|im_end|>`."""


class ChatRenderer:
    """One tokenizer's chat template, or the manifest's own instead."""

    def __init__(
        self, template: str | dict[str, str], special_tokens: dict[str, Any], added_tokens: Sequence[str]
    ) -> None:
        self._templates = template if isinstance(template, dict) else {"default": template}
        self._special_tokens = special_tokens
        self._added_tokens = tuple(sorted((token for token in added_tokens if token.strip()), key=len, reverse=True))
        self.digest = "sha256:" + hashlib.sha256(json.dumps(self._templates, sort_keys=True).encode()).hexdigest()
        self.marks_generation = all(map(_GENERATION.search, self._templates.values()))
        self._marks: dict[bool, _Marks | None] = {}
        self._renames_developer = not any("developer" in text for text in self._templates.values())

    def check_syntax(self) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        for template in self._templates.values():
            try:
                _render_chats([[{"role": "user", "content": _PROBE}]], chat_template=template)
            except jinja2.TemplateSyntaxError:
                raise
            except _TEMPLATE_FAULTS:
                continue  # it may want more than a probe has

    def text(self, chat: Chat) -> str:
        """The whole chat. Raises RefusedRowError where the template refuses it."""
        return self._render(self._ready(chat.messages), chat.tools)[0]

    def completion(self, chat: Chat) -> Rendered:
        """The whole chat; everything after the rendered prompt is to be learned."""
        if chat.prompt_messages is None:
            raise ValueError("not a prompt-completion chat")
        messages = self._ready(chat.messages)
        text = self._render(messages, chat.tools)[0]
        start = self._prompt_end(text, messages, chat.prompt_messages, chat.tools)
        if start is None:
            raise RefusedRowError("MaskUnsound", "the rendered chat does not start with its rendered prompt")
        end = self._without_trailing_space(text, start, len(text))
        return Rendered(text, ((start, end),))

    def assistant(self, chat: Chat, *, last_only: bool) -> Rendered:
        """The whole chat and its assistant turns, or only the last of them. Raises RefusedRowError."""
        messages = self._ready(chat.messages)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise RefusedRowError("NoAssistantTurn", "no message is the assistant's; lossMask: all keeps such samples")
        if self.marks_generation:
            rendered = self._by_generation(messages, chat.tools, turns, last_only=last_only)
        else:
            rendered = self._by_prefixes(messages, chat.tools, turns, last_only=last_only)
        if not rendered.spans:
            raise RefusedRowError(
                "MaskUnsound",
                "no assistant turn can be placed with certainty in the rendered chat"
                if not last_only
                else "the last assistant turn cannot be placed with certainty in the rendered chat",
            )
        return rendered

    def _ready(self, messages: list[Message]) -> list[Message]:
        """A template that never mentions `developer` would drop or refuse it: there it is the system's role by its old name."""
        if not self._renames_developer:
            return messages
        return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, prompt: bool = False, track: bool = False
    ) -> tuple[str, list[Span]]:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ConfigError(
                f"spec.dataset.chatTemplate: the tokenizer has templates {', '.join(self._templates)} and no default; give one"
            )
        try:
            texts, indices = _render_chats(
                [messages],
                tools=tools,
                chat_template=self._templates[name],
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=track,
                **self._special_tokens,
            )
        except _TEMPLATE_FAULTS as error:
            raise RefusedRowError("TemplateRefused", f"the chat template refuses it: {error}") from error
        return texts[0], list(indices[0]) if track else []

    def _by_generation(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, turns: list[int], *, last_only: bool
    ) -> Rendered:
        text, spans = self._render(messages, tools, track=True)
        spans = [(start, end) for start, end in spans if start < end]
        if last_only and spans:
            before = self._render(messages[: turns[-1]], tools)[0] if turns[-1] else ""
            after = [span for span in spans if span[0] >= len(before)] if text.startswith(before) else []
            spans = after or spans[-1:]
        return Rendered(text, tuple(spans))

    def _by_prefixes(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, turns: list[int], *, last_only: bool
    ) -> Rendered:
        text = self._render(messages, tools)[0]
        spans = self._by_marks(text, messages, tools, turns)
        if spans is not None:
            return Rendered(text, tuple(spans[-1:] if last_only else spans))
        wanted = turns[-1:] if last_only else turns
        found = [self._turn(text, messages, turn, tools) for turn in wanted]
        certain = tuple(span for span in found if span)
        return Rendered(text, certain, len(wanted) - len(certain))

    def _by_marks(
        self, text: str, messages: list[Message], tools: list[dict[str, Any]] | None, turns: list[int]
    ) -> list[Span] | None:
        """All turns from one rendering, where the marks stand in the text exactly once for each turn; else None.

        No message may hold the marks itself, and each turn must hold all that its message says.
        """
        marks = self._marks_of(tools is not None)
        if marks is None or text.count(marks.header) != len(turns):
            return None
        spans, position = [], 0
        for turn in turns:
            start = text.index(marks.header, position) + len(marks.header)
            end = _end_of_turn(text, messages, turn, start, marks.end)
            if end is None:
                return None
            spans.append((start, end))
            position = end
        held = (marks.header, marks.end)
        if any(mark in value for message in messages for value in _strings(message) for mark in held):
            return None
        return spans

    def _marks_of(self, with_tools: bool) -> _Marks | None:
        if with_tools not in self._marks:
            self._marks[with_tools] = self._probe()
        return self._marks[with_tools]

    def _probe(self) -> _Marks | None:
        user = {"role": "user", "content": _PROBE}
        try:
            before = self._render([user], None)[0]
            prompt = self._render([user], None, prompt=True)[0]
            whole = self._render([user, {"role": "assistant", "content": _PROBE + "."}], None)[0]
        except RefusedRowError:
            return None
        header = prompt.removeprefix(before)
        tail = whole.rpartition(_PROBE + ".")[2].rstrip()
        if not prompt.startswith(before) or tail not in self._added_tokens:
            return None
        return _Marks(header, tail) if any(token in header for token in self._added_tokens) else None

    def _turn(self, text: str, messages: list[Message], turn: int, tools: list[dict[str, Any]] | None) -> Span | None:
        """One turn by comparing renderings of the messages before it and up to it with the whole; None where not certain."""
        start = self._prompt_end(text, messages, turn, tools)
        if start is None:
            return None
        try:
            upto = text if turn == len(messages) - 1 else self._render(messages[: turn + 1], tools)[0]
        except RefusedRowError:
            return None
        if text.startswith(upto) and start < len(upto):
            return start, self._without_trailing_space(text, start, len(upto))
        # The turn stands otherwise than when it was the last one.
        ending = upto.rstrip()
        end_token = next((token for token in self._added_tokens if ending.endswith(token)), None)
        if end_token is None or any(end_token in value for value in _strings(messages[turn])):
            return None
        end = _end_of_turn(text, messages, turn, start, end_token)
        return (start, end) if end is not None else None

    def _prompt_end(
        self, text: str, messages: list[Message], count: int, tools: list[dict[str, Any]] | None
    ) -> int | None:
        """Where the rendering of the first messages with a generation prompt ends in the text; None where that is not certain."""
        if count == 0:
            return self._first_turn_start(text, messages[0])
        try:
            prompt = self._render(messages[:count], tools, prompt=True)[0]
            if text.startswith(prompt):
                return len(prompt)
            before = self._render(messages[:count], tools)[0]
        except RefusedRowError:
            return None
        if not (text.startswith(before) and prompt.startswith(before)):
            return None
        # The generation prompt may open what the rendered turn lacks (`<think>`): then the message itself must follow at once.
        position = len(before)
        while position < min(len(prompt), len(text)) and prompt[position] == text[position]:
            position += 1
        said = messages[count]["content"].strip()
        return position if said and text[position:].lstrip().startswith(said) else None

    def _first_turn_start(self, text: str, message: Message) -> int | None:
        """A chat that opens with the assistant: no prompt to compare with, so its content must stand in the text exactly once."""
        said = message["content"]
        return text.index(said) if said and text.count(said) == 1 else None

    def _without_trailing_space(self, text: str, start: int, end: int) -> int:
        """The model stops at the token that ends its turn: the newline that templates put after it is not the model's."""
        kept = len(text[start:end].rstrip())
        turn = text[start : start + kept]
        return start + kept if any(turn.endswith(token) for token in self._added_tokens) else end


def _render_chats(chats: list[list[Message]], **arguments: Any) -> Any:
    """Transformers' own rendering, as `apply_chat_template` does it: (texts, spans of `{% generation %}`)."""
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415  (seconds to import)

    return render_jinja_template(chats, **arguments)


def _end_of_turn(text: str, messages: list[Message], turn: int, start: int, end_token: str) -> int | None:
    """Behind the first end token after start, if all that the message says, and nothing of the next one, stands before it."""
    end = text.find(end_token, start)
    if end < 0:
        return None
    rest = text[start:end]
    for part in _said(messages[turn]):
        if part not in rest:
            return None
        rest = rest.replace(part, "", 1)
    if turn + 1 < len(messages):
        following = messages[turn + 1]["content"].strip()
        if not following or following in rest:
            return None
    return end + len(end_token)


def _said(message: Message) -> list[str]:
    """What of a message must stand in its turn, long parts first."""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking") or ""
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return sorted(
        (part for part in (message["content"].strip(), reasoning.strip(), *names) if part), key=len, reverse=True
    )


def _strings(message: Message) -> list[str]:
    """All text of a message that could reach the rendering."""
    texts = [value for value in message.values() if isinstance(value, str)]
    calls = message.get("tool_calls")
    return [*texts, json.dumps(calls, ensure_ascii=False)] if calls else texts
