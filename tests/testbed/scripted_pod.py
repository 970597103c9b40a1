"""One pod without a machine: its methods write the status that a kubelet would write when that happened to the pod."""

import asyncio
import json
import ssl
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import aiohttp

from testbed.cluster_access import ADMIN, ClusterAccess

Json = dict[str, Any]
TERMINAL_PHASES = ("Succeeded", "Failed")
_CONNECTIONS = 24
_RETRY_SECONDS = 0.2


class Api:
    """A plain asynchronous client: one pod's status is a few hundred bytes, and typed models would cost more than the wire."""

    def __init__(self, cluster: ClusterAccess) -> None:
        context = ssl.create_default_context(cafile=str(cluster.authority_file))
        self.session = aiohttp.ClientSession(
            cluster.url,
            connector=aiohttp.TCPConnector(ssl=context, limit=_CONNECTIONS),
            headers={"Authorization": f"Bearer {cluster.token(ADMIN)}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            read_bufsize=1 << 22,
        )

    async def call(self, method: str, path: str, body: Json) -> HTTPStatus:
        """One request; it is repeated while the API server is away. An object gone or changed is no error."""
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        while True:
            try:
                async with self.session.request(
                    method, path, data=json.dumps(body), headers={"Content-Type": kind}
                ) as answer:
                    status, text = HTTPStatus(answer.status), await answer.text()
            except aiohttp.ClientConnectionError:
                status, text = HTTPStatus.SERVICE_UNAVAILABLE, ""
            if status not in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
                break
            await asyncio.sleep(_RETRY_SECONDS)
        if status < HTTPStatus.BAD_REQUEST or status in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
            return status
        raise RuntimeError(f"{method} {path}: {status.value} {text}")


class ScriptedPod:
    """One pod on a scripted node.

    `address` is its own on loopback, so that a test can serve there what the pod would serve. `index` is the completion
    index of a pod of an Indexed Job, else None.
    """

    def __init__(self, manifest: Json, address: str, api: Api) -> None:
        metadata = manifest["metadata"]
        self.manifest = manifest
        self.address = address
        self.namespace = str(metadata["namespace"])
        self.name = str(metadata["name"])
        self.uid = str(metadata["uid"])
        self.node = str(manifest["spec"]["nodeName"])
        self.labels: dict[str, str] = metadata.get("labels", {})
        index = metadata.get("annotations", {}).get("batch.kubernetes.io/job-completion-index")
        self.index = None if index is None else int(index)
        self.phase = str(manifest.get("status", {}).get("phase", "Pending"))
        self._api = api
        self._path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self._started = _now()

    @property
    def environment(self) -> dict[str, str]:
        """The literal environment of the pod's first container."""
        variables = self.manifest["spec"]["containers"][0].get("env", [])
        return {variable["name"]: variable["value"] for variable in variables if "value" in variable}

    async def wait(self, reason: str, message: str = "") -> None:
        """The container does not start: `ImagePullBackOff`, `CreateContainerConfigError`, ..."""
        await self._write("Pending", {"waiting": {"reason": reason, "message": message}})

    async def run(self, *, ready: bool = True) -> None:
        """The container runs; `ready` says whether it passes its readiness probe."""
        await self._write("Running", {"running": {"startedAt": self._started}}, ready=ready)

    async def exit(self, code: int, message: str = "", reason: str | None = None) -> None:
        """The container ends with an exit code and a termination message, and the pod with it."""
        await self._write("Failed" if code else "Succeeded", self._terminated(code, message, reason))

    async def disrupt(self, reason: str = "TerminationByKubelet", message: str = "", code: int = 143) -> None:
        """The node takes the pod away, as at its shutdown: the pod fails with the condition DisruptionTarget."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        await self._write("Failed", self._terminated(code, "", None), conditions=(condition,))

    async def remove(self) -> None:
        """End what still runs, as SIGTERM does, and have the API server forget the pod."""
        if self.phase not in TERMINAL_PHASES:
            await self.exit(143)
        await self._api.call("DELETE", self._path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}})

    def _terminated(self, code: int, message: str, reason: str | None) -> Json:
        ended = {"startedAt": self._started, "finishedAt": _now()}
        return {
            "terminated": {
                "exitCode": code,
                "reason": reason or ("Error" if code else "Completed"),
                "message": message,
                **ended,
            }
        }

    async def _write(self, phase: str, state: Json, *, ready: bool = False, conditions: tuple[Json, ...] = ()) -> None:
        now = _now()
        usual = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
        only = {"waiting": None, "running": None, "terminated": None} | state  # null removes the state before
        containers = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": container["image"],
                "ready": ready,
                "started": "running" in state,
                "restartCount": 0,
                "state": only,
            }
            for container in self.manifest["spec"]["containers"]
        ]
        status = {
            "phase": phase,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self._started,
            "conditions": [
                *({"type": kind, "status": str(true), "lastTransitionTime": now} for kind, true in usual.items()),
                *({"lastTransitionTime": now, **condition} for condition in conditions),
            ],
            "containerStatuses": containers,
        }
        self.phase = phase
        # With its uid the patch fails, instead of striking a new pod of the same name.
        await self._api.call("PATCH", f"{self._path}/status", {"metadata": {"uid": self.uid}, "status": status})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
