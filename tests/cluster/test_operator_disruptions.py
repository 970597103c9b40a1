"""Workers taken away by Kubernetes itself: their shards run again, and none counts as failed."""

from collections.abc import Callable

import pytest

from testbed.control_plane import ControlPlane
from testbed.operator import Extraction, OperatorProcess, play, report, stage_of, work_until_told
from testbed.process import wait_until
from testbed.scripted_nodes import ScriptedNodes
from testbed.scripted_pod import ScriptedPod

pytestmark = pytest.mark.cluster
Nodes = Callable[..., ScriptedNodes]
NO_RETRIES = {"failurePolicy": {"retriesPerShard": 0}}


def running(scripted: ScriptedNodes) -> set[str]:
    """The uids of the workers that run."""
    return {pod.uid for pod in scripted.pods if stage_of(pod) == "extract" and pod.phase == "Running"}


async def finish(pod: ScriptedPod) -> None:
    await pod.exit(0, report("extract"))


def test_deleted_drained_and_finished(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane
) -> None:
    """A pod deleted by hand, which counts as a failed try, then nodes drained through the eviction API, which does not."""
    scripted = nodes(play(extract=work_until_told), count=2)
    extraction.apply({"failurePolicy": {"retriesPerShard": 1}})
    wait_until(lambda: len(running(scripted)) == 2, 60)
    first = running(scripted)
    pod = next(pod for pod in scripted.pods if pod.uid in first)
    control_plane.kubectl("delete", "pod", pod.name, "-n", pod.namespace, "--wait=false")
    wait_until(lambda: len(running(scripted) - {pod.uid}) == 2, 60)
    node = next(pod.node for pod in scripted.pods if pod.uid in running(scripted))
    before = {pod.uid for pod in scripted.pods if pod.node == node}
    control_plane.kubectl("drain", node, "--force", "--delete-emptydir-data", "--timeout=60s")
    wait_until(lambda: len(running(scripted) - before) == 2, 60)
    nodes(play())

    def done() -> bool:
        for pod in scripted.pods:
            if pod.uid in running(scripted):
                scripted.tell(pod, finish)
        return extraction.status()["phase"] == "Succeeded"

    wait_until(done, 90, poll_seconds=0.5)
    assert extraction.status()["shards"]["failed"] == 0


def test_preempted_by_the_scheduler_and_run_again(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane, namespace: str
) -> None:
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "headframe-urgent"}}
    control_plane.apply({**priority, "value": 100_000})

    async def script(pod: ScriptedPod) -> None:
        await (pod.run() if pod.name == "urgent" else play(extract=work_until_told)(pod))

    scripted = nodes(script, gpus=2)
    extraction.apply(NO_RETRIES)
    wait_until(lambda: len(running(scripted)) == 2, 60)
    container = {"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "2"}}}
    metadata = {"name": "urgent", "namespace": namespace, "labels": {"headframe.dev/stage": "none"}}
    spec = {"priorityClassName": "headframe-urgent", "containers": [container]}
    control_plane.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    scripted.wait_for(lambda pods: any(pod.name == "urgent" and pod.phase != "Pending" for pod in pods))
    assert running(scripted) == set()
    extraction.wait_reason("InsufficientGPUs", "Insufficient nvidia.com/gpu")
    control_plane.kubectl("delete", "pod", "urgent", "-n", namespace, "--wait=false")
    wait_until(lambda: len(running(scripted)) == 2, 60)
    status = extraction.wait_for(lambda s: s["shards"]["active"] == 2)
    assert (status["phase"], status["shards"]["failed"]) == ("Extracting", 0)
