"""The life of an ExtractionJob on a real control plane, with pods that follow scripts."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from testbed.control_plane import ControlPlane
from testbed.operator import Extraction, OperatorProcess, play, report, stage_of, work_until_told
from testbed.process import wait_until
from testbed.scripted_nodes import ScriptedNodes
from testbed.scripted_pod import ScriptedPod

pytestmark = pytest.mark.cluster
Nodes = Callable[..., ScriptedNodes]


def workers(scripted: ScriptedNodes, phase: str = "Running") -> list[ScriptedPod]:
    """The extract pods in a phase."""
    return [pod for pod in scripted.pods if stage_of(pod) == "extract" and pod.phase == phase]


def test_from_apply_to_succeeded(operator: OperatorProcess, extraction: Extraction, nodes: Nodes) -> None:
    nodes(play(seconds=0.3))
    extraction.apply()
    status = extraction.wait("Succeeded")
    conditions = {c["type"]: c["status"] for c in status["conditions"]}
    assert conditions == {
        "Prepared": "True",
        "Extracted": "True",
        "Complete": "True",
        "Failed": "False",
        "Suspended": "False",
        "Progressing": "False",
    }
    assert status["plan"]["shards"] == 4
    assert status["shards"] == {
        "total": 4,
        "active": 0,
        "succeeded": 4,
        "failed": 0,
        "failedIndexes": "",
        "summary": "4/4",
    }
    assert (status["progress"]["tokens"], status["progress"]["percent"]) == (8000, 100)
    assert status["output"]["manifest"] == "s3://states/out/manifest.json"
    assert status["quarantined"] == 1
    assert sorted(extraction.names("jobs")) == ["job-extract", "job-finalize", "job-prepare"]
    assert {"Preparing", "Extracting", "Finalizing", "Succeeded"} <= {reason for _, reason in extraction.events()}
    assert 'headframe_jobs{phase="Succeeded"} 1.0' in operator.metrics()


def test_progress_and_stalls_are_polled_from_the_workers(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes
) -> None:
    stall = {"stalled": False, "message": ""}

    async def serve_progress(pod: ScriptedPod) -> None:
        samples = 0

        async def progress(_: web.Request) -> web.Response:
            nonlocal samples
            samples = min(20, samples + 1)
            body = {"stage": "extract", "state": "running", "samples": samples, "tokens": 100 * samples, **stall}
            return web.json_response({**body, "samplesPerSecond": 2.0, "tokensPerSecond": 200.0})

        app = web.Application()
        app.router.add_get("/progress", progress)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, pod.address, 8080).start()
        await pod.run()
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    nodes(play(extract=serve_progress))
    extraction.apply()
    status = extraction.wait_for(lambda s: s.get("progress", {}).get("tokens", 0) >= 1000)
    progress = status["progress"]
    assert 0 < progress["percent"] <= 50
    assert progress["samplesPerSecond"] > 0
    assert progress["tokensPerSecond"] > 0
    assert progress["estimatedCompletionTime"].endswith("Z")
    assert "headframe_job_progress_ratio{" in operator.metrics()
    stall |= {"stalled": True, "message": "no batch for 900 s"}
    extraction.wait_reason("WorkerStalled", "makes no progress: no batch for 900 s")
    stall |= {"stalled": False, "message": ""}
    extraction.wait_reason("Extracting")


def test_a_silent_worker_is_named_and_delays_nobody(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes
) -> None:
    scripted = nodes(play(extract=work_until_told))
    extraction.apply()
    extraction.wait_for(lambda s: s.get("shards", {}).get("active") == 2)
    scripted.tell(workers(scripted)[0], lambda pod: pod.exit(0, report("extract")))
    extraction.wait_for(lambda s: s["shards"]["succeeded"] == 1, timeout_seconds=10)


def test_suspend_and_resume_in_every_stage(operator: OperatorProcess, extraction: Extraction, nodes: Nodes) -> None:
    async def wait(pod: ScriptedPod) -> None:
        await pod.run()

    scripted = nodes(wait)
    extraction.apply()
    for stage in ("prepare", "extract", "finalize"):
        scripted.wait_for(lambda pods, stage=stage: any(stage_of(p) == stage and p.phase == "Running" for p in pods))
        extraction.patch({"suspend": True})
        status = extraction.wait("Suspended")
        assert "startTime" not in status
        assert extraction.condition("Suspended")["status"] == "True"
        scripted.wait_for(lambda pods: not any(p.phase == "Running" for p in pods))
        extraction.patch({"suspend": False})
        scripted.wait_for(lambda pods, stage=stage: any(stage_of(p) == stage and p.phase == "Running" for p in pods))
        assert extraction.wait_for(lambda s: s["phase"] not in ("Suspended", "Pending"))["startTime"]
        for _ in range(8):
            running = [p for p in scripted.pods if stage_of(p) == stage and p.phase == "Running"]
            for pod in running:
                scripted.tell(pod, lambda pod, stage=stage: pod.exit(0, report(stage)))
            if stage != "extract" or extraction.status()["shards"]["succeeded"] == 4:
                break
            extraction.wait_for(
                lambda s: (
                    s["shards"]["succeeded"] == 4
                    or any(stage_of(p) == "extract" and p.phase == "Running" for p in scripted.pods)
                )
            )
    extraction.wait("Succeeded")


def test_suspended_from_the_start_nothing_is_made(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes
) -> None:
    nodes(play())
    extraction.apply({"suspend": True})
    extraction.wait("Suspended")
    assert extraction.names("jobs") == []
    extraction.patch({"suspend": False})
    extraction.wait("Succeeded")


def test_scaling_and_editing_workers_while_they_run(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane
) -> None:
    scripted = nodes(play(extract=work_until_told))
    extraction.apply()
    scripted.wait_for(lambda _: len(workers(scripted)) == 2)
    control_plane.kubectl("scale", "xj/job", "--replicas=3", "-n", extraction.namespace)
    scripted.wait_for(lambda _: len(workers(scripted)) == 3)
    extraction.patch({"workers": 1})
    scripted.wait_for(lambda _: len(workers(scripted)) == 1)
    extraction.wait_for(lambda s: s["shards"]["active"] == 1)
    extraction.patch({"workers": 0})
    extraction.wait_reason("NoWorkers", "scale")
    extraction.patch({"workers": 99})
    scripted.wait_for(lambda _: len(workers(scripted)) == 4)


def test_an_edit_of_the_pods_replaces_them_and_goes_on(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane
) -> None:
    scripted = nodes(play(extract=work_until_told))
    extraction.apply()
    scripted.wait_for(lambda _: len(workers(scripted)) == 2)
    extraction.patch({"worker": {"image": "worker:other"}})

    def replaced() -> bool:
        images = {pod.manifest["spec"]["containers"][0]["image"] for pod in workers(scripted)}
        return images == {"worker:other"} and len(workers(scripted)) == 2

    wait_until(replaced, 60)
    assert "prepare" not in {stage_of(pod) for pod in scripted.pods if pod.phase == "Running"}


@pytest.mark.parametrize("stage", ["prepare", "extract", "finalize"])
def test_deleted_in_every_stage_nothing_stays(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, stage: str
) -> None:
    async def stop_there(pod: ScriptedPod) -> None:
        await pod.run()
        if stage_of(pod) != stage:
            await pod.exit(0, report(stage_of(pod)))

    scripted = nodes(stop_there)
    extraction.apply()
    scripted.wait_for(lambda pods: any(stage_of(p) == stage and p.phase == "Running" for p in pods))
    extraction.delete()
    wait_until(lambda: not extraction.names("jobs") and not extraction.names("pods"), 60, poll_seconds=0.5)


def test_the_same_name_again_at_once_starts_anew(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes
) -> None:
    scripted = nodes(play(extract=work_until_told))
    extraction.apply()
    scripted.wait_for(lambda _: len(workers(scripted)) == 2)
    before = extraction.job_uids()
    extraction.delete(wait=False)
    wait_until(lambda: not extraction.exists(), 30)
    extraction.apply()
    scripted.wait_for(lambda _: len(workers(scripted)) == 2 and not before & extraction.job_uids())
    status = extraction.wait("Extracting")
    assert status["shards"]["succeeded"] == 0


def test_a_job_deleted_by_hand_in_any_stage_is_made_again(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane
) -> None:
    stages = {"prepare": "Preparing", "extract": "Extracting", "finalize": "Finalizing"}
    ending: set[str] = set()

    async def script(pod: ScriptedPod) -> None:
        await pod.run()
        while stage_of(pod) not in ending:  # noqa: ASYNC110  (set from another thread)
            await asyncio.sleep(0.1)
        await pod.exit(0, report(stage_of(pod)))

    scripted = nodes(script)
    extraction.apply()
    for stage, phase in stages.items():

        def running(stage: str = stage) -> set[str]:
            return {pod.uid for pod in scripted.pods if stage_of(pod) == stage and pod.phase == "Running"}

        wait_until(running, 60)
        extraction.wait(phase)
        before, pods = extraction.job_uids(), running()
        control_plane.kubectl("delete", "job", f"job-{stage}", "-n", extraction.namespace)
        wait_until(lambda running=running, pods=pods: running() and not running() & pods, 60)
        assert len(extraction.job_uids() - before) == 1
        extraction.wait(phase)
        ending.add(stage)
    extraction.wait("Succeeded")


def test_a_terminal_phase_is_final_even_if_its_jobs_vanish(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, control_plane: ControlPlane
) -> None:
    nodes(play())
    extraction.apply()
    before = extraction.wait("Succeeded")
    control_plane.kubectl("delete", "jobs", "--all", "-n", extraction.namespace)
    operator.kill()
    operator.process.wait_ready()
    extraction.patch({"workers": 5})
    wait_until(lambda: "headframe_operator_reconcile_seconds_count" in operator.metrics(), 30)
    assert extraction.names("jobs") == []
    assert extraction.status() == before


def test_the_time_to_live_takes_the_extraction_and_its_jobs(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes
) -> None:
    nodes(play())
    extraction.apply({"ttlSecondsAfterFinished": 2})
    extraction.wait("Succeeded")
    wait_until(lambda: not extraction.exists(), 30)
    wait_until(lambda: not extraction.names("jobs"), 30)


def test_deadlines(operator: OperatorProcess, control_plane: ControlPlane, namespace: str, nodes: Nodes) -> None:
    nodes(play(extract=work_until_told), gpus=2)
    active = Extraction(control_plane, namespace, "active").apply({"activeDeadlineSeconds": 6})
    active.wait("Extracting")
    pending = Extraction(control_plane, namespace, "pending").apply(
        {"pendingDeadlineSeconds": 5, "model": {"source": "m", "gpus": 8}}
    )
    active.wait("Failed", 30)
    assert active.condition("Failed")["reason"] == "DeadlineExceeded"
    pending.wait("Failed", 30)
    assert pending.condition("Failed")["reason"] == "PendingDeadlineExceeded"
    assert "nvidia.com/gpu" in pending.status()["message"]
    wait_until(lambda: not any("extract" in name for name in active.names("pods")), 60, poll_seconds=0.5)


@pytest.mark.parametrize(("allowed", "phase"), [(1, "Succeeded"), (0, "Failed")])
def test_failed_shards(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes, allowed: int, phase: str
) -> None:
    async def one_is_bad(pod: ScriptedPod) -> None:
        await pod.run()
        if pod.index == 2:
            await pod.exit(
                65, report("extract", exitCode=65, reason="CorruptTokens", message="tokens/shard-00002 is cut")
            )
        else:
            await pod.exit(0, report("extract"))

    nodes(play(extract=one_is_bad))
    extraction.apply({"failurePolicy": {"maxFailedShards": allowed}})
    status = extraction.wait(phase)
    assert status["shards"]["failedIndexes"] == "2"
    assert "2" in status["message"]
    if phase == "Succeeded":
        assert extraction.condition("Extracted")["reason"] == "SomeShardsFailed"
    else:
        assert extraction.condition("Failed")["reason"] == "TooManyFailedShards"
        assert "tokens/shard-00002 is cut" in status["message"]


def test_a_configuration_error_fails_the_job_in_the_workers_words(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes
) -> None:
    async def wrong(pod: ScriptedPod) -> None:
        await pod.run()
        await pod.exit(
            78, report("extract", exitCode=78, reason="SelfCheckFailed", message="right padding is not exact")
        )

    nodes(play(extract=wrong))
    extraction.apply()
    status = extraction.wait("Failed")
    assert "right padding is not exact" in status["message"]
    assert extraction.condition("Failed")["reason"] == "SelfCheckFailed"
    assert ("Warning", "SelfCheckFailed") in extraction.events()


def test_temporary_failures_and_disruptions_are_tried_again(
    operator: OperatorProcess, extraction: Extraction, nodes: Nodes
) -> None:
    seen: dict[int, int] = {}

    async def stumbles(pod: ScriptedPod) -> None:
        assert pod.index is not None
        seen[pod.index] = seen.get(pod.index, 0) + 1
        await pod.run()
        if pod.index == 0 and seen[0] == 1:
            await pod.exit(75, report("extract", exitCode=75, reason="StoreUnreachable"))
        elif pod.index == 1 and seen[1] <= 2:
            await pod.disrupt()
        elif pod.index == 2 and seen[2] == 1:
            await pod.exit(137, reason="OOMKilled")
        else:
            await pod.exit(0, report("extract"))

    nodes(play(extract=stumbles))
    extraction.apply({"failurePolicy": {"retriesPerShard": 1}})
    extraction.wait("Succeeded", 120)
    assert seen == {0: 2, 1: 3, 2: 2, 3: 1}


def test_a_long_name_works(
    operator: OperatorProcess, control_plane: ControlPlane, namespace: str, nodes: Nodes
) -> None:
    nodes(play())
    long = Extraction(control_plane, namespace, "a" * 120 + ".b" * 40)
    long.apply()
    long.wait("Succeeded")


def test_local_paths_without_a_volume_are_refused_before_a_pod_starts(
    operator: OperatorProcess, extraction: Extraction
) -> None:
    extraction.apply({"output": {"uri": "/data/out"}})
    status = extraction.wait("Failed")
    assert "spec.output.uri: /data/out is a local path" in status["message"]
    assert extraction.names("jobs") == []


def test_cluster_wide_with_logs_that_name_the_job(
    crd: None, control_plane: ControlPlane, namespace: str, extraction: Extraction, nodes: Nodes, tmp_path: Path
) -> None:
    nodes(play())
    with OperatorProcess(control_plane, tmp_path, log_format="json") as operator:
        extraction.apply()
        extraction.wait("Succeeded")
        lines = [json.loads(line) for line in operator.log.read_text().splitlines()]
    about = [line for line in lines if line.get("namespace") == namespace]
    assert any("created Job job-prepare" in line["message"] for line in about)
    assert {line["job"] for line in about} == {"job"}
