"""What the API server itself refuses: the CEL rules of the CRD, one for each of the models' own validators.

The models refuse the same documents on one machine; tests run one table of manifests through both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from headframe_api.spec import (
    COLUMNS,
    DatasetSpec,
    ExtractionJobSpec,
    ModelSpec,
    OutputSpec,
    S3Spec,
    StatesSpec,
)

IMMUTABLE_FIELDS = ("model", "dataset", "states", "output", "shards")
"""What decides the output. The rest of the spec may change while the job runs."""


@dataclass(frozen=True)
class Rule:
    """One entry of x-kubernetes-validations; ``field`` is where the error points to, in the model's own spelling."""

    rule: str
    message: str
    field: str | None = None

    def to_schema(self) -> dict[str, Any]:
        """The entry as the CRD holds it."""
        where = {} if self.field is None else {"fieldPath": f".{self.field}"}
        return {"rule": self.rule, "message": self.message} | where


_IS_HUB_ID = (
    "!self.source.contains('://') && !self.source.matches('^[/.~]') && !self.source.matches('(/|[.]gguf)$') && "
    "self.source.split('/').size() <= 2"
)


def _file_uri_is_whole(field: str) -> Rule:
    return Rule(
        f"!self.{field}.startsWith('file://') || self.{field}.startsWith('file:///')",
        f"{field}: a file URI gives the path from the root; write file:///path",
        field,
    )


MODEL_RULES: dict[type[BaseModel], tuple[Rule, ...]] = {
    ModelSpec: (
        Rule(
            f"!has(self.revision) || ({_IS_HUB_ID})",
            "revision applies to hub ids only; take it away or name a hub id in source",
            "revision",
        ),
        _file_uri_is_whole("source"),
    ),
    DatasetSpec: (
        _file_uri_is_whole("source"),
        Rule(
            f"!has(self.columns) || self.columns.all(key, key in {list(COLUMNS)})",
            f"columns has an unknown key; allowed: {', '.join(COLUMNS)}",
            "columns",
        ),
        Rule(
            "!has(self.chatTemplate) || !(self.format in ['text', 'tokens'])",
            "chatTemplate: formats text and tokens render no chat; take chatTemplate away",
            "chatTemplate",
        ),
        Rule(
            "self.lossMask != 'lastAssistant' || !(self.format in ['text', 'tokens'])",
            "lossMask: formats text and tokens have no turns; use all",
            "lossMask",
        ),
    ),
    StatesSpec: (
        Rule(
            "self.last != 'none' || (has(self.layers) ? self.layers.size() > 0 : self.preset != 'none')",
            "nothing to keep: no layers and last is none; name layers, a preset, or last",
        ),
    ),
    OutputSpec: (
        Rule(
            "!self.uri.contains('://') || self.uri.matches('^(s3|file)://')",
            "uri: the scheme is not supported; use s3://bucket/prefix, file:///path or a path",
            "uri",
        ),
        Rule(
            "!self.uri.startsWith('s3://') || self.uri.matches('^s3://[^/]')",
            "uri names no bucket; write s3://bucket/prefix",
            "uri",
        ),
        _file_uri_is_whole("uri"),
    ),
    S3Spec: (
        Rule(
            "!has(self.kmsKeyId) || (has(self.encryption) && self.encryption.startsWith('aws:kms'))",
            "kmsKeyId needs encryption aws:kms or aws:kms:dsse",
            "kmsKeyId",
        ),
        Rule(
            "!has(self.endpoint) || self.endpoint.matches('^https?://')",
            "endpoint must start with http:// or https://",
            "endpoint",
        ),
    ),
    ExtractionJobSpec: tuple(
        Rule(
            f"self.{field} == oldSelf.{field}",
            f"{field} decides the output and is immutable; make a new ExtractionJob",
            field,
        )
        for field in IMMUTABLE_FIELDS
    ),
}


def int_or_auto(minimum: int, maximum: int) -> Rule:
    """A field that holds a number within bounds, or the word auto."""
    return Rule(
        f"type(self) == int ? self >= {minimum} && self <= {maximum} : self == 'auto'",
        f"must be auto or an integer from {minimum} to {maximum}",
    )
