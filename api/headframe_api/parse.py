"""From a document to an ExtractionJob, or one error that lists everything wrong with it."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from headframe_api.errors import ConfigError
from headframe_api.job import ExtractionJob

_SHOWN_VALUE_LENGTH = 60
_HIDDEN_VALUES = ("worker", "env")
_EXPECTED = {
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}


def parse_job(document: object, *, where: str = "manifest") -> ExtractionJob:
    """The ExtractionJob in a parsed YAML or JSON document.

    ``where`` names the document in errors. Raises ConfigError with a line for each fault: path, value, what is allowed,
    and the likely spelling where a field's name nearly matches one.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: must hold one ExtractionJob (a mapping with apiVersion, kind, metadata and spec)")
    if document.get("kind", "ExtractionJob") == "ExtractionJob":
        # A status that an older or newer operator wrote is no reason to refuse the spec.
        document = {key: value for key, value in document.items() if key != "status"}
    try:
        return ExtractionJob.model_validate(document)
    except ValidationError as error:
        faults = list(dict.fromkeys(_faults(error)))
    count = "1 error" if len(faults) == 1 else f"{len(faults)} errors"
    raise ConfigError("\n".join([f"{where}: {count}", *(f"  {fault}" for fault in faults)]), reason="InvalidManifest")


def _faults(error: ValidationError) -> Iterator[str]:
    """One line a fault; the branches of a union (`auto` or a number) become one line together."""
    by_path: dict[tuple[str | int, ...], list[Any]] = {}
    for detail in error.errors(include_url=False):
        by_path.setdefault(_field_path(detail["loc"]), []).append(detail)
    for path, details in by_path.items():
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        if details[0]["type"] == "value_error":
            # A model's own check says which of its fields is meant: "uri: ...".
            for detail in details:
                text = str(detail["ctx"]["error"])
                separator = "." if text.split(":", maxsplit=1)[0].isidentifier() and ":" in text else ": "
                yield f"{name}{separator}{text}"
            continue
        yield f"{name}: {_sentence(path, details)}"


def _sentence(path: tuple[str | int, ...], details: list[Any]) -> str:
    kind = details[0]["type"]
    if kind == "extra_forbidden":
        return f"unknown field{_suggestion(path)}"
    if kind == "missing":
        return "is required"
    allowed = " or ".join(dict.fromkeys(_allowed(detail) for detail in details))
    if any(part in _HIDDEN_VALUES for part in path[1:2]) or path[1:3] == _HIDDEN_VALUES:
        return allowed
    value = repr(details[0]["input"])
    shown = value if len(value) <= _SHOWN_VALUE_LENGTH else value[:_SHOWN_VALUE_LENGTH] + "..."
    return f"{shown} {allowed}"


def _allowed(detail: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        near = difflib.get_close_matches(str(detail["input"]), choices, 1)
        return f"must be {context['expected']}" + (f" (did you mean {near[0]!r}?)" if near and len(choices) > 1 else "")
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    bounds = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}
    if kind in bounds:
        key, words = bounds[kind]
        return f"must be {words} {context[key]}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind in ("string_too_long", "too_long"):
        return f"must have at most {context['max_length']} {'characters' if kind.startswith('string') else 'entries'}"
    return str(detail["msg"])


def _field_path(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The location without the names of union branches, which pydantic adds (`int`, `literal['auto']`)."""
    path: list[str | int] = []
    model: Any = ExtractionJob
    for part in location:
        if isinstance(part, str) and isinstance(model, type) and issubclass(model, BaseModel):
            field = next((info for name, info in model.model_fields.items() if part in (info.alias, name)), None)
            path.append(part)
            model = _model_of(field.annotation) if field else dict
        elif isinstance(part, int) or model is dict:
            path.append(part)
        # else: the name of a union's branch
    return tuple(path)


def _model_of(annotation: Any) -> Any:
    """The model inside an annotation such as `list[Model]` or `Model | None`; dict for a free mapping; None for a scalar."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if annotation is dict or typing.get_origin(annotation) is dict:
        return dict
    for argument in typing.get_args(annotation):
        found = _model_of(argument)
        if found is not None:
            return found
    return None


def _suggestion(path: tuple[str | int, ...]) -> str:
    """What fields the parent has: the near miss where there is one, else all of them."""
    model: Any = ExtractionJob
    for part in path[:-1]:
        if isinstance(part, str):
            field = next(info for name, info in model.model_fields.items() if part in (info.alias, name))
            model = _model_of(field.annotation)
    names = [info.alias or name for name, info in model.model_fields.items()]
    near = difflib.get_close_matches(str(path[-1]), names, 1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed are {', '.join(names)}"
