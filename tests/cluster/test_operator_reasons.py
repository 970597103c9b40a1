"""Why nothing runs: each cause is provoked for real, seen in the condition within seconds, and gone when it has passed."""

from collections.abc import Callable
from typing import Any

import pytest

from testbed.control_plane import ControlPlane
from testbed.operator import Extraction, OperatorProcess, play, report, stage_of, work_until_told
from testbed.scripted_nodes import ScriptedNodes
from testbed.scripted_pod import ScriptedPod

pytestmark = pytest.mark.cluster
Nodes = Callable[..., ScriptedNodes]
Apply = Callable[..., None]


@pytest.fixture
def apply(control_plane: ControlPlane, namespace: str) -> Apply:
    """Applies an object in the test's namespace."""

    def apply_one(kind: str, spec: dict[str, Any] | None = None, *, version: str = "v1", **body: Any) -> None:
        content = body if spec is None else {"spec": spec}
        metadata = {"name": "test", "namespace": namespace}
        control_plane.apply({"apiVersion": version, "kind": kind, "metadata": metadata, **content})

    return apply_one


def delete(control_plane: ControlPlane, namespace: str, kind: str) -> None:
    control_plane.kubectl("delete", kind, "test", "-n", namespace)


def test_quota_of_pods(
    operator: OperatorProcess,
    extraction: Extraction,
    nodes: Nodes,
    apply: Apply,
    control_plane: ControlPlane,
    namespace: str,
) -> None:
    nodes(play())
    apply("ResourceQuota", {"hard": {"pods": "0"}})
    extraction.apply()
    extraction.wait_reason("QuotaExceeded", "exceeded quota: test")
    assert extraction.status()["phase"] == "Pending"
    delete(control_plane, namespace, "resourcequota")
    extraction.wait("Succeeded", 120)
    assert ("Warning", "QuotaExceeded") in extraction.events()


def test_quota_of_jobs(
    operator: OperatorProcess,
    extraction: Extraction,
    nodes: Nodes,
    apply: Apply,
    control_plane: ControlPlane,
    namespace: str,
) -> None:
    nodes(play())
    apply("ResourceQuota", {"hard": {"count/jobs.batch": "0"}})
    extraction.apply()
    extraction.wait_reason("QuotaExceeded", "the prepare Job is refused", "count/jobs.batch")
    delete(control_plane, namespace, "resourcequota")
    extraction.wait("Succeeded", 120)


def test_limit_range(operator: OperatorProcess, extraction: Extraction, nodes: Nodes, apply: Apply) -> None:
    nodes(play())
    apply("LimitRange", {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]})
    extraction.apply()
    extraction.wait_reason("LimitRangeExceeded", "maximum memory usage per Container is 1Gi")


def test_pod_security(
    operator: OperatorProcess, extraction: Extraction, control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    extraction.apply({"worker": {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}})
    extraction.wait_reason("PodSecurityRefused", "violates PodSecurity", "hostPath")


def test_our_own_pods_pass_the_restricted_level(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    nodes(play())
    extraction.apply({"s3": {"credentialsSecret": "keys", "caSecret": "ca"}})
    extraction.wait("Succeeded")


def test_no_node_has_room(operator: OperatorProcess, extraction: Extraction, nodes: Nodes) -> None:
    nodes(play(), capacity={"cpu": "1"})
    extraction.apply()
    extraction.wait_reason("Unschedulable", "Insufficient cpu")
    nodes(play())
    extraction.wait("Succeeded", 120)


def test_no_node_has_the_gpus(operator: OperatorProcess, extraction: Extraction, nodes: Nodes) -> None:
    nodes(play(), gpus=0)
    extraction.apply()
    extraction.wait_reason("InsufficientGPUs", "Insufficient nvidia.com/gpu")
    assert extraction.status()["phase"] == "Extracting"
    nodes(play(), gpus=8)
    extraction.wait("Succeeded", 120)


def test_some_workers_run_and_some_wait(operator: OperatorProcess, extraction: Extraction, nodes: Nodes) -> None:
    nodes(play(extract=work_until_told), gpus=1)
    extraction.apply()
    found = extraction.wait_reason("InsufficientGPUs", "1 worker", "1 of 2 pods wait")
    assert found["status"] == "True"


def test_a_volume_claim_that_is_not_there(operator: OperatorProcess, extraction: Extraction, nodes: Nodes) -> None:
    nodes(play())
    extraction.apply({"worker": {"cache": {"persistentVolumeClaim": {"claimName": "absent"}}}})
    extraction.wait_reason("VolumeClaimNotReady", 'persistentvolumeclaim "absent" not found')


def test_a_service_account_that_is_not_there(operator: OperatorProcess, extraction: Extraction) -> None:
    extraction.apply({"worker": {"serviceAccountName": "absent"}})
    extraction.wait_reason("ServiceAccountMissing", "absent")


def test_a_priority_class_that_is_not_there(operator: OperatorProcess, extraction: Extraction) -> None:
    extraction.apply({"worker": {"priorityClassName": "absent"}})
    extraction.wait_reason("PriorityClassMissing", "absent")


def test_a_pod_template_that_kubernetes_refuses(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes
) -> None:
    nodes(play())
    extraction.apply({"worker": {"tolerations": [{"key": "a b", "operator": "Exists"}]}})
    extraction.wait_reason("InvalidPodTemplate", "the prepare Job is refused", "tolerations[0].key")
    extraction.patch({"worker": {"tolerations": []}})
    extraction.wait("Succeeded", 120)


@pytest.mark.parametrize(
    ("waits", "reason"),
    [
        (("ImagePullBackOff", "Back-off pulling image"), "ImagePullFailed"),
        (("InvalidImageName", "couldn't parse image name"), "ImagePullFailed"),
        (("CreateContainerConfigError", 'secret "keys" not found'), "SecretOrConfigMapMissing"),
        (("CreateContainerError", "context deadline exceeded"), "ContainerCannotStart"),
    ],
)
def test_a_container_that_cannot_start(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, waits: tuple[str, str], reason: str
) -> None:
    async def never_starts(pod: ScriptedPod) -> None:
        await pod.wait(*waits)

    scripted = nodes(never_starts)
    extraction.apply()
    extraction.wait_reason(reason, waits[1])
    (pod,) = scripted.pods
    scripted.tell(pod, play())
    extraction.wait_for(lambda s: s["phase"] == "Extracting")


def test_a_shard_that_runs_out_of_memory(operator: OperatorProcess, extraction: Extraction, nodes: Nodes) -> None:
    async def too_big(pod: ScriptedPod) -> None:
        await pod.run()
        await pod.exit(137, reason="OOMKilled")

    nodes(play(extract=too_big))
    extraction.apply()
    extraction.wait_reason("OOMKilled", "more memory than its limit")


def test_a_temporary_failure_is_told_in_the_workers_words(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes
) -> None:
    async def no_store(pod: ScriptedPod) -> None:
        await pod.run()
        await pod.exit(75, report("extract", exitCode=75, reason="StoreUnreachable", message="no answer from s3"))

    nodes(play(extract=no_store))
    extraction.apply()
    extraction.wait_reason("StoreUnreachable", "no answer from s3")


def test_the_last_lines_of_a_log_stand_in_for_a_message(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes
) -> None:
    async def crash(pod: ScriptedPod) -> None:
        await pod.run()
        await pod.exit(1, "Traceback: ImportError: no module named torch")

    nodes(crash)
    extraction.apply({"failurePolicy": {"retriesPerShard": 0}})
    status = extraction.wait("Failed")
    assert "exit code 1: Traceback: ImportError: no module named torch" in status["message"]


def test_a_silent_node_holds_its_shards_until_it_is_deleted(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane, namespace: str
) -> None:
    scripted = nodes(play(extract=work_until_told))
    extraction.apply({"failurePolicy": {"retriesPerShard": 0}})
    scripted.wait_for(lambda pods: sum(stage_of(p) == "extract" and p.phase == "Running" for p in pods) == 2)
    worker = next(pod for pod in scripted.pods if stage_of(pod) == "extract")
    scripted.silence(worker.node)
    extraction.wait_reason("NodeLost", f"node {worker.node} does not answer", timeout_seconds=90)
    control_plane.kubectl("delete", "node", worker.node)
    nodes(play())
    extraction.wait("Succeeded", 180)
    assert extraction.status()["shards"]["failed"] == 0
