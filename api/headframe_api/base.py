"""Bases of every model: strict types, no unknown fields, immutable; camelCase towards Kubernetes, snake_case on disk."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel


class KubernetesModel(BaseModel):
    """A part of the custom resource or of what pods report to the operator: camelCase in YAML and JSON."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """A null is a field that was not given, as it is for the API server."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict with Kubernetes' spelling, without the fields that are unset (None)."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class DiskModel(BaseModel):
    """A JSON file of the output: snake_case, as the datasets and safetensors files beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    def to_json(self) -> bytes:
        """UTF-8 JSON with two spaces of indentation and a final newline."""
        return self.model_dump_json(indent=2).encode() + b"\n"


class ReportModel(KubernetesModel):
    """What one version of a pod tells another version of the operator: unknown fields are ignored, not refused."""

    model_config = ConfigDict(extra="ignore", strict=False)
