"""Nodes without machines: a kubelet in this process that plays every pod by a script, for hundreds of pods at a time.

A script is a coroutine that says what becomes of one pod:

    async def out_of_memory(pod: ScriptedPod) -> None:
        await pod.run()
        await pod.exit(137, reason="OOMKilled")

    with ScriptedNodes(control_plane, count=2, gpus=8, script=out_of_memory) as nodes: ...

Scheduling, Jobs, eviction, preemption and garbage collection are Kubernetes' own. A running pod that is deleted exits
with 143, unless its script catches the cancellation and ends it otherwise; then it is removed, as a kubelet does.
"""

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import aiohttp

from testbed.cluster_access import ClusterAccess
from testbed.loop_thread import LoopThread, Result
from testbed.process import wait_until
from testbed.scripted_pod import TERMINAL_PHASES, Api, Json, ScriptedPod

Script = Callable[[ScriptedPod], Awaitable[None]]
_HEARTBEAT_SECONDS = 5
_RETRY_SECONDS = 0.2
_NETWORK = f"127.{os.getpid() % 250 + 1}"
_ADDRESSES = (f"{_NETWORK}.{number // 250 % 250}.{number % 250 + 1}" for number in itertools.count())
"""Of this process alone: tests run in several, and a pod's own address serves what the test wants it to."""
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


async def run_until_told(pod: ScriptedPod) -> None:
    """The default script: the pod runs and is ready until the test says more, by `ScriptedNodes.tell`."""
    await pod.run()


@dataclass
class _Part:
    """A pod's part in the play: the task that follows its script, and whether it is on its way out."""

    pod: ScriptedPod
    task: "asyncio.Task[None]"
    leaving: bool = False


class ScriptedNodes:
    """`count` nodes whose pods follow `script`; a context manager. On exit the nodes and the pods left on them go.

    `prefix` keeps the names of several groups apart. `labels` and `taints` are set on every node; `capacity` adds to the
    usual resources or replaces them. The first error of a script is raised on exit. `keep` leaves nodes and pods where
    they are, because the whole cluster goes.
    """

    def __init__(
        self,
        cluster: ClusterAccess,
        *,
        count: int = 1,
        gpus: int = 8,
        script: Script = run_until_told,
        prefix: str = "scripted",
        labels: Mapping[str, str] | None = None,
        taints: tuple[Json, ...] = (),
        capacity: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> None:
        self._keep = keep
        self.names = [f"{prefix}-{number}" for number in range(count)]
        self._cluster = cluster
        self._script = script
        resources = {"cpu": "256", "memory": "2Ti", "ephemeral-storage": "10Ti", "pods": "1000"}
        self._capacity = resources | ({"nvidia.com/gpu": str(gpus)} if gpus else {}) | dict(capacity or {})
        self._labels = dict(labels or {})
        self._taints = list(taints)
        self._parts: dict[str, _Part] = {}
        self._silent: set[str] = set()
        self._errors: list[BaseException] = []
        self._thread = LoopThread("scripted-nodes")

    @property
    def pods(self) -> list[ScriptedPod]:
        """The pods on these nodes now, in the order of their arrival."""
        return [part.pod for part in list(self._parts.values())]

    def wait_for(
        self, condition: Callable[[list[ScriptedPod]], object], timeout_seconds: float = 60
    ) -> list[ScriptedPod]:
        """Wait until `condition` holds for the pods on these nodes; return them."""
        wait_until(lambda: condition(self.pods), timeout_seconds)
        return self.pods

    def tell(self, pod: ScriptedPod, script: Script) -> None:
        """Give a pod a new script, and wait until it is played: `nodes.tell(pod, lambda pod: pod.exit(0))`."""
        self._do(self._replay(pod, script))

    def silence(self, node: str) -> None:
        """The node is gone for good: no heartbeat comes from it, and its pods neither go on nor leave."""
        self._do(self._silence(node))

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._open())
        wait_until(lambda: all(self._schedulable(name) for name in self.names))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._close())
        self._thread.stop()
        if self._errors and error is None:
            raise self._errors[0]

    def _schedulable(self, name: str) -> bool:
        """Whether the node's controller has taken off the taint that a new node has until it is ready."""
        spec = self._cluster.core().read_node(name).spec
        return spec is not None and {taint.key for taint in spec.taints or []} <= {t["key"] for t in self._taints}

    def _do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._thread.do(work, 120)

    async def _open(self) -> None:
        self._api = Api(self._cluster)
        for name in self.names:
            await self._register(name)
        self._tasks = [asyncio.create_task(self._keep_alive()), asyncio.create_task(self._follow())]

    async def _close(self) -> None:
        for task in [*self._tasks, *(part.task for part in self._parts.values())]:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if not self._keep:
            await self._leave_cluster()
        await self._api.session.close()

    async def _leave_cluster(self) -> None:
        await asyncio.gather(*(part.pod.remove() for part in self._parts.values()))
        for name in self.names:
            await self._api.call("DELETE", f"/api/v1/nodes/{name}", {})
            await self._api.call("DELETE", f"{_LEASES}/{name}", {})

    async def _register(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **self._labels}
        node = {"metadata": {"name": name, "labels": labels}, "spec": {"taints": self._taints}}
        status = await self._api.call("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", **node})
        if status is HTTPStatus.CONFLICT:
            raise RuntimeError(f"there is a node {name} already: give each group of scripted nodes its own prefix")
        lease = {"metadata": {"name": name}, "spec": {"holderIdentity": name, "renewTime": _now_precisely()}}
        await self._api.call("POST", _LEASES, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease})
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "scripted"}
        body = {"status": {"capacity": self._capacity, "allocatable": self._capacity, "conditions": [ready]}}
        await self._api.call("PATCH", f"/api/v1/nodes/{name}/status", body)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            for name in self.names:
                if name not in self._silent:
                    await self._api.call("PATCH", f"{_LEASES}/{name}", {"spec": {"renewTime": _now_precisely()}})

    async def _follow(self) -> None:
        """List the pods, then watch them; again from the list whenever the watch ends."""
        while True:
            try:
                async with self._api.session.get("/api/v1/pods") as answer:
                    answer.raise_for_status()
                    listed = await answer.json()
                for pod in listed["items"]:
                    self._observe(pod)
                for gone in set(self._parts) - {pod["metadata"]["uid"] for pod in listed["items"]}:
                    self._forget(gone)
                await self._watch(listed["metadata"]["resourceVersion"])
            except aiohttp.ClientError:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _watch(self, version: str) -> None:
        query = {"watch": "1", "resourceVersion": version}
        async with self._api.session.get("/api/v1/pods", params=query) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                if event["type"] == "DELETED":
                    self._forget(event["object"]["metadata"]["uid"])
                else:
                    self._observe(event["object"])

    def _observe(self, manifest: Json) -> None:
        node, uid = manifest["spec"].get("nodeName"), manifest["metadata"]["uid"]
        if node not in self.names or node in self._silent:
            return
        part = self._parts.get(uid)
        if part is None:
            pod = ScriptedPod(manifest, next(_ADDRESSES), self._api)
            part = self._parts[uid] = _Part(pod, asyncio.create_task(self._play(pod, self._script)))
        if "deletionTimestamp" in manifest["metadata"] and not part.leaving:
            part.leaving = True
            part.task = asyncio.create_task(self._take_leave(part.pod, part.task))

    def _forget(self, uid: str) -> None:
        part = self._parts.pop(uid, None)
        if part is not None:
            part.task.cancel()

    async def _play(self, pod: ScriptedPod, script: Script) -> None:
        if pod.phase in TERMINAL_PHASES:
            return
        try:
            await script(pod)
        except Exception as error:
            self._errors.append(error)

    async def _take_leave(self, pod: ScriptedPod, script: "asyncio.Task[None]") -> None:
        script.cancel()
        with suppress(asyncio.CancelledError):
            await script
        await pod.remove()

    async def _silence(self, node: str) -> None:
        self._silent.add(node)
        for part in self._parts.values():
            if part.pod.node == node:
                part.task.cancel()

    async def _replay(self, pod: ScriptedPod, script: Script) -> None:
        part = self._parts[pod.uid]
        part.task.cancel()
        part.task = asyncio.create_task(self._play(pod, script))
        await part.task


def _now_precisely() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
