"""Kueue decides when the extract Job runs; the operator says so, and leaves alone what is Kueue's."""

from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.control_plane import ControlPlane
from testbed.kueue import Kueue
from testbed.operator import Extraction, OperatorProcess, play, report, stage_of, work_until_told
from testbed.process import wait_until
from testbed.scripted_nodes import ScriptedNodes
from testbed.scripted_pod import ScriptedPod

pytestmark = pytest.mark.cluster
Nodes = Callable[..., ScriptedNodes]
QUEUED = {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}


def workers(scripted: ScriptedNodes, name: str) -> list[ScriptedPod]:
    """The running extract pods of an ExtractionJob."""
    return [
        pod
        for pod in scripted.pods
        if stage_of(pod) == "extract" and pod.labels["headframe.dev/job"] == name and pod.phase == "Running"
    ]


def finish(scripted: ScriptedNodes, name: str, extraction: Extraction) -> None:
    """Let every shard of an ExtractionJob end well."""

    def ended() -> bool:
        for pod in workers(scripted, name):
            scripted.tell(pod, lambda pod: pod.exit(0, report("extract")))
        return extraction.status()["phase"] == "Succeeded"

    wait_until(ended, 120, poll_seconds=0.5)


def test_queued_admitted_suspended_and_finished(
    kueue: Kueue, operator: OperatorProcess, control_plane: ControlPlane, namespace: str, nodes: Nodes
) -> None:
    kueue.add_queue(namespace, "gpus", gpus=2)
    scripted = nodes(play(extract=work_until_told))
    first, second = Extraction(control_plane, namespace, "first"), Extraction(control_plane, namespace, "second")
    first.apply(**QUEUED)
    scripted.wait_for(lambda _: len(workers(scripted, "first")) == 2)
    second.apply(**QUEUED)
    second.wait_reason("Queued", "insufficient unused quota")
    status = second.status()
    assert status["phase"] == "Suspended"
    assert second.condition("Suspended")["reason"] == "Queued"

    first.patch({"suspend": True})  # by the user: Kueue must be told, and gives the quota to the next
    first.wait("Suspended")
    scripted.wait_for(lambda _: not workers(scripted, "first") and len(workers(scripted, "second")) == 2)
    second.wait("Extracting")
    first.patch({"suspend": False})
    first.wait_reason("Queued")
    finish(scripted, "second", second)
    scripted.wait_for(lambda _: len(workers(scripted, "first")) == 2)
    finish(scripted, "first", first)


def test_preempted_by_a_higher_priority_and_admitted_again(
    kueue: Kueue, operator: OperatorProcess, control_plane: ControlPlane, namespace: str, nodes: Nodes, tmp_path: Path
) -> None:
    kueue.add_queue(namespace, "gpus", gpus=2)
    preemption = '{"spec":{"preemption":{"withinClusterQueue":"LowerPriority"}}}'
    control_plane.kubectl("patch", "clusterqueue", f"{namespace}-gpus", "--type=merge", "-p", preemption)
    priority = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"}}
    control_plane.apply({**priority, "value": 1000})
    scripted = nodes(play(extract=work_until_told))
    calm, urgent = Extraction(control_plane, namespace, "calm"), Extraction(control_plane, namespace, "urgent")
    calm.apply(**QUEUED)
    scripted.wait_for(lambda _: len(workers(scripted, "calm")) == 2)
    urgent.apply(labels={**QUEUED["labels"], "kueue.x-k8s.io/priority-class": "urgent"})
    scripted.wait_for(lambda _: not workers(scripted, "calm") and len(workers(scripted, "urgent")) == 2)
    calm.wait("Suspended")
    assert calm.condition("Suspended")["reason"] in ("Queued", "EvictedByKueue")
    finish(scripted, "urgent", urgent)
    scripted.wait_for(lambda _: len(workers(scripted, "calm")) == 2)
    finish(scripted, "calm", calm)


def test_admitted_with_fewer_workers_than_asked_for(
    kueue: Kueue, operator: OperatorProcess, extraction: Extraction, namespace: str, nodes: Nodes
) -> None:
    """Partial admission: Kueue grants 2 of 4 workers; the operator neither raises them nor forgets what was asked for."""
    kueue.add_queue(namespace, "gpus", gpus=2)
    scripted = nodes(play(extract=work_until_told))
    extraction.apply({"workers": 4}, **QUEUED, annotations={"kueue.x-k8s.io/job-min-parallelism": "1"})
    scripted.wait_for(lambda _: len(workers(scripted, "job")) == 2)
    operator.kill()
    operator.process.wait_ready()
    extraction.wait_for(lambda s: s["shards"]["active"] == 2)
    job = extraction.cluster.get("job", "job-extract", namespace)
    assert (job["spec"]["parallelism"], job["metadata"]["annotations"]["headframe.dev/workers"]) == (2, "4")
    finish(scripted, "job", extraction)
