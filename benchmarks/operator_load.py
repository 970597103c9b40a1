"""The operator under load, on a real control plane with pods that follow scripts.

    .venv/bin/python benchmarks/operator_load.py jobs --jobs 500 --shards 8
    .venv/bin/python benchmarks/operator_load.py shards --shards 20000 --workers 512

`jobs`: many ExtractionJobs; the operator is killed and started again while all of them are live. `shards`: one large
ExtractionJob. Both measure how long a pod's finish takes to reach the status, what the operator asks of the API server (by
its audit log), memory and CPU of both. Everything runs on this machine, control plane and pods included: the figures are
an upper bound where it is busy. Workers answer on port 8080 of 127.1.0.0/16, which must be free.
"""

import argparse
import asyncio
import bisect
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from testbed.cluster_access import ADMIN, ClusterAccess
from testbed.control_plane import ControlPlane
from testbed.operator import SPEC, OperatorProcess, install_crd, report, stage_of
from testbed.process import wait_until
from testbed.scripted_nodes import ScriptedNodes
from testbed.scripted_pod import Api, ScriptedPod

PATH = "/apis/headframe.dev/v1alpha1/namespaces/default/extractionjobs"
USER = "system:serviceaccount:default:headframe-operator"
PODS = "/api/v1/namespaces/default/pods"
PODS_PER_NODE = 900
SAMPLE_SECONDS = 2.0


class Observer:
    """Notes when pods are seen to finish, and everything that the status says."""

    def __init__(self) -> None:
        self.finished: dict[str, list[float]] = defaultdict(list)
        self.told: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.phases: dict[str, str] = {}
        self.writes: Counter[str] = Counter()
        self.largest_bytes = 0
        self.faults: list[str] = []
        self._stories: dict[str, Any] = {}
        self._ended: set[str] = set()

    def latencies(self) -> list[float]:
        """Seconds from the k-th finish of a job's shards to the first status that counts k of them, sorted."""
        found = []
        for job, finishes in self.finished.items():
            counts = [count for count, _ in self.told[job]]
            for count, finish in enumerate(finishes, 1):
                first = bisect.bisect_left(counts, count)
                if first < len(counts):
                    found.append(max(0.0, self.told[job][first][1] - finish))
        return sorted(found)

    async def follow(self, api: Api) -> None:
        """Follow every ExtractionJob, and every pod that ends well."""
        workers = {"labelSelector": "headframe.dev/stage=extract"}
        await asyncio.gather(
            self._watch(api, PATH, {}, self._note_status), self._watch(api, PODS, workers, self._note_pod)
        )

    async def _watch(self, api: Api, path: str, query: dict[str, str], note: Callable[[Any], None]) -> None:
        version = ""
        while True:  # a busy API server closes watches that do not keep up
            since = {"resourceVersion": version} if version else {}
            async with api.session.get(path, params={"watch": "1", **query, **since}) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"the watch of {path}: {event['object']}")
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "DELETED":
                        note(event["object"])

    def _note_pod(self, pod: Any) -> None:
        metadata = pod["metadata"]
        if pod["status"].get("phase") == "Succeeded" and metadata["uid"] not in self._ended:
            self._ended.add(metadata["uid"])
            self.finished[metadata["labels"]["headframe.dev/job"]].append(time.monotonic())

    def _note_status(self, changed: Any) -> None:
        name, status = changed["metadata"]["name"], changed.get("status", {})
        story = {key: value for key, value in status.items() if key not in ("progress", "quarantined")}
        if status:
            self.writes["progress alone" if self._stories.get(name) == story else "news"] += 1
        self._stories[name] = story
        self.phases[name] = status.get("phase", "")
        self.largest_bytes = max(self.largest_bytes, len(json.dumps(status)))
        shards = status.get("shards", {"succeeded": 0, "active": 0, "total": 0})
        if shards["succeeded"] + shards["active"] > shards["total"] or shards.get("failed"):
            self.faults.append(f"{name}: {shards}")
        told = self.told[name]
        if not told or shards["succeeded"] > told[-1][0]:
            told.append((shards["succeeded"], time.monotonic()))


def observe(cluster: ClusterAccess, pipe: Connection) -> None:
    """The observer's own process, so that the load of playing pods does not blur what it sees. It answers by the pipe."""
    observer = Observer()

    async def run() -> None:
        api = Api(cluster)
        following = asyncio.create_task(observer.follow(api))
        while await asyncio.to_thread(pipe.recv) != "end":
            if following.done():
                raise RuntimeError("a watch of the benchmark has ended") from following.exception()
            pipe.send(Counter(observer.phases.values()))
        following.cancel()
        await api.session.close()

    asyncio.run(run())
    pipe.send(observer)


class Laboratory:
    """A cluster with its observer, and the samples of what the operator and the API server take."""

    def __init__(self, cluster: ControlPlane, operator: OperatorProcess, pipe: Connection) -> None:
        self.cluster = cluster
        self.operator = operator
        self.started = time.monotonic()
        self.rss_mib: list[float] = []
        self._pipe = pipe
        self._cpu = {"operator": 0.0, "apiServer": 0.0}
        self._cpu_before_restart = 0.0

    def wait(self, phase: str, count: int) -> None:
        """Wait until so many ExtractionJobs are in a phase."""
        wait_until(lambda: self._ask()[phase] == count, 3600, 0.5)

    def sample(self) -> None:
        """Begin to sample the operator's memory."""
        threading.Thread(target=self._sample, daemon=True).start()

    def seconds(self) -> float:
        """Since the start."""
        return round(time.monotonic() - self.started, 1)

    def restart_operator(self) -> float:
        """Kill it, start it again; how long until it is ready."""
        self._note_cpu()
        self._cpu_before_restart = self._cpu["operator"]
        self.operator.process.stop(kill=True)
        restarted = time.monotonic()
        self.operator.process.start()
        return round(time.monotonic() - restarted, 1)

    def figures(self, jobs: int) -> dict[str, Any]:
        """What all runs have in common."""
        self._note_cpu()
        seconds, quarters = self.seconds(), len(self.rss_mib) // 4
        self._pipe.send("end")
        observer: Observer = self._pipe.recv()
        late = observer.latencies()
        requests = self.cluster.requests_of(USER)
        writes = sum(n for (verb, _), n in requests.items() if verb in ("create", "patch", "delete"))
        progress = observer.writes["progress alone"]
        api_server = psutil.Process(self.cluster.api_server.pid)
        return {
            "seconds": seconds,
            "finishToStatusSeconds": {
                "p50": round(late[len(late) // 2], 2),
                "p95": round(late[int(len(late) * 0.95)], 2),
                "max": round(late[-1], 2),
                "finishes": len(late),
            },
            "operatorRssMib": {
                "byQuarter": [round(max(self.rss_mib[i * quarters : (i + 1) * quarters]), 1) for i in range(4)],
                "largest": round(max(self.rss_mib), 1),
            },
            "operatorCpuSecondsPerJob": round(self._cpu["operator"] / jobs, 3),
            "operatorCores": round(self._cpu["operator"] / seconds, 2),
            "apiServerCores": round(self._cpu["apiServer"] / seconds, 2),
            "apiServerRssMib": round(api_server.memory_info().rss / 2**20),
            "etcdFileMib": round((self.cluster.folder / "etcd/member/snap/db").stat().st_size / 2**20),
            "writesPerJobBesidesProgress": round((writes - progress) / jobs, 1),
            "progressWritesPerJob": round(progress / jobs, 1),
            "requests": {f"{verb} {resource}": n for (verb, resource), n in sorted(requests.items())},
            "largestStatusBytes": observer.largest_bytes,
            "wrongStatuses": observer.faults[:5],
            "load": psutil.getloadavg()[0],
        }

    def _ask(self) -> Counter[str]:
        self._pipe.send("phases")
        return self._pipe.recv()

    def _sample(self) -> None:
        pause = threading.Event()
        while not pause.wait(SAMPLE_SECONDS):
            try:
                self.rss_mib.append(psutil.Process(self.operator.process.pid).memory_info().rss / 2**20)
            except (psutil.Error, RuntimeError):
                continue  # it is being restarted

    def _note_cpu(self) -> None:
        self._cpu["operator"] = self._cpu_before_restart + cpu_seconds(self.operator.process.pid)
        self._cpu["apiServer"] = cpu_seconds(self.cluster.api_server.pid)


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def script_of(shards: int, seconds: float, hold: threading.Event) -> Any:
    """Every stage goes well; a shard takes about ``seconds``, and none ends before ``hold`` is set."""

    async def script(pod: ScriptedPod) -> None:
        stage = stage_of(pod)
        await pod.run()
        if stage == "extract":
            while not hold.is_set():  # noqa: ASYNC110  (set from another thread)
                await asyncio.sleep(0.5)
            await asyncio.sleep(seconds * random.uniform(0.5, 1.5))
        await pod.exit(0, report(stage, shards=shards))
        pod.manifest.clear()  # tens of thousands of them are large

    return script


async def answer_for_workers() -> None:
    """Every running worker's /progress: loopback addresses are all served by one."""

    async def progress(_: web.Request) -> web.Response:
        body = {"stage": "extract", "state": "running", "samples": 10, "tokens": 1000 + random.randrange(100)}
        return web.json_response({**body, "samplesPerSecond": 2.0, "tokensPerSecond": 200.0})

    app = web.Application()
    app.router.add_get("/progress", progress)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 8080).start()


@contextmanager
def laboratory(pods: int, shards: int, seconds: float, hold: threading.Event) -> Iterator[Laboratory]:
    """A control plane with nodes for so many pods, whose extract pods take so long, and an operator."""
    folder = Path(tempfile.mkdtemp(prefix="operator-benchmark-"))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(answer_for_workers(), loop).result()
    nodes = {"count": pods // PODS_PER_NODE + 2, "gpus": 1000, "script": script_of(shards, seconds, hold), "keep": True}
    with ControlPlane(folder, audit_users=(USER,), node_grace_seconds=600) as cluster, ScriptedNodes(cluster, **nodes):
        install_crd(cluster)
        access = ClusterAccess(folder, cluster.url, cluster.authority_file, {ADMIN: cluster.token(ADMIN)})
        here, there = multiprocessing.get_context("spawn").Pipe()
        observer = multiprocessing.get_context("spawn").Process(target=observe, args=(access, there), daemon=True)
        settings = {"poll_interval_seconds": "5", "status_interval_seconds": "5"}
        with OperatorProcess(cluster, folder, **settings) as operator:
            observer.start()
            there.close()  # so that the end of the observer is seen here
            lab = Laboratory(cluster, operator, here)
            lab.sample()
            yield lab
        observer.join(10)
    shutil.rmtree(folder)


def create(cluster: ClusterAccess, count: int, workers: int) -> None:
    """Create the ExtractionJobs, as fast as the API server takes them."""
    body = {"apiVersion": "headframe.dev/v1alpha1", "kind": "ExtractionJob", "spec": SPEC | {"workers": workers}}

    async def post() -> None:
        api = Api(cluster)
        for number in range(count):
            await api.call("POST", PATH, {**body, "metadata": {"name": f"job-{number:04d}", "namespace": "default"}})
        await api.session.close()

    asyncio.run(post())


def many_jobs(options: argparse.Namespace) -> dict[str, Any]:
    """Many ExtractionJobs; the operator restarts while all live."""
    hold = threading.Event()
    pods = options.jobs * (options.shards + 2)
    with laboratory(pods, options.shards, options.seconds, hold) as lab:
        create(lab.cluster, options.jobs, options.shards)
        figures = {"jobs": options.jobs, "shards": options.shards, "createdSeconds": lab.seconds()}
        lab.wait("Extracting", options.jobs)
        figures["allExtractingSeconds"] = lab.seconds()
        figures["restartReadySeconds"] = lab.restart_operator()
        hold.set()
        lab.wait("Succeeded", options.jobs)
        return figures | lab.figures(options.jobs)


def one_large_job(options: argparse.Namespace) -> dict[str, Any]:
    """One ExtractionJob of very many shards."""
    hold = threading.Event()
    hold.set()
    with laboratory(options.shards, options.shards, options.seconds, hold) as lab:
        create(lab.cluster, 1, options.workers)
        lab.wait("Succeeded", 1)
        figures = {"shards": options.shards, "workers": options.workers}
        return figures | lab.figures(1)


def main() -> None:
    """Run and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = parser.add_subparsers(required=True)
    jobs = runs.add_parser("jobs", help="many ExtractionJobs")
    jobs.add_argument("--jobs", type=int, default=500)
    jobs.add_argument("--shards", type=int, default=8)
    jobs.add_argument("--seconds", type=float, default=60.0, help="how long a shard takes, about")
    jobs.set_defaults(run=many_jobs)
    shards = runs.add_parser("shards", help="one large ExtractionJob")
    shards.add_argument("--shards", type=int, default=20_000)
    shards.add_argument("--workers", type=int, default=512)
    shards.add_argument("--seconds", type=float, default=5.0, help="how long a shard takes, about")
    shards.set_defaults(run=one_large_job)
    options = parser.parse_args()
    print(json.dumps(options.run(options), indent=1))


if __name__ == "__main__":
    main()
