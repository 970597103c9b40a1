"""The generated CRD: up to date, documented in full, and as strict as the models."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from headframe_api.admission import IMMUTABLE_FIELDS, MODEL_RULES
from headframe_api.crd import build_crd, structural_schema
from headframe_api.spec import ExtractionJobSpec

ROOT = Path(__file__).parents[2]
SCHEMA = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field below a schema with its path."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from nodes(field, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


def test_generated_files_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.drifted() == []


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_field_is_described(part: str) -> None:
    undescribed = [path for path, field in nodes(SCHEMA["properties"][part]) if not field.get("description")]
    assert undescribed == []


def test_nothing_of_json_schema_is_left_that_kubernetes_refuses() -> None:
    refused = {"$ref", "$defs", "anyOf", "const", "title"}
    assert [path for path, field in nodes(SCHEMA) if refused & field.keys()] == []


def test_defaults_are_those_of_the_models() -> None:
    job = {"model": {"source": "m"}, "dataset": {"source": "d"}, "output": {"uri": "o"}}
    filled = _with_defaults(SCHEMA["properties"]["spec"], job)
    assert ExtractionJobSpec.model_validate(filled) == ExtractionJobSpec.model_validate(job)
    assert filled["states"] == {"preset": "dflash", "last": "preNorm", "dtype": "bfloat16"}


def test_every_model_with_a_validator_has_its_rules() -> None:
    def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
        yield model
        for field in model.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from models(field.annotation)

    def refuses(model: type[BaseModel]) -> bool:
        return any(found.info.mode == "after" for found in model.__pydantic_decorators__.model_validators.values())

    with_validators = {m for m in models(ExtractionJobSpec) if refuses(m)}
    assert with_validators == MODEL_RULES.keys() - {ExtractionJobSpec}


def test_a_rule_points_to_fields_that_exist() -> None:
    for model, rules in MODEL_RULES.items():
        fields = structural_schema(model)["properties"].keys()
        for rule in rules:
            assert set(re.findall(r"(?:self|oldSelf)\.(\w+)\b(?!\()", rule.rule)) <= fields, rule.rule
            assert rule.field is None or rule.field in fields


def test_what_decides_the_output_is_immutable() -> None:
    rules = SCHEMA["properties"]["spec"]["x-kubernetes-validations"]
    assert [rule["fieldPath"] for rule in rules if "oldSelf" in rule["rule"]] == [f".{f}" for f in IMMUTABLE_FIELDS]


def _with_defaults(schema: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """What the API server stores: defaults filled in from the top down."""
    result = dict(value)
    for name, field in schema.get("properties", {}).items():
        if name not in result and "default" in field:
            result[name] = field["default"]
        if isinstance(result.get(name), dict):
            result[name] = _with_defaults(field, result[name])
    return result
