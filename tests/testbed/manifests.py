"""The shared table of manifests: what it holds, the models and the API server must judge alike."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]
_FOLDER = Path(__file__).parent.parent / "data/manifests"
_VALID = yaml.safe_load((_FOLDER / "valid.yaml").read_text())
_INVALID = yaml.safe_load((_FOLDER / "invalid.yaml").read_text())


def manifest(spec: Json, name: str = "job") -> Json:
    """A whole ExtractionJob around a spec."""
    return {"apiVersion": "headframe.dev/v1alpha1", "kind": "ExtractionJob", "metadata": {"name": name}, "spec": spec}


def valid_specs() -> dict[str, Json]:
    """Specs that must be taken, by what they show."""
    patched = {title: merge(_VALID["base"], patch) for title, patch in _VALID["specs"].items()}
    return patched | {title: _VALID["base"] | fields for title, fields in _VALID["with_nulls"].items()}


def invalid_specs() -> Iterator[tuple[str, Json, str]]:
    """What it shows, the spec, and the path that the error must name."""
    for title, case in _INVALID["specs"].items():
        yield title, merge(_VALID["base"], case["spec"]), case["field"]


def merge(target: Json, patch: Json) -> Json:
    """JSON merge patch (RFC 7386) of two mappings."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key, {}), value) if isinstance(value, dict) else value
    return result
