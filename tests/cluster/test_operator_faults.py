"""Whatever befalls the operator or its API server, the outcome is the same, and no child is made twice."""

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.api_proxy import ApiProxy
from testbed.control_plane import ControlPlane
from testbed.operator import CRD, Extraction, OperatorProcess, install_crd, play, report, stage_of, work_until_told
from testbed.process import wait_until
from testbed.scripted_nodes import ScriptedNodes
from testbed.scripted_pod import ScriptedPod
from testbed.toxiproxy import Toxiproxy

pytestmark = pytest.mark.cluster
Nodes = Callable[..., ScriptedNodes]
ROUNDS = int(os.environ.get("HEADFRAME_ROUNDS", "6"))


def ever_made(control_plane: ControlPlane, namespace: str) -> tuple[dict[str, int], int]:
    """How many Jobs of each name the Job controller ever took up, and how many pods it made, by its Events, which outlive them."""
    selector = "--field-selector=reason=SuccessfulCreate"
    events = json.loads(control_plane.kubectl("get", "events", "-n", namespace, selector, "-o", "json"))["items"]
    jobs = {(event["involvedObject"]["name"], event["involvedObject"]["uid"]) for event in events}
    return dict(Counter(name for name, _ in jobs)), sum(event.get("count") or 1 for event in events)


def each_once(*names: str) -> dict[str, int]:
    """One Job a stage of every ExtractionJob."""
    return {f"{name}-{stage}": 1 for name in names or ("job",) for stage in ("prepare", "extract", "finalize")}


def test_killed_at_random_moments(
    operator: OperatorProcess, control_plane: ControlPlane, namespace: str, nodes: Nodes
) -> None:
    """SIGKILL again and again, from the first look on, at any moment of start, work or rest: HEADFRAME_ROUNDS times at least."""
    chance, names = random.Random(5), [f"job-{number}" for number in range(3)]
    nodes(play(seconds=max(0.5, ROUNDS / 10)))
    jobs = [Extraction(control_plane, namespace, name).apply() for name in names]
    moment = time.monotonic() + chance.uniform(0.1, 4)

    def done() -> bool:
        nonlocal moment
        if operator.killed < ROUNDS and time.monotonic() > moment:
            operator.kill()
            moment = time.monotonic() + chance.uniform(0.1, 4)
        return operator.killed >= ROUNDS and all(job.status().get("phase") == "Succeeded" for job in jobs)

    wait_until(done, 60 + 6 * ROUNDS)
    assert ever_made(control_plane, namespace) == (each_once(*names), 18)
    for job in jobs:
        status = job.status()
        assert (status["progress"]["percent"], status["shards"]["summary"]) == (100, "4/4")


def test_killed_at_every_step(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane, namespace: str
) -> None:
    phases = {"prepare": "Preparing", "extract": "Extracting", "finalize": "Finalizing"}
    killed_in: set[str] = set()

    async def end_after_the_kill(pod: ScriptedPod) -> None:
        await pod.run()
        while phases[stage_of(pod)] not in killed_in:  # noqa: ASYNC110  (set from another thread)
            await asyncio.sleep(0.1)
        await pod.exit(0, report(stage_of(pod)))

    nodes(end_after_the_kill)
    extraction.apply()

    def done() -> bool:
        phase = extraction.status().get("phase", "none")
        if phase not in killed_in:
            killed_in.add(phase)
            operator.kill()
        return phase == "Succeeded"

    wait_until(done, 120)
    assert killed_in >= {*phases.values(), "Succeeded"}
    operator.process.wait_ready()
    assert ever_made(control_plane, namespace) == (each_once(), 6)
    assert extraction.status()["shards"]["summary"] == "4/4"


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
    with OperatorProcess(control_plane, tmp_path, namespaces=(namespace,), url=f"https://{proxy.address}") as operator:
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
    assert ever_made(control_plane, namespace)[0] == each_once()


def test_a_storm_of_refusals_delays_and_changes_nothing(
    crd: None, control_plane: ControlPlane, namespace: str, extraction: Extraction, nodes: Nodes, tmp_path: Path
) -> None:
    """Every second request of a kind is refused, lists and watches among them: too many requests, conflicts, server errors."""
    codes, asked = itertools.cycle((429, 409, 503, 409, 500)), Counter[tuple[str, str]]()

    def refuse(method: str, path: str) -> int | None:
        asked[method, path] += 1
        code = next(codes)
        return code if asked[method, path] % 2 and (method != "GET" or code != 409) else None

    nodes(play(seconds=0.3))
    with ApiProxy(control_plane) as proxy:
        proxy.refuse = refuse  # it must come up in the storm, too
        with OperatorProcess(control_plane, tmp_path, namespaces=(namespace,), url=proxy.url) as operator:
            extraction.apply()
            extraction.wait("Succeeded", 180)
            assert operator.healthy()
        assert {409, 429, 500, 503} == set(proxy.refused)
    assert ever_made(control_plane, namespace) == (each_once(), 6)


def test_a_watch_that_dies_in_silence_is_ill_health(
    crd: None, control_plane: ControlPlane, namespace: str, extraction: Extraction, nodes: Nodes, tmp_path: Path
) -> None:
    """Every connection stands and requests are answered, but no watch tells anything any more."""
    nodes(play(extract=work_until_told))
    with (
        ApiProxy(control_plane) as proxy,
        OperatorProcess(
            control_plane,
            tmp_path,
            namespaces=(namespace,),
            url=proxy.url,
            watch_silence_seconds="3",
            audit_interval_seconds="2",
        ) as operator,
    ):
        extraction.apply()
        extraction.wait_for(lambda s: s.get("shards", {}).get("active") == 2)
        assert operator.healthy()
        proxy.freeze_watches()
        extraction.patch({"suspend": True})
        wait_until(lambda: not operator.healthy(), 60)
        assert extraction.status()["phase"] == "Extracting"
        proxy.thaw_watches()
        extraction.wait("Suspended", 30)  # even if nobody restarts it
        wait_until(operator.healthy, 30)


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
    assert ever_made(control_plane, namespace) == (each_once(), 6)


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
