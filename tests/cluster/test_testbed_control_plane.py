"""The control plane and the scripted nodes behave as a Kubernetes does; tests of the operator rely on it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import BatchV1Api, CoreV1Api
from kubernetes.client.exceptions import ApiException

from testbed.control_plane import ControlPlane
from testbed.process import wait_until
from testbed.scripted_nodes import ScriptedNodes
from testbed.scripted_pod import ScriptedPod

pytestmark = pytest.mark.cluster


def indexed_job(completions: int, **spec: Any) -> dict[str, Any]:
    container = {"name": "worker", "image": "worker", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    usual = {"completionMode": "Indexed", "completions": completions, "parallelism": completions, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "extract"}, "spec": usual | spec}


def run_job(cluster: ControlPlane, namespace: str, job: dict[str, Any]) -> dict[str, str]:
    """Create the job and wait for its end; return its conditions with their reasons."""
    jobs = BatchV1Api(cluster.client())
    jobs.create_namespaced_job(namespace, job)

    def conditions() -> dict[str, str]:
        status = jobs.read_namespaced_job("extract", namespace).status
        return {c.type: c.reason or "" for c in status.conditions or []}

    wait_until(lambda: conditions().keys() & {"Complete", "Failed"})
    return conditions()


def test_a_job_completes_on_scripted_nodes(control_plane: ControlPlane, namespace: str) -> None:
    async def succeed(pod: ScriptedPod) -> None:
        await pod.run()
        await pod.exit(0, message=f'{{"shard": {pod.index}}}')

    with ScriptedNodes(control_plane, count=2, gpus=4, script=succeed):
        assert "Complete" in run_job(control_plane, namespace, indexed_job(6))
        pods = control_plane.core().list_namespaced_pod(namespace).items
        messages = {pod.status.container_statuses[0].state.terminated.message for pod in pods}
        assert messages == {f'{{"shard": {shard}}}' for shard in range(6)}


def test_the_scheduler_counts_gpus(control_plane: ControlPlane, namespace: str) -> None:
    with ScriptedNodes(control_plane, count=1, gpus=2) as nodes:
        BatchV1Api(control_plane.client()).create_namespaced_job(namespace, indexed_job(3))
        nodes.wait_for(lambda pods: [pod.phase for pod in pods] == ["Running", "Running"])
        selector = "status.phase=Pending"

        def unschedulable() -> list[str]:
            pods = control_plane.core().list_namespaced_pod(namespace, field_selector=selector).items
            return [c.message for pod in pods for c in pod.status.conditions or [] if c.reason == "Unschedulable"]

        wait_until(lambda: any("Insufficient nvidia.com/gpu" in message for message in unschedulable()))


def test_a_failure_policy_sees_exit_codes_and_disruptions(control_plane: ControlPlane, namespace: str) -> None:
    disrupted: set[int | None] = set()

    async def disrupted_once_then_bad_configuration(pod: ScriptedPod) -> None:
        await pod.run()
        if pod.index not in disrupted:
            disrupted.add(pod.index)
            await pod.disrupt()
        else:
            await pod.exit(78, message="no such layer")

    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [78]}},
    ]
    job = indexed_job(1, backoffLimit=0, podFailurePolicy={"rules": rules})
    with ScriptedNodes(control_plane, script=disrupted_once_then_bad_configuration):
        assert run_job(control_plane, namespace, job)["Failed"] == "PodFailurePolicy"


def test_an_out_of_memory_kill_shows_as_such(control_plane: ControlPlane, namespace: str) -> None:
    async def out_of_memory(pod: ScriptedPod) -> None:
        await pod.run()
        await pod.exit(137, reason="OOMKilled")

    with ScriptedNodes(control_plane, script=out_of_memory):
        run_job(control_plane, namespace, indexed_job(1, backoffLimit=0))
        (pod,) = control_plane.core().list_namespaced_pod(namespace).items
        assert pod.status.container_statuses[0].state.terminated.reason == "OOMKilled"


def test_a_pod_handles_its_deletion_and_leaves(control_plane: ControlPlane, namespace: str) -> None:
    left: list[str] = []

    async def say_goodbye(pod: ScriptedPod) -> None:
        await pod.run()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.append(pod.name)
            await pod.exit(143, message="part 3 abandoned")

    with ScriptedNodes(control_plane, script=say_goodbye) as nodes:
        BatchV1Api(control_plane.client()).create_namespaced_job(namespace, indexed_job(1))
        (pod,) = nodes.wait_for(lambda pods: [pod.phase for pod in pods] == ["Running"])
        control_plane.core().delete_namespaced_pod(pod.name, namespace)
        nodes.wait_for(lambda pods: pod.uid not in {pod.uid for pod in pods})
        assert left == [pod.name]


def test_a_test_tells_a_pod_what_to_do(control_plane: ControlPlane, namespace: str) -> None:
    with ScriptedNodes(control_plane) as nodes:
        BatchV1Api(control_plane.client()).create_namespaced_job(namespace, indexed_job(1))
        (pod,) = nodes.wait_for(lambda pods: [pod.phase for pod in pods] == ["Running"])
        nodes.tell(pod, lambda pod: pod.wait("ImagePullBackOff", "no such image"))
        status = control_plane.core().read_namespaced_pod(pod.name, namespace).status
        assert status.container_statuses[0].state.waiting.reason == "ImagePullBackOff"
        assert status.container_statuses[0].state.running is None


def test_an_error_in_a_script_reaches_the_test(control_plane: ControlPlane, namespace: str) -> None:
    async def broken(pod: ScriptedPod) -> None:
        raise ZeroDivisionError(pod.name)

    nodes = ScriptedNodes(control_plane, script=broken)
    nodes.__enter__()
    BatchV1Api(control_plane.client()).create_namespaced_job(namespace, indexed_job(1))
    nodes.wait_for(lambda pods: pods)
    with pytest.raises(ZeroDivisionError):
        nodes.__exit__(None, None, None)


def test_a_service_account_may_do_nothing_without_a_role(control_plane: ControlPlane, namespace: str) -> None:
    kubeconfig = control_plane.kubeconfig_of_service_account(namespace, "default")
    with pytest.raises(ApiException) as refusal:
        CoreV1Api(control_plane.client(kubeconfig)).list_namespaced_pod(namespace)
    assert refusal.value.status == 403


def test_objects_survive_an_outage_of_the_api_server(control_plane: ControlPlane, namespace: str) -> None:
    with ScriptedNodes(control_plane) as nodes:
        BatchV1Api(control_plane.client()).create_namespaced_job(namespace, indexed_job(1))
        (pod,) = nodes.wait_for(lambda pods: [pod.phase for pod in pods] == ["Running"])
        control_plane.api_server.stop(kill=True)
        control_plane.api_server.start()
        nodes.tell(pod, lambda pod: pod.exit(0))
        jobs = BatchV1Api(control_plane.client())
        wait_until(lambda: jobs.read_namespaced_job("extract", namespace).status.succeeded == 1)


def test_a_silent_node_is_found_missing(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, node_grace_seconds=12) as cluster, ScriptedNodes(cluster, count=2) as nodes:
        gone, alive = nodes.names

        def ready(name: str) -> str:
            return next(c["status"] for c in cluster.get("node", name)["status"]["conditions"] if c["type"] == "Ready")

        nodes.silence(gone)
        wait_until(lambda: ready(gone) == "Unknown", timeout_seconds=60)
        assert ready(alive) == "True"
