"""The CRD on a real API server: it refuses what the models refuse, with the field's name, and takes what they take."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import CustomObjectsApi
from kubernetes.client.exceptions import ApiException

from testbed.control_plane import ControlPlane
from testbed.manifests import Json, invalid_specs, manifest, merge, valid_specs
from testbed.tools import go_tool

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]
BASE = valid_specs()["as little as possible"]
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
RESOURCE = ("headframe.dev", "v1alpha1", "default", "extractionjobs")


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane) -> CustomObjectsApi:
    return CustomObjectsApi(control_plane.client())


def create(api: CustomObjectsApi, document: Json, **options: Any) -> Any:
    """Create an ExtractionJob, as `kubectl apply` would; unknown fields are errors."""
    return api.create_namespaced_custom_object(*RESOURCE, document, field_validation="Strict", **options)


def refusal(api: CustomObjectsApi, document: Json) -> str:
    """What the API server says against a document."""
    with pytest.raises(ApiException) as caught:
        create(api, document, dry_run="All")
    assert caught.value.status in (400, 422)
    return str(caught.value.body)


@pytest.mark.parametrize("spec", valid_specs().values(), ids=valid_specs().keys())
def test_valid_manifests_are_taken(api: CustomObjectsApi, spec: Json) -> None:
    taken = create(api, manifest(spec), dry_run="All")
    assert taken["spec"]["states"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("spec", "field"), [(s, f) for _, s, f in invalid_specs()], ids=[t for t, _, _ in invalid_specs()]
)
def test_invalid_manifests_are_refused_by_field(api: CustomObjectsApi, spec: Json, field: str) -> None:
    assert field in refusal(api, manifest(spec))


def test_unknown_fields_are_refused(api: CustomObjectsApi) -> None:
    assert 'unknown field \\"spec.states.layres\\"' in refusal(api, manifest(merge(BASE, {"states": {"layres": [1]}})))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_apply(control_plane: ControlPlane, path: Path) -> None:
    """Everything in the file, as the API server would take it: no unknown field in any document."""
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    for document in documents:
        document["metadata"].pop("namespace", None)
    assert any(document["kind"] == "ExtractionJob" for document in documents)
    said = control_plane.kubectl(
        "apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump_all(documents)
    )
    assert said.count("(server dry run)") == len(documents)


def test_a_training_waits_for_its_extraction_with_the_rights_of_the_example(control_plane: ControlPlane) -> None:
    """`kubectl wait`, as the example's training Job calls it, by the example's service account."""
    documents = list(
        yaml.safe_load_all((Path(__file__).parents[2] / "examples/train-after-extraction.yaml").read_text())
    )
    training = next(document for document in documents if document["kind"] == "Job")["spec"]["template"]["spec"]
    command = [*training["initContainers"][0]["command"][1:], "--timeout=60s"]
    job = next(document for document in documents if document["kind"] == "ExtractionJob")
    with control_plane.namespace() as namespace:
        rights = [document for document in documents if document["kind"] != "Job"]
        control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump_all(rights))
        account = control_plane.kubeconfig_of_service_account(namespace, training["serviceAccountName"])
        kubectl = [str(go_tool("kube", "kubectl")), f"--kubeconfig={account}", "-n", namespace]
        with subprocess.Popen(
            [*kubectl, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as waiting:
            objects = CustomObjectsApi(control_plane.client())
            name = job["metadata"]["name"]
            condition = {"type": "Complete", "status": "True", "reason": "Succeeded", "message": "done"}
            condition["lastTransitionTime"] = "2026-01-01T00:00:00Z"
            assert waiting.poll() is None
            objects.patch_namespaced_custom_object_status(
                RESOURCE[0], RESOURCE[1], namespace, RESOURCE[3], name, {"status": {"conditions": [condition]}}
            )
            said = waiting.communicate(timeout=90)[0]
        assert (waiting.returncode, said.strip()) == (0, f"extractionjob.headframe.dev/{name} condition met")
        denied = subprocess.run(
            [*kubectl, "delete", f"extractionjob/{name}"], capture_output=True, text=True, check=False
        )
        assert "Forbidden" in denied.stderr


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", {"model": {"source": "gpt2"}}),
        ("dataset", {"dataset": {"maxLength": 17}}),
        ("states", {"states": {"layers": [3]}}),
        ("output", {"output": {"uri": "elsewhere"}}),
        ("shards", {"shards": 7}),
    ],
)
def test_what_decides_the_output_cannot_change(api: CustomObjectsApi, field: str, change: Json) -> None:
    name = f"immutable-{field}"
    create(api, manifest(BASE, name))
    try:
        with pytest.raises(ApiException) as caught:
            api.patch_namespaced_custom_object(*RESOURCE, name, {"spec": change})
        assert f"spec.{field}" in caught.value.body
        assert f"{field} decides the output and is immutable" in caught.value.body
    finally:
        api.delete_namespaced_custom_object(*RESOURCE, name)


@pytest.mark.parametrize(
    "change",
    [
        {"workers": 5},
        {"suspend": True},
        {"activeDeadlineSeconds": 5},
        {"pendingDeadlineSeconds": 5},
        {"ttlSecondsAfterFinished": 5},
        {"worker": {"image": "other"}},
        {"s3": {"region": "here"}},
    ],
    ids=str,
)
def test_the_rest_may_change(api: CustomObjectsApi, change: Json) -> None:
    create(api, manifest(BASE, "mutable"))
    try:
        api.patch_namespaced_custom_object(*RESOURCE, "mutable", {"spec": change})
    finally:
        api.delete_namespaced_custom_object(*RESOURCE, "mutable")


def test_the_scale_subresource_is_the_workers(api: CustomObjectsApi, control_plane: ControlPlane) -> None:
    create(api, manifest(BASE, "scaled"))
    try:
        control_plane.kubectl("scale", "xj/scaled", "--replicas=7")
        assert control_plane.get("xj", "scaled")["spec"]["workers"] == 7
    finally:
        api.delete_namespaced_custom_object(*RESOURCE, "scaled")


def test_the_table_has_the_columns_of_the_design(api: CustomObjectsApi, control_plane: ControlPlane) -> None:
    create(api, manifest(BASE, "table"))
    try:
        narrow = control_plane.kubectl("get", "xj", "table").splitlines()[0].split()
        wide = control_plane.kubectl("get", "xj", "table", "-o", "wide").splitlines()[0].split()
        assert narrow == ["NAME", "PHASE", "%", "SAMPLES/S", "ETA", "SHARDS", "AGE"]
        assert wide == [*narrow, "MODEL", "TOKENS", "QUARANTINED", "OUTPUT"]
    finally:
        api.delete_namespaced_custom_object(*RESOURCE, "table")
