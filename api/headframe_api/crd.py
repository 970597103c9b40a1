"""The CustomResourceDefinition, built from the models: a structural schema, the admission rules, table columns, scale.

Pydantic gives the JSON schema; this module turns it into the subset that the API server takes ("structural"): no
references, no unions, no titles, and Kubernetes' own extensions where JSON schema has no word.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headframe_api.admission import MODEL_RULES, int_or_auto
from headframe_api.job import ExtractionJob
from headframe_api.names import GROUP, KIND, PLURAL, SHORT_NAME, SINGULAR, VERSION
from headframe_api.spec import ExtractionJobSpec
from headframe_api.status import ExtractionJobStatus

_KEPT = (
    "type",
    "description",
    "default",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
)
_LIST_KINDS: dict[tuple[str, str], dict[str, Any]] = {
    ("StatesSpec", "layers"): {"x-kubernetes-list-type": "set"},
    ("ExtractionJobStatus", "conditions"): {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
}
"""Lists that are not merely replaced whole, by model and field."""
_LARGEST_INT64 = 2**63 - 1

_COLUMNS: tuple[tuple[str, str, str, int, str], ...] = (
    ("Phase", "string", ".status.phase", 0, "Where the job stands"),
    ("%", "number", ".status.progress.percent", 0, "Tokens done, of all"),
    ("Samples/s", "number", ".status.progress.samplesPerSecond", 0, "All workers together"),
    ("ETA", "string", ".status.progress.estimatedCompletionTime", 0, "When extraction will be done at this rate"),
    ("Shards", "string", ".status.shards.summary", 0, "Finished and all"),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since creation"),
    ("Model", "string", ".spec.model.source", 1, "Whose hidden states"),
    ("Tokens", "integer", ".status.plan.tokens", 1, "Tokens in the plan"),
    ("Quarantined", "integer", ".status.quarantined", 1, "Refused samples"),
    ("Output", "string", ".spec.output.uri", 1, "Where the states go"),
)


def build_crd() -> dict[str, Any]:
    """The CustomResourceDefinition of ExtractionJob as a JSON-ready dict."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
            },
            "scope": "Namespaced",
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {
                "description": ExtractionJob.__doc__,
                "type": "object",
                "required": ["spec"],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object"},
                    "spec": structural_schema(ExtractionJobSpec),
                    "status": structural_schema(ExtractionJobStatus),
                },
            }
        },
        "subresources": {
            "status": {},
            "scale": {"specReplicasPath": ".spec.workers", "statusReplicasPath": ".status.shards.active"},
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority, "description": description}
            for name, kind, path, priority, description in _COLUMNS
        ],
    }


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of one model, with every model inside it written out in place."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _structural(schema, schema.get("$defs", {}), model)


def _structural(node: dict[str, Any], definitions: dict[str, Any], model: type[BaseModel] | None) -> dict[str, Any]:
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[-1]
        inner = next(found for found in _models(model) if found.__name__ == name)
        return _structural(definitions[name], definitions, inner) | _kept(node)
    if "anyOf" in node:
        return _union(node, definitions, model)
    result = _kept(node)
    if node.get("type") == "array":
        result["items"] = _structural(node["items"], definitions, model)
    elif "properties" in node and model is not None:
        result |= _object(node, definitions, model)
    elif node.get("type") == "object":
        result |= _mapping(node, definitions, model)
    elif node.get("type") == "integer" and node.get("maximum", _LARGEST_INT64) > 2**31 - 1:
        result["format"] = "int64"
    return result


def _object(node: dict[str, Any], definitions: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    properties = {}
    for info, (name, node_of_field) in zip(model.model_fields.values(), node["properties"].items(), strict=True):
        properties[name] = _structural(node_of_field, definitions, model) | _LIST_KINDS.get((model.__name__, name), {})
        if _is_model_factory(info):
            # Spelt out, because the API server runs the rules on a default before it fills in the defaults inside it.
            inside = properties[name]["properties"].items()
            properties[name]["default"] = {inner: field["default"] for inner, field in inside if "default" in field}
    rules = [rule.to_schema() for rule in MODEL_RULES.get(model, ())]
    return (
        {"properties": properties}
        | ({"required": node["required"]} if node.get("required") else {})
        | ({"x-kubernetes-validations": rules} if rules else {})
    )


def _mapping(node: dict[str, Any], definitions: dict[str, Any], model: type[BaseModel] | None) -> dict[str, Any]:
    values = node.get("additionalProperties", True)
    if values is True:
        return {"x-kubernetes-preserve-unknown-fields": True}
    bounds = {"maxProperties": node["maxProperties"]} if "maxProperties" in node else {}
    return {"additionalProperties": _structural(values, definitions, model)} | bounds


def _union(node: dict[str, Any], definitions: dict[str, Any], model: type[BaseModel] | None) -> dict[str, Any]:
    """`X | None` is X, left out where it is null; `auto` or a number is Kubernetes' int-or-string."""
    branches = [branch for branch in node["anyOf"] if branch.get("type") != "null"]
    if len(branches) == 1:
        return _structural(branches[0], definitions, model) | _kept(node)
    number = next(branch for branch in branches if branch["type"] == "integer")
    rule = int_or_auto(number["minimum"], number["maximum"])
    return _kept(node) | {"x-kubernetes-int-or-string": True, "x-kubernetes-validations": [rule.to_schema()]}


def _kept(node: dict[str, Any]) -> dict[str, Any]:
    kept = {key: node[key] for key in _KEPT if key in node and not (key == "default" and node[key] is None)}
    return kept | ({"enum": [node["const"]]} if "const" in node else {})


def _is_model_factory(info: FieldInfo) -> bool:
    return isinstance(info.default_factory, type) and issubclass(info.default_factory, BaseModel)


def _models(model: type[BaseModel] | None) -> list[type[BaseModel]]:
    """The models that the fields of a model name, however deep inside list, optional and annotated types."""
    found: list[type[BaseModel]] = []

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found.append(annotation)
        for argument in getattr(annotation, "__args__", ()):
            visit(argument)

    for info in model.model_fields.values() if model else ():
        visit(info.annotation)
    return found
