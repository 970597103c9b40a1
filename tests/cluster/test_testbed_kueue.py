"""Kueue admits Jobs within a queue's quota, and holds back the others."""

from typing import Any

import pytest
from kubernetes.client import BatchV1Api

from testbed.control_plane import ControlPlane
from testbed.kueue import Kueue
from testbed.process import wait_until
from testbed.scripted_nodes import ScriptedNodes
from testbed.scripted_pod import ScriptedPod

pytestmark = pytest.mark.cluster


def queued_job(name: str, gpus: int) -> dict[str, Any]:
    container = {"name": "worker", "image": "worker", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    spec = {
        "suspend": True,
        "completionMode": "Indexed",
        "completions": gpus,
        "parallelism": gpus,
        "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
    }
    metadata = {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def test_a_job_waits_for_quota(control_plane: ControlPlane, kueue: Kueue, namespace: str) -> None:
    jobs = BatchV1Api(control_plane.client())
    kueue.add_queue(namespace, "gpus", gpus=2)
    with ScriptedNodes(control_plane, gpus=8) as nodes:
        for name in ("first", "second"):
            jobs.create_namespaced_job(namespace, queued_job(name, gpus=2))
            if name == "first":
                running = nodes.wait_for(lambda pods: [pod.phase for pod in pods] == ["Running", "Running"])

        def why_second_waits() -> str:
            return control_plane.kubectl("get", "workloads", "-n", namespace, "-o", "yaml")

        wait_until(lambda: "insufficient unused quota" in why_second_waits())
        assert jobs.read_namespaced_job("second", namespace).spec.suspend
        for pod in running:
            nodes.tell(pod, lambda pod: pod.exit(0))

        def second_runs(pods: list[ScriptedPod]) -> bool:
            return sum(pod.labels["job-name"] == "second" and pod.phase == "Running" for pod in pods) == 2

        nodes.wait_for(second_runs)
