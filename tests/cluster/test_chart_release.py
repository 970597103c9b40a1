"""The chart on a real API server: taken under Restricted Pod Security, with the rights it says, through upgrade and uninstall."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import AuthorizationV1Api

from headframe_operator.permissions import RULES
from testbed.cluster_access import ClusterAccess
from testbed.control_plane import ControlPlane
from testbed.helm import CHART, VALUES, helm
from testbed.manifests import manifest
from testbed.process import wait_until
from testbed.schemas import monitoring_crds
from testbed.tools import go_tool, require

pytestmark = pytest.mark.cluster
SPEC = {"model": {"source": "org/model"}, "dataset": {"source": "org/data"}, "output": {"uri": "s3://bucket/prefix"}}
CRD = "extractionjobs.headframe.dev"


@dataclass(frozen=True)
class Release:
    cluster: ControlPlane
    namespace: str

    def helm(self, *arguments: str | Path) -> str:
        return helm(self.cluster, f"--namespace={self.namespace}", *arguments)

    def account(self) -> Path:
        return self.cluster.kubeconfig_of_service_account(self.namespace, "headframe")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of its own: CRDs come and go here."""
    with require(), ControlPlane(tmp_path_factory.mktemp("control-plane")) as running:
        go_tool("helm")
        running.apply(*monitoring_crds())
        running.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        yield running


@pytest.fixture
def release(cluster: ControlPlane) -> Iterator[Release]:
    """An installed release, in a namespace that enforces the Restricted standard; afterwards the CRD alone is left.

    The next release takes it over: an API server that is told to remove a CRD it has just learnt of may never get to it.
    """
    with cluster.namespace("release") as name:
        cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        made = Release(cluster, name)
        made.helm("install", "headframe", CHART, "--take-ownership")
        yield made
        if "headframe" in made.helm("list", "--short"):
            made.helm("uninstall", "headframe", "--wait")


def can(cluster: ClusterAccess, kubeconfig: Path, verb: str, group: str, resource: str, namespace: str) -> bool:
    """What the API server answers when the user of a kubeconfig file asks about itself."""
    name, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": name, "subresource": subresource, "namespace": namespace}
    answer = AuthorizationV1Api(cluster.client(kubeconfig)).create_self_subject_access_review(
        {"spec": {"resourceAttributes": attributes}}
    )
    return bool(answer.status.allowed)


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_api_server_takes_everything(cluster: ControlPlane, values: Path) -> None:
    with cluster.namespace("dry-run") as name:
        helm(
            cluster, f"--namespace={name}", "install", "headframe", CHART, "--dry-run=server", "--values", values,
            *([f"--set-json=namespaces=[{json.dumps(name)}]"] if values.stem == "namespaced" else []),
        )  # fmt: skip


def test_restricted_pod_security_takes_the_operator(release: Release) -> None:
    """The pods themselves are made: they only lack a node."""

    def pods() -> list[dict[str, Any]]:
        listed = release.cluster.kubectl("get", "pods", "-n", release.namespace, "-o", "json")
        return list(json.loads(listed)["items"])

    wait_until(pods)
    (pod,) = pods()
    assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


def test_restricted_pod_security_refuses_what_is_looser(cluster: ControlPlane) -> None:
    """The same pod with one right more is refused: the test above is not taken for want of enforcement."""
    with cluster.namespace("loose") as name:
        cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        container = {"name": "c", "image": "i", "securityContext": {"allowPrivilegeEscalation": True}}
        pod = {"metadata": {"name": "loose", "namespace": name}, "spec": {"containers": [container]}}
        with pytest.raises(RuntimeError, match="violates PodSecurity"):
            cluster.apply({"apiVersion": "v1", "kind": "Pod", **pod})


def test_the_operator_may_do_what_its_table_says_and_no_more(release: Release) -> None:
    account, where = release.account(), release.namespace
    for rule in RULES:
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                assert can(release.cluster, account, verb, rule["apiGroups"][0], resource, where), (verb, resource)
    for verb, group, resource in (
        ("get", "", "secrets"),
        ("list", "", "secrets"),
        ("create", "", "pods"),
        ("delete", "", "pods"),
        ("create", "", "pods/exec"),
        ("create", "headframe.dev", "extractionjobs"),
        ("patch", "headframe.dev", "extractionjobs"),
        ("get", "", "nodes"),
        ("create", "rbac.authorization.k8s.io", "roles"),
    ):
        assert not can(release.cluster, account, verb, group, resource, where), (verb, resource)


def test_with_namespaces_the_operator_has_no_right_elsewhere(cluster: ControlPlane) -> None:
    with cluster.namespace("served") as served, cluster.namespace("other") as other, cluster.namespace("home") as home:
        values = f"--set-json=namespaces=[{json.dumps(served)}]"
        helm(
            cluster,
            f"--namespace={home}",
            "install",
            "headframe",
            CHART,
            "--take-ownership",
            values,
        )
        account = cluster.kubeconfig_of_service_account(home, "headframe")
        assert can(cluster, account, "create", "batch", "jobs", served)
        assert not can(cluster, account, "create", "batch", "jobs", other)
        assert not can(cluster, account, "list", "", "pods", home)
        helm(cluster, f"--namespace={home}", "uninstall", "headframe", "--wait")


def test_people_get_what_their_role_says(release: Release) -> None:
    cluster, where = release.cluster, release.namespace
    may = {"view": ["list"], "edit": ["list", "create", "delete"], "admin": ["list", "create", "delete"]}
    for role, allowed in may.items():
        cluster.kubectl("create", "serviceaccount", role, "-n", where)
        cluster.kubectl(
            "create", "rolebinding", role, f"--clusterrole={role}", f"--serviceaccount={where}:{role}", "-n", where
        )
        account = cluster.kubeconfig_of_service_account(where, role)
        wait_until(lambda account=account: can(cluster, account, "list", "headframe.dev", "extractionjobs", where))
        granted = [
            verb
            for verb in ("list", "create", "delete")
            if can(cluster, account, verb, "headframe.dev", "extractionjobs", where)
        ]
        assert granted == allowed
        assert can(cluster, account, "patch", "headframe.dev", "extractionjobs/scale", where) is (role != "view")
        assert not can(cluster, account, "patch", "headframe.dev", "extractionjobs/status", where)


def test_upgrade_and_rollback_keep_extractionjobs(release: Release) -> None:
    cluster, where = release.cluster, release.namespace
    job = manifest(SPEC, "kept")
    job["metadata"]["namespace"] = where
    wait_until(lambda: CRD in cluster.kubectl("get", "crd", "-o", "name"))
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=60s")
    cluster.apply(job)
    uid = cluster.get("xj", "kept", where)["metadata"]["uid"]
    release.helm("upgrade", "headframe", CHART, "--set=settings.logLevel=DEBUG")
    assert "DEBUG" in json.dumps(cluster.get("deployment", "headframe", where))
    release.helm("rollback", "headframe", "1")
    assert "DEBUG" not in json.dumps(cluster.get("deployment", "headframe", where))
    assert cluster.get("xj", "kept", where)["metadata"]["uid"] == uid
    release.helm("uninstall", "headframe", "--wait")
    assert cluster.get("xj", "kept", where)["metadata"]["uid"] == uid, "crds.keep"
    release.helm("install", "headframe", CHART, "--set=crds.keep=false")
    assert cluster.get("xj", "kept", where)["metadata"]["uid"] == uid, "a new release takes the CRD over"
    release.helm("uninstall", "headframe", "--wait")
    wait_until(lambda: CRD not in cluster.kubectl("get", "crd", "-o", "name"))
