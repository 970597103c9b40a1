"""JSON schemas for kubeconform, of several Kubernetes versions and of the Prometheus operator.

They are not downloaded ready-made: each version's own OpenAPI document lies in its Go module, and so do the Prometheus
operator's CRDs. The documents are kept under `~/.cache/headframe/schemas`, the modules are not.
"""

import hashlib
import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from testbed.tools import CACHE, MissingTool, go_command, locked

Json = dict[str, Any]
KUBERNETES_MODULES = {
    "1.29": ("v1.29.14", "86672d934e8b8b4c494aa06e665373cd13fa2a8d39ce36abd7588b2c77c92caa"),
    "1.30": ("v1.30.14", "137f22097f146caa3150deda2eccceec1ecd0b628054d1887bf55f93e715c7cb"),
    "1.31": ("v1.31.14", "ddcb3d5c3d85849f1fadb56387d3a7bf44712da291e5bd08b34df4e8a4247f8d"),
    "1.32": ("v1.32.13", "2335b4e7f79df85b20066164b14d8f02dd077dee7cd8c7b7fb425009c9837e85"),
    "1.33": ("v1.33.13", "2af5abf98554af1599e516f31f7f1698085e6faa12b816401f569c097b9f7ef6"),
    "1.34": ("v1.34.4", "d3b0cdc2fda15c753206d25ab459dc7c12df64e2fd652b6809687471ea751c37"),
}
"""Module version and SHA-256 of its swagger.json, by minor version."""
_MONITORING_MODULE = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
_MONITORING_KINDS = ("podmonitors", "servicemonitors", "prometheusrules")
_STORE = CACHE / "schemas"


def kubernetes_schemas(minor: str) -> Path:
    """A folder of schemas, `deployment-apps-v1.json` and so on, that refuse unknown fields, of one minor version."""
    version, digest = KUBERNETES_MODULES[minor]
    folder = _STORE / f"kubernetes-{version}"
    with locked(folder):
        if not folder.exists():
            swagger = _module_files(f"k8s.io/kubernetes@{version}", "api/openapi-spec/swagger.json")[0]
            if hashlib.sha256(swagger.encode()).hexdigest() != digest:
                raise RuntimeError(f"the OpenAPI document of Kubernetes {version} is not the one that is pinned")
            _write(folder, _from_swagger(json.loads(swagger)))
    return folder


def monitoring_crds() -> list[Json]:
    """The Prometheus operator's CRDs of the kinds that the chart makes."""
    folder = _STORE / _MONITORING_MODULE.replace("/", "-")
    with locked(folder):
        if not folder.exists():
            paths = [f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml" for kind in _MONITORING_KINDS]
            texts = _module_files(_MONITORING_MODULE, *paths)
            _write(
                folder,
                {f"{kind}.json": yaml.safe_load(text) for kind, text in zip(_MONITORING_KINDS, texts, strict=True)},
            )
    return [json.loads((folder / f"{kind}.json").read_text()) for kind in _MONITORING_KINDS]


def crd_schemas(crds: list[Json], folder: Path) -> None:
    """Write a schema for each version of each CRD, in the same form."""
    for crd in crds:
        kind = crd["spec"]["names"]["kind"].lower()
        for version in crd["spec"]["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            name = f"{kind}-{crd['spec']['group'].split('.')[0]}-{version['name']}.json"
            (folder / name).write_text(json.dumps(schema))


def _module_files(module: str, *paths: str) -> list[str]:
    """Texts of files of a Go module, which is downloaded to a folder that goes afterwards."""
    _STORE.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=_STORE, prefix=".module-") as folder:
        environment = os.environ | {"GOMODCACHE": folder, "GOFLAGS": "-modcacherw", "GOTOOLCHAIN": "local"}
        command = [str(go_command()), "mod", "download", "-json", module]
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise MissingTool(
                f"{module} cannot be had from the Go module proxy: {result.stdout[-500:]}{result.stderr[-500:]}"
            )
        root = Path(json.loads(result.stdout)["Dir"])
        return [(root / path).read_text() for path in paths]


def _from_swagger(swagger: Json) -> Json:
    definitions = {name: _strict(schema) for name, schema in swagger["definitions"].items()}
    definitions["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {"type": ["string", "number"]}
    files: Json = {"_definitions.json": {"definitions": definitions}}
    for name, schema in swagger["definitions"].items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            group = f"-{kind['group'].split('.')[0]}" if kind["group"] else ""
            file = f"{kind['kind'].lower()}{group}-{kind['version']}.json"
            files[file] = {"$ref": f"_definitions.json#/definitions/{name}"}
    return files


def _strict(schema: Json) -> Json:
    """A JSON schema that refuses unknown fields; descriptions, which nobody reads here, are left out."""
    if schema.get("format") == "int-or-string" or schema.get("x-kubernetes-int-or-string"):
        return {"type": ["string", "integer"]}
    if "$ref" in schema:
        return {"$ref": schema["$ref"].replace("#/definitions/", "_definitions.json#/definitions/")}
    made = {key: value for key, value in schema.items() if key != "description"}
    for key in ("items", "additionalProperties", "not"):
        if isinstance(schema.get(key), dict):
            made[key] = _strict(schema[key])
    for key in ("allOf", "anyOf", "oneOf"):
        if key in schema:
            made[key] = [_strict(part) for part in schema[key]]
    if "properties" in schema:
        made["properties"] = {name: _strict(field) for name, field in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made


def _write(folder: Path, files: Json) -> None:
    with TemporaryDirectory(dir=_STORE, prefix=".schemas-") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        for name, content in files.items():
            (made / name).write_text(json.dumps(content))
        made.rename(folder)
