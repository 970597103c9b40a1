"""docs/manifest.md, built from the models: every field, its type, default, bounds and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headframe_api.admission import IMMUTABLE_FIELDS
from headframe_api.crd import structural_schema
from headframe_api.spec import ExtractionJobSpec
from headframe_api.status import ExtractionJobStatus

_BOUNDS = (
    ("minimum", "at least {}"),
    ("maximum", "at most {}"),
    ("maxLength", "at most {} characters"),
    ("maxItems", "at most {} entries"),
    ("maxProperties", "at most {} entries"),
)


def build_reference(example: str) -> str:
    """The manifest reference in Markdown, with ``example`` (the text of a full manifest) at its start."""
    spec, status = structural_schema(ExtractionJobSpec), structural_schema(ExtractionJobStatus)
    lines = [
        "# The manifest",
        "",
        "Generated from the models in `api/headframe_api` by `make generate`; do not edit.",
        "",
        "`kubectl apply -f job.yaml` and `headframe run job.yaml` take the same document. Unknown fields are errors.",
        f"What decides the output ({', '.join(f'`{field}`' for field in IMMUTABLE_FIELDS)}) cannot be changed once the",
        "ExtractionJob exists. A change of `workers`, `suspend`, a deadline or the TTL acts at once; a change of `worker`,",
        "`s3`, `batchTokens` or `failurePolicy` replaces the pods of the stage that runs, and committed parts are kept.",
        "",
        "```yaml",
        example.rstrip(),
        "```",
        "",
        *_section("spec", spec),
        *_section("status", status),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _section(path: str, schema: dict[str, Any]) -> Iterator[str]:
    """One table for an object, then the sections of the objects inside it."""
    required = schema.get("required", ())
    yield f"## {path}"
    yield ""
    yield schema["description"]
    yield ""
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    inner = []
    for name, field in schema["properties"].items():
        default = "required" if name in required and path.startswith("spec") else _default(field)
        meaning = " ".join([field["description"], *_limits(field)])
        yield f"| `{name}` | {_type(field)} | {default} | {_escaped(meaning)} |"
        nested = field.get("items", field) if field.get("type") == "array" else field
        if "properties" in nested:
            inner.append((f"{path}.{name}" + ("[]" if nested is not field else ""), nested))
    yield ""
    rules = [rule["message"] for rule in schema.get("x-kubernetes-validations", ()) if "oldSelf" not in rule["rule"]]
    if rules:
        yield "Refused:"
        yield ""
        yield from (f"- {rule}" for rule in rules)
        yield ""
    for nested_path, nested in inner:
        yield from _section(nested_path, nested)


def _type(field: dict[str, Any]) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "integer or `auto`"
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if "additionalProperties" in field:
        return f"mapping to {_type(field['additionalProperties'])}"
    return str(field["type"])


def _default(field: dict[str, Any]) -> str:
    if field.get("default", "") == "" or field.get("type") == "object":
        return ""
    value = field["default"]
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _limits(field: dict[str, Any]) -> Iterator[str]:
    if field.get("x-kubernetes-int-or-string"):
        yield f"({field['x-kubernetes-validations'][0]['message']})"
    bounds = [text.format(f"{field[key]:,}") for key, text in _BOUNDS if key in field]
    if bounds:
        yield f"({', '.join(bounds)})"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
