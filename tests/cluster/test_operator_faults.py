"""Whatever befalls the operator or its API server, the outcome is the same, and no child is made twice."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from testbed.control_plane import ControlPlane
from testbed.operator import CRD, Extraction, OperatorProcess, install_crd, play, stage_of, work_until_told
from testbed.process import wait_until
from testbed.scripted_nodes import ScriptedNodes
from testbed.toxiproxy import Toxiproxy

pytestmark = pytest.mark.cluster
Nodes = Callable[..., ScriptedNodes]
ROUNDS = int(os.environ.get("HEADFRAME_ROUNDS", "4"))


def jobs_ever_made(control_plane: ControlPlane, namespace: str) -> list[str]:
    """Every Job that the Job controller ever took up, by its Events, which outlive it."""
    events = control_plane.kubectl(
        "get", "events", "-n", namespace, "--field-selector=reason=SuccessfulCreate", "-o", "yaml"
    )
    return sorted({(e["involvedObject"]["name"], e["involvedObject"]["uid"]) for e in yaml.safe_load(events)["items"]})


def pods_ever_made(control_plane: ControlPlane, namespace: str) -> int:
    """How many pods the Job controller ever made."""
    events = control_plane.kubectl(
        "get", "events", "-n", namespace, "--field-selector=reason=SuccessfulCreate", "-o", "yaml"
    )
    return sum(event.get("count") or 1 for event in yaml.safe_load(events)["items"])


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_killed_at_random_moments(
    operator: OperatorProcess,
    extraction: Extraction,
    nodes: Nodes,
    control_plane: ControlPlane,
    namespace: str,
    seed: int,
) -> None:
    chance = random.Random(seed)
    nodes(play(seconds=0.4))
    extraction.apply()
    moments = chance.sample(["Pending", "Preparing", "Extracting", "Finalizing"], 3)
    killed = set()

    def look() -> bool:
        phase = extraction.status().get("phase", "Pending")
        if phase in moments and phase not in killed:
            killed.add(phase)
            operator.kill()
        return phase == "Succeeded"

    wait_until(look, 120, poll_seconds=chance.uniform(0.02, 0.3))
    status = extraction.status()
    assert operator.killed >= 1
    assert [name for name, _ in jobs_ever_made(control_plane, namespace)] == [
        "job-extract",
        "job-finalize",
        "job-prepare",
    ]
    assert pods_ever_made(control_plane, namespace) == 6
    assert status["progress"]["percent"] == 100
    assert status["shards"]["summary"] == "4/4"
    operator.process.wait_ready()


def test_the_connection_to_the_api_server_is_cut(
    crd: None,
    control_plane: ControlPlane,
    namespace: str,
    extraction: Extraction,
    nodes: Nodes,
    toxiproxy: Toxiproxy,
    tmp_path: Path,
) -> None:
    nodes(play(seconds=0.5))
    proxy = toxiproxy.proxy(control_plane.url.removeprefix("https://"))
    with OperatorProcess(control_plane, tmp_path, namespaces=(namespace,)) as direct:
        kubeconfig = yaml.safe_load(direct.kubeconfig.read_text())
    kubeconfig["clusters"][0]["cluster"]["server"] = f"https://{proxy.address}"
    through = tmp_path / "through-proxy.kubeconfig"
    through.write_text(yaml.safe_dump(kubeconfig))
    with OperatorProcess(control_plane, tmp_path, namespaces=(namespace,), kubeconfig=through) as operator:
        extraction.apply()
        for phase in ("Preparing", "Extracting", "Finalizing"):
            extraction.wait_for(
                lambda s, phase=phase: s.get("phase") in (phase, "Succeeded", "Extracting", "Finalizing")
            )
            before = operator.log.read_text().count("will retry")
            proxy.cut()
            wait_until(lambda before=before: operator.log.read_text().count("will retry") > before, 30)
            assert operator.healthy()  # a restart would not bring the API server back
            proxy.mend()
        extraction.wait("Succeeded", 120)
    assert [name for name, _ in jobs_ever_made(control_plane, namespace)] == [
        "job-extract",
        "job-finalize",
        "job-prepare",
    ]


def test_two_operators_by_mistake(
    operator: OperatorProcess,
    extraction: Extraction,
    nodes: Nodes,
    control_plane: ControlPlane,
    namespace: str,
    tmp_path: Path,
) -> None:
    nodes(play(seconds=0.3))
    with OperatorProcess(control_plane, tmp_path / "second", namespaces=(namespace,)):
        extraction.apply()
        extraction.wait("Succeeded", 120)
    assert [name for name, _ in jobs_ever_made(control_plane, namespace)] == [
        "job-extract",
        "job-finalize",
        "job-prepare",
    ]
    assert pods_ever_made(control_plane, namespace) == 6


def test_a_worker_pod_evicted_is_no_failure(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane, namespace: str
) -> None:
    scripted = nodes(play(extract=work_until_told))
    extraction.apply({"failurePolicy": {"retriesPerShard": 0}})
    running = lambda: [p for p in scripted.pods if stage_of(p) == "extract" and p.phase == "Running"]  # noqa: E731
    wait_until(lambda: len(running()) == 2, 60)
    first = running()[0]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": first.name, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{first.name}/eviction"
    control_plane.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    wait_until(lambda: len(running()) == 2 and first.uid not in {p.uid for p in running()}, 90)
    status = extraction.status()
    assert (status["phase"], status["shards"]["failed"]) == ("Extracting", 0)


def test_a_deleted_node_gives_its_shards_to_another(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane
) -> None:
    scripted = nodes(play(extract=work_until_told))
    extraction.apply({"failurePolicy": {"retriesPerShard": 0}})
    scripted.wait_for(lambda pods: sum(stage_of(p) == "extract" and p.phase == "Running" for p in pods) == 2)
    scripted.silence(scripted.names[0])
    control_plane.kubectl("delete", "node", scripted.names[0])
    nodes(play())
    extraction.wait("Succeeded", 180)


def test_the_crd_is_removed_and_reinstalled(
    tmp_path: Path, control_plane: ControlPlane, namespace: str, extraction: Extraction, nodes: Nodes, crd: None
) -> None:
    nodes(play())
    with OperatorProcess(control_plane, tmp_path, namespaces=(namespace,)) as operator:
        extraction.apply()
        extraction.wait("Succeeded")
        control_plane.kubectl("delete", "-f", str(CRD))
        try:
            wait_until(lambda: "waits for the CRD" in operator.log.read_text(), 60)
        finally:
            install_crd(control_plane)
        wait_until(lambda: not extraction.names("jobs"), 60)
        extraction.apply()
        extraction.wait("Succeeded", 60)
