"""The operator as a process of its own, as a service account with its own roles, and the pods' part of the play."""

import asyncio
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headframe_operator.permissions import roles
from testbed.cluster_access import ClusterAccess
from testbed.process import Process, free_port, wait_until
from testbed.scripted_pod import ScriptedPod

Json = dict[str, Any]
CRD = Path(__file__).parents[2] / "crds/headframe.dev_extractionjobs.yaml"
SPEC: Json = {
    "model": {"source": "Qwen/Qwen3-8B"},
    "dataset": {"source": "s3://corpora/chats.jsonl"},
    "output": {"uri": "s3://states/out"},
    "workers": 2,
}
_ACCOUNT = "headframe-operator"
_FORBIDDEN = re.compile(r'User "system:serviceaccount:[^"]*" cannot')


def install_crd(cluster: ClusterAccess) -> None:
    """Install the CRD and wait until its resources are served."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))  # Helm may have had it before
    cluster.kubectl("wait", "--for=condition=Established", "crd/extractionjobs.headframe.dev", "--timeout=60s")


class OperatorProcess:
    """`headframe-operator` as a child process; a context manager.

    It serves ``namespaces`` (empty: the whole cluster) with exactly the permissions that the chart gives it, over the
    proxy at ``url`` if any. On exit it fails where the API server ever refused it something.
    """

    def __init__(
        self,
        cluster: ClusterAccess,
        folder: Path,
        *,
        namespaces: tuple[str, ...] = (),
        url: str = "",
        **settings: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._cluster = cluster
        self._namespaces = namespaces
        self.port = free_port()
        home = namespaces[0] if namespaces else "default"
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": _ACCOUNT, "namespace": home}}
        cluster.apply(account, *roles(_ACCOUNT, home, namespaces))
        self.kubeconfig = cluster.kubeconfig_of_service_account(home, _ACCOUNT, url)
        quick = {"POLL_INTERVAL_SECONDS": "0.5", "STATUS_INTERVAL_SECONDS": "1", "WORKER_IMAGE": "worker:test"}
        given = quick | {name.upper(): value for name, value in settings.items()}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADFRAME_")}
        environment |= {f"HEADFRAME_OPERATOR_{name}": value for name, value in given.items()}
        environment |= {
            "HEADFRAME_OPERATOR_PORT": str(self.port),
            "HEADFRAME_OPERATOR_NAMESPACES": ",".join(namespaces),
            "KUBECONFIG": str(self.kubeconfig),
        }
        self.log = folder / f"operator-{self.port}.log"
        self.process = Process(
            [Path(sys.executable).parent / "headframe-operator"], self.log, ready=self._ready, environment=environment
        )
        self.killed = 0

    def __enter__(self) -> Self:
        self.process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.stop()
        # A quota or an admission rule says "forbidden" too; only a lack of permission names the user and the verb.
        forbidden = [line for line in self.log.read_text().splitlines() if _FORBIDDEN.search(line)]
        if error is None:
            assert forbidden == [], "the operator's roles lack something"
        elif isinstance(error, Exception):
            error.add_note(self.process.tail(60))

    def kill(self) -> None:
        """End it with SIGKILL and start it again at once."""
        self.process.stop(kill=True)
        self.process.launch()
        self.killed += 1

    def metrics(self) -> str:
        """What Prometheus would read; nothing where it does not answer."""
        return self._read("/metrics") or ""

    def healthy(self) -> bool:
        """Whether the kubelet would leave it alone."""
        return self._read("/healthz") is not None

    def _ready(self) -> bool:
        return self._read("/readyz") is not None

    def _read(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return None


class Extraction:
    """One ExtractionJob in a test's namespace."""

    def __init__(self, cluster: ClusterAccess, namespace: str, name: str = "job") -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name

    def apply(self, spec: Json | None = None, **metadata: Any) -> Self:
        """Create or change it: the usual spec with these changes."""
        self.cluster.apply(
            {
                "apiVersion": "headframe.dev/v1alpha1",
                "kind": "ExtractionJob",
                "metadata": {"name": self.name, "namespace": self.namespace, **metadata},
                "spec": SPEC | (spec or {}),
            }
        )
        return self

    def patch(self, spec: Json) -> None:
        """Change a part of its spec."""
        self._kubectl("patch", "xj", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def delete(self, *, wait: bool = True) -> None:
        """Delete it."""
        self._kubectl("delete", "xj", self.name, f"--wait={str(wait).lower()}")

    def status(self) -> Json:
        """Its status now."""
        return dict(self.cluster.get("xj", self.name, self.namespace).get("status", {}))

    def exists(self) -> bool:
        """Whether the API server has it."""
        return self.name in self.names("xj")

    def condition(self, kind: str) -> Json:
        """One of its conditions; empty where it has none."""
        return next((c for c in self.status().get("conditions", ()) if c["type"] == kind), {})

    def wait(self, phase: str, timeout_seconds: float = 60) -> Json:
        """Wait until it is in a phase; return its status."""
        return self.wait_for(lambda status: status.get("phase") == phase, timeout_seconds)

    def wait_for(self, holds: Callable[[Json], object], timeout_seconds: float = 60) -> Json:
        """Wait until something holds for its status; return the status."""
        last: Json = {}

        def look() -> bool:
            nonlocal last
            last = self.status()
            return bool(holds(last))

        try:
            wait_until(look, timeout_seconds, poll_seconds=0.3)
        except TimeoutError:
            raise TimeoutError(f"not within {timeout_seconds} s; the status is {json.dumps(last, indent=1)}") from None
        return last

    def wait_reason(self, reason: str, *words: str, timeout_seconds: float = 10) -> Json:
        """Wait until the condition Progressing gives a reason, which 10 s are enough for; its message must hold the words."""

        def progressing(status: Json) -> Json:
            return next((c for c in status.get("conditions", ()) if c["type"] == "Progressing"), {})

        status = self.wait_for(lambda s: progressing(s).get("reason") == reason, timeout_seconds)
        found = progressing(status)
        for word in words:
            assert word in found["message"], found
        return found

    def names(self, kind: str) -> list[str]:
        """The objects of a kind in the namespace."""
        return [word.split("/", 1)[1] for word in self._kubectl("get", kind, "-o", "name").split()]

    def job_uids(self) -> set[str]:
        """The uids of its Jobs."""
        listed = json.loads(self._kubectl("get", "jobs", "-o", "json"))
        return {item["metadata"]["uid"] for item in listed["items"]}

    def events(self) -> list[tuple[str, str]]:
        """Type and reason of the Events about it."""
        listed = json.loads(
            self._kubectl("get", "events", "--field-selector=involvedObject.kind=ExtractionJob", "-o", "json")
        )
        return [(item["type"], item["reason"]) for item in listed["items"]]

    def _kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments)


def report(stage: str, *, shards: int = 4, **changes: Any) -> str:
    """The termination message of a stage that went well."""
    message: Json = {"stage": stage, "exitCode": 0, "reason": "Completed", "message": "done", **changes}
    if stage == "prepare":
        plan = {"samples": 20 * shards, "tokens": 2000 * shards, "shards": shards, "bytes": 999, "layers": [1, 2]}
        message |= {"plan": {**plan, "hiddenSize": 8, "modelRevision": "r"}, "quarantined": 1}
    elif stage == "extract":
        message |= {"samples": 20, "tokens": 2000}
    else:
        message["output"] = {"uri": "s3://states/out", "bytes": 999, "manifest": "s3://states/out/manifest.json"}
    return json.dumps(message)


def stage_of(pod: ScriptedPod) -> str:
    """Which stage a pod belongs to."""
    return pod.labels["headframe.dev/stage"]


def play(
    *, shards: int = 4, extract: Callable[[ScriptedPod], Awaitable[None]] | None = None, seconds: float = 0.0
) -> Callable[[ScriptedPod], Awaitable[None]]:
    """A script in which every stage goes well, but for what ``extract`` does instead. A stage takes ``seconds``."""

    async def script(pod: ScriptedPod) -> None:
        stage = stage_of(pod)
        if stage == "extract" and extract is not None:
            await extract(pod)
            return
        await pod.run()
        await asyncio.sleep(seconds)
        await pod.exit(0, report(stage, shards=shards))

    return script


async def work_until_told(pod: ScriptedPod) -> None:
    """A worker that runs until the test ends it."""
    await pod.run()
