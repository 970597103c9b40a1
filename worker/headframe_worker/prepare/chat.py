"""One shape for every chat: OpenAI's messages, ShareGPT's conversations and prompt-completion rows become `Sample`s."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headframe_worker.prepare.refusal import RefusedRowError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_OPTIONAL_STRINGS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Messages as a chat template reads them."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    prompt_messages: int | None = None
    """Of a prompt-completion row: how many of the messages are its prompt."""


def chat_from_messages(value: object, tools: object = None) -> Chat:
    """A chat out of a `messages` or `conversations` column. Raises RefusedRowError."""
    return Chat(_messages(value, "messages"), _tools(tools))


def chat_from_prompt_completion(prompt: object, completion: object, tools: object = None) -> Chat:
    """A chat whose prompt and completion are lists of messages. Raises RefusedRowError."""
    prompt_messages, completion_messages = _messages(prompt, "prompt"), _messages(completion, "completion")
    return Chat(prompt_messages + completion_messages, _tools(tools), len(prompt_messages))


def _messages(value: object, column: str) -> list[Message]:
    if not isinstance(value, list):
        raise RefusedRowError("WrongType", f"{column} is {_kind(value)}, not a list of messages")
    if not value:
        raise RefusedRowError("EmptySample", f"{column} is an empty list")
    messages = [_message(entry, f"{column}[{index}]") for index, entry in enumerate(value)]
    if not any(message["content"].strip() or "tool_calls" in message for message in messages):
        raise RefusedRowError("EmptySample", f"no message of {column} says anything")
    return messages


def _message(entry: object, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise RefusedRowError("WrongType", f"{where} is {_kind(entry)}, not a message")
    if entry.get("role") is None and entry.get("from") is not None:
        entry = _from_sharegpt(entry, where)
    role = entry.get("role")
    if not isinstance(role, str):
        raise RefusedRowError("WrongType", f"{where}.role is {_kind(role)}, not a string")
    if role not in ROLES:
        raise RefusedRowError("UnknownRole", f"{where}.role is {role[:40]!r}; known are {', '.join(ROLES)}")
    message: Message = {"role": role}
    for key in _OPTIONAL_STRINGS:
        if entry.get(key) is not None:
            if not isinstance(entry[key], str):
                raise RefusedRowError("WrongType", f"{where}.{key} is {_kind(entry[key])}, not a string")
            message[key] = entry[key]
    calls = entry.get("tool_calls")
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    message["content"] = _content(entry.get("content"), f"{where}.content", optional="tool_calls" in message)
    return message


def _from_sharegpt(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    speaker = entry["from"]
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise RefusedRowError(
            "UnknownRole", f"{where}.from is {str(speaker)[:40]!r}; known are {', '.join(_SHAREGPT_ROLES)}"
        )
    value = entry.get("value")
    if speaker == "function_call" and isinstance(value, str):
        call = _parsed(value)
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            return {"role": role, "content": "", "tool_calls": [call]}
    return {**entry, "role": role, "content": value}


def _content(value: object, where: str, *, optional: bool) -> str:
    """Text as a string; a list of text parts is their concatenation, as templates for multimodal models render it."""
    if value is None and optional:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RefusedRowError("WrongType", f"{where} is {_kind(value)}, not a string or a list of text parts")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RefusedRowError("WrongType", f"{where} is {_kind(part)}, not a part of a message")
    if part.get("type", "text") not in _TEXT_PARTS:
        raise RefusedRowError("UnsupportedContent", f"{where} has type {str(part['type'])[:40]!r}; only text is read")
    text = part.get("text")
    if not isinstance(text, str):
        raise RefusedRowError("WrongType", f"{where}.text is {_kind(text)}, not a string")
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's nesting, with arguments as mappings: the form that Transformers documents for templates."""
    if not isinstance(calls, list):
        raise RefusedRowError("WrongType", f"{where} is {_kind(calls)}, not a list")
    result = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RefusedRowError("WrongType", f"{where}[{index}] names no function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            parsed = _parsed(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
        entry = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
        if isinstance(call.get("id"), str):
            entry["id"] = call["id"]
        result.append(entry)
    return result


def _tools(value: object) -> list[dict[str, Any]] | None:
    """A list of JSON schemas; hub datasets often hold it as a JSON string."""
    if isinstance(value, str):
        value = _parsed(value) if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RefusedRowError("WrongType", f"tools is {_kind(value)}, not a list of JSON schemas")
    return value


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _kind(value: object) -> str:
    """JSON's name of a value's type."""
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object", type(None): "missing or null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
