"""What the chart renders, for each file of values in its ci folder: valid for every Kubernetes, and what the code means."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headframe_api.crd import build_crd
from headframe_operator.permissions import RULES
from headframe_operator.settings import Settings, read_settings
from testbed.helm import CHART, ROOT, VALUES, render, render_text
from testbed.schemas import KUBERNETES_MODULES, crd_schemas, kubernetes_schemas, monitoring_crds
from testbed.tools import go_tool, require

pytestmark = pytest.mark.cluster
Json = dict[str, Any]
CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}


@pytest.fixture(scope="module", autouse=True)
def _helm() -> None:
    with require():
        go_tool("helm")


def of_kind(documents: list[Json], *kinds: str) -> list[Json]:
    return [document for document in documents if document["kind"] in kinds]


def operator_environment(documents: list[Json]) -> dict[str, str]:
    (deployment,) = of_kind(documents, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable["value"] for variable in container["env"]}


@pytest.mark.parametrize("minor", KUBERNETES_MODULES)
def test_everything_is_valid_in_every_supported_kubernetes(minor: str, tmp_path: Path) -> None:
    with require():
        schemas, kubeconform, monitoring = kubernetes_schemas(minor), go_tool("kubeconform"), monitoring_crds()
    crd_schemas([*monitoring, build_crd()], tmp_path)
    names = "{{ .ResourceKind }}{{ .KindSuffix }}.json"
    for values in VALUES:
        text = render_text("--values", values, version=f"{minor}.0")
        locations = [f"-schema-location={folder}/{names}" for folder in (schemas, tmp_path)]
        result = subprocess.run(
            [kubeconform, *locations, "-summary"], input=text, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{values.name}: {result.stdout}{result.stderr}"
        count = len([document for document in yaml.safe_load_all(text) if document])
        assert f"Summary: {count} resources found parsing stdin - Valid: {count}," in result.stdout


def test_an_unknown_field_would_be_seen(tmp_path: Path) -> None:
    with require():
        schemas, kubeconform = kubernetes_schemas("1.34"), go_tool("kubeconform")
    text = render_text().replace("readOnlyRootFilesystem:", "readOnlyRootFileSystem:", 1)
    location = f"-schema-location={schemas}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
    result = subprocess.run(
        [kubeconform, location, "-ignore-missing-schemas"], input=text, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "readOnlyRootFileSystem" in result.stdout


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_operator_understands_its_environment(values: Path) -> None:
    environment = operator_environment(render("--values", values))
    settings = read_settings({key: value for key, value in environment.items() if key.startswith("HEADFRAME_")})
    assert settings.log_format in ("json", "text")


def test_the_defaults_are_the_operators_own() -> None:
    settings = read_settings(operator_environment(render()))
    own = Settings(log_format="json")  # the one thing that is better otherwise in a cluster
    assert settings == own


def test_every_setting_can_be_given() -> None:
    values = yaml.safe_load((CHART / "ci/full.yaml").read_text()) | {"namespaces": ["a", "b"]}
    given = operator_environment(render("--set-json", ",".join(f"{k}={json.dumps(v)}" for k, v in values.items())))
    named = {key.removeprefix("HEADFRAME_OPERATOR_").lower() for key in given if key.startswith("HEADFRAME_OPERATOR_")}
    assert named == set(Settings.model_fields) - {"port"}, "the port is fixed: probes, Service and monitors name it"


def test_rights_are_exactly_the_operators_table() -> None:
    documents = render()
    (role,) = [role for role in of_kind(documents, "ClusterRole") if role["metadata"]["name"] == "headframe"]
    assert role["rules"] == list(RULES)
    (binding,) = of_kind(documents, "ClusterRoleBinding")
    (account,) = of_kind(documents, "ServiceAccount")
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "headframe-system"}
    ]


def test_with_namespaces_nothing_is_cluster_wide_but_the_crd() -> None:
    documents = render("--set-json", 'namespaces=["a","b"]')
    assert [document["kind"] for document in of_kind(documents, *CLUSTER_WIDE)] == ["CustomResourceDefinition"]
    roles = [role for role in of_kind(documents, "Role") if role["metadata"]["name"] == "headframe"]
    assert [(role["metadata"]["namespace"], role["rules"]) for role in roles] == [
        ("a", list(RULES)),
        ("b", list(RULES)),
    ]
    assert {binding["metadata"]["namespace"] for binding in of_kind(documents, "RoleBinding")} == {"a", "b"}


def test_the_crd_is_the_one_of_the_models() -> None:
    (kept,) = of_kind(render(), "CustomResourceDefinition")
    assert kept["spec"] == build_crd()["spec"]
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (given_away,) = of_kind(render("--set=crds.keep=false"), "CustomResourceDefinition")
    assert "annotations" not in given_away["metadata"]
    assert not of_kind(render("--set=crds.enabled=false"), "CustomResourceDefinition")


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("crd.enabled=true", "additional properties 'crd' not allowed"),
        ("image.tga=1", "additional properties 'tga' not allowed"),
        ("settings.logLevel=TRACE", "must be one of"),
        ("settings.pollConcurrency=0", "minimum"),
        ("worker.defaults.image=x", "additional properties 'image' not allowed"),
        ("worker.userId=0", "minimum"),
        ("monitoring.monitor=Both", "must be one of"),
        ("resources.limits.memory=lots", "does not match pattern"),
    ],
)
def test_a_mistake_in_the_values_is_refused(setting: str, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(complaint)):
        render_text("--set", setting)


def test_every_value_is_in_the_schema() -> None:
    """Else a value could be there that no schema checks, or a schema for a value that is gone."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def names(node: Json, value: Any, path: str) -> tuple[set[str], set[str]]:
        if not isinstance(value, dict) or node.get("additionalProperties") is not False:
            return set(), set()
        known = {f"{path}{key}" for key in node["properties"] if key != "global"}
        given = {f"{path}{key}" for key in value}
        for key, inner in value.items():
            more = names(node["properties"].get(key, {}), inner, f"{path}{key}.")
            known, given = known | more[0], given | more[1]
        return known, given

    known, given = names(schema, values, "")
    assert known == given


def test_dashboards_and_alerts_are_the_files_of_the_chart() -> None:
    documents = render("--values", CHART / "ci/full.yaml")
    (dashboards,) = [m for m in of_kind(documents, "ConfigMap") if "grafana_dashboard" in m["metadata"]["labels"]]
    assert set(dashboards["data"]) == {"headframe-extractionjobs.json", "headframe-workers.json"}
    for name, text in dashboards["data"].items():
        file = CHART / "files/dashboards" / name.removeprefix("headframe-")
        assert json.loads(text) == json.loads(file.read_text())
    (rule,) = of_kind(documents, "PrometheusRule")
    alerts = (CHART / "files/alerts.yaml").read_text()
    assert rule["spec"] == yaml.safe_load(
        alerts.replace("RUNBOOKS", "https://github.com/headframe/headframe/blob/main/docs/operations.md")
    )


def test_nothing_is_on_that_nobody_asked_for() -> None:
    kinds = {document["kind"] for document in render()}
    assert kinds == {
        "ClusterRole", "ClusterRoleBinding", "ConfigMap", "CustomResourceDefinition", "Deployment", "Pod", "Service", "ServiceAccount",
    }  # fmt: skip


def test_monitors_are_of_one_kind_for_the_operator() -> None:
    for monitor in ("PodMonitor", "ServiceMonitor"):
        documents = render(f"--set=monitoring.monitor={monitor}")
        found = [(m["kind"], m["metadata"]["name"]) for m in of_kind(documents, "PodMonitor", "ServiceMonitor")]
        assert sorted(found) == sorted([(monitor, "headframe"), ("PodMonitor", "headframe-workers")])


def test_the_readme_is_what_helm_docs_makes_of_the_values() -> None:
    with require():
        docs = go_tool("helm-docs")
    made = subprocess.run(
        [docs, "--chart-search-root", ROOT / "charts", "--dry-run", "--log-level", "warning"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert (CHART / "README.md").read_text().strip() == made.strip(), "run make generate"


def test_helm_lint_is_content() -> None:
    subprocess.run([go_tool("helm"), "lint", "--strict", CHART], check=True, capture_output=True)
