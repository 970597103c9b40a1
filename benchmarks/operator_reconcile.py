"""The operator under load, on a real control plane with pods that follow scripts.

    .venv/bin/python benchmarks/operator_reconcile.py --jobs 500 --shards 8

Measures how long a pod's finish takes to reach the status, what the operator writes, its memory and CPU, and how long a
restart takes with every job alive. Everything runs on this machine, control plane and pods included: the figures are
an upper bound where it is busy.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from testbed.control_plane import ControlPlane
from testbed.operator import SPEC, OperatorProcess, install_crd, report, stage_of
from testbed.process import wait_until
from testbed.scripted_nodes import ScriptedNodes
from testbed.scripted_pod import Api, ScriptedPod

_PATH = "/apis/headframe.dev/v1alpha1/namespaces/default/extractionjobs"


class Observer:
    """Notes when pods finish and when the status says so."""

    def __init__(self) -> None:
        self.finished: dict[str, list[float]] = defaultdict(list)
        self.told: dict[str, dict[int, float]] = defaultdict(dict)
        self.phases: dict[str, str] = {}

    def latencies(self) -> list[float]:
        """Seconds from the k-th finish of a job's shards to the first status that counts k of them."""
        return sorted(
            min(at for succeeded, at in self.told[job].items() if succeeded >= count) - finish
            for job, finishes in self.finished.items()
            for count, finish in enumerate(sorted(finishes), 1)
            if any(succeeded >= count for succeeded in self.told[job])
        )

    async def watch(self, api: Api) -> None:
        """Follow every ExtractionJob."""
        async with api.session.get(_PATH, params={"watch": "1"}) as answer:
            async for line in answer.content:
                changed = json.loads(line)["object"]
                name, status = changed["metadata"]["name"], changed.get("status", {})
                self.phases[name] = status.get("phase", "")
                self.told[name].setdefault(status.get("shards", {}).get("succeeded", 0), time.monotonic())


def script_of(observer: Observer, shards: int, seconds: float, hold: threading.Event) -> Any:
    """Every stage goes well; a shard takes about ``seconds``, and none ends before ``hold`` is set."""

    async def script(pod: ScriptedPod) -> None:
        stage = stage_of(pod)
        await pod.run()
        if stage == "extract":
            while not hold.is_set():  # noqa: ASYNC110  (set from another thread)
                await asyncio.sleep(0.5)
            await asyncio.sleep(seconds * random.uniform(0.5, 1.5))
        await pod.exit(0, report(stage, shards=shards))
        if stage == "extract":
            observer.finished[pod.labels["headframe.dev/job"]].append(time.monotonic())

    return script


def requests(operator: OperatorProcess) -> dict[str, int]:
    """The operator's requests to the API server by method."""
    counts: dict[str, int] = defaultdict(int)
    for method, count in re.findall(r'api_requests_total\{code="\d+",method="(\w+)"\} ([\d.e+]+)', operator.metrics()):
        counts[method] += int(float(count))
    return dict(counts)


async def create_jobs(api: Api, count: int, shards: int) -> None:
    """Create the ExtractionJobs, as fast as the API server takes them."""
    body = {"apiVersion": "headframe.dev/v1alpha1", "kind": "ExtractionJob", "spec": SPEC | {"workers": shards}}
    for number in range(count):
        await api.call("POST", _PATH, {**body, "metadata": {"name": f"job-{number:04d}", "namespace": "default"}})


def main() -> None:
    """Run and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long a shard takes, about")
    options = parser.parse_args()
    observer, hold = Observer(), threading.Event()
    script = script_of(observer, options.shards, options.seconds, hold)
    folder = Path(tempfile.mkdtemp(prefix="operator-benchmark-"))
    figures: dict[str, Any] = {"jobs": options.jobs, "shards": options.shards}
    nodes_needed = 2 + options.jobs * (options.shards + 2) // 900
    with ControlPlane(folder) as cluster, ScriptedNodes(cluster, count=nodes_needed, gpus=1000, script=script):
        install_crd(cluster)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()

        async def connect() -> Api:
            return Api(cluster)

        api = asyncio.run_coroutine_threadsafe(connect(), loop).result()
        with OperatorProcess(cluster, folder, poll_interval_seconds="3600") as operator:
            watching = asyncio.run_coroutine_threadsafe(observer.watch(api), loop)
            started = time.monotonic()
            asyncio.run_coroutine_threadsafe(create_jobs(api, options.jobs, options.shards), loop).result()
            figures["created_seconds"] = round(time.monotonic() - started, 1)
            wait_until(lambda: _in(observer, "Extracting") == options.jobs, 1800, 1)
            figures["all_extracting_seconds"] = round(time.monotonic() - started, 1)
            process = psutil.Process(operator.process.pid)
            figures["rss_all_live_mib"] = process.memory_info().rss >> 20
            cpu_before = sum(process.cpu_times()[:2])
            writes = {k: v for k, v in requests(operator).items() if k != "GET"}

            operator.process.stop(kill=True)
            restarted = time.monotonic()
            operator.process.start()
            figures["restart_ready_seconds"] = round(time.monotonic() - restarted, 1)
            process = psutil.Process(operator.process.pid)
            hold.set()
            wait_until(lambda: _in(observer, "Succeeded") == options.jobs, 3600, 1)
            figures["all_done_seconds"] = round(time.monotonic() - started, 1)
            figures["rss_end_mib"] = process.memory_info().rss >> 20
            after = {k: v for k, v in requests(operator).items() if k != "GET"}
            total = sum(writes.values()) + sum(after.values())
            figures["writes_per_job"] = round(total / options.jobs, 1)
            figures["cpu_seconds_per_job"] = round((cpu_before + sum(process.cpu_times()[:2])) / options.jobs, 2)
            late = observer.latencies()
            figures["finish_to_status_seconds"] = {
                "p50": round(late[len(late) // 2], 2),
                "p95": round(late[int(len(late) * 0.95)], 2),
                "max": round(late[-1], 2),
                "finishes": len(late),
            }
        watching.cancel()
        asyncio.run_coroutine_threadsafe(api.session.close(), loop).result()
    print(json.dumps(figures, indent=1))


def _in(observer: Observer, phase: str) -> int:
    return sum(found == phase for found in observer.phases.values())


if __name__ == "__main__":
    main()
