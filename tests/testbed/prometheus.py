"""A real Prometheus beside the cluster, scraping what the chart's monitors say: they are translated into its own configuration.

Debian's Prometheus is built without Kubernetes' service discovery, so the pods are listed here, with the same labels; choosing and
relabelling them is Prometheus' own work.
"""

import json
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from testbed.cluster_access import ClusterAccess
from testbed.control_plane import healthy
from testbed.process import Process, free_port
from testbed.tools import system_tool

Json = dict[str, Any]
_DISCOVERY_SECONDS = 1
_POD_LABEL = "__meta_kubernetes_pod_label_"


class Prometheus:
    """Prometheus over the PodMonitors and rules of a release; a context manager. `scrape_seconds` replaces the monitors' interval."""

    def __init__(
        self, folder: Path, cluster: ClusterAccess, documents: Iterable[Json], *, scrape_seconds: int = 2
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        documents = list(documents)
        monitors = [document for document in documents if document["kind"] == "PodMonitor"]
        rules = [document["spec"] for document in documents if document["kind"] == "PrometheusRule"]
        for number, spec in enumerate(rules):
            (folder / f"{number}.rules.yaml").write_text(yaml.safe_dump(spec))
        self._targets = folder / "targets.json"
        self._core = cluster.core()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._discover, name="discovery", daemon=True)
        configuration = {
            "global": {"scrape_interval": f"{scrape_seconds}s", "evaluation_interval": f"{scrape_seconds}s"},
            "rule_files": [str(folder / "*.rules.yaml")],
            "scrape_configs": [_scrape_config(monitor, self._targets) for monitor in monitors],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command: list[str | Path] = [
            system_tool("prometheus"),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self._process = Process(command, folder / "prometheus.log", ready=lambda: healthy(f"{self.url}/-/ready"))

    def query(self, expression: str) -> list[Json]:
        """The vector that an instant query returns. Raises HTTPError for a query that Prometheus refuses."""
        return list(self._get("query", {"query": expression})["result"])

    def query_range(self, expression: str, start: float, end: float, step_seconds: float = 5) -> list[Json]:
        """The series that a query returns over a span of time, in seconds since 1970."""
        parameters = {"query": expression, "start": start, "end": end, "step": step_seconds}
        return list(self._get("query_range", parameters)["result"])

    def _get(self, what: str, parameters: Json) -> Json:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}", timeout=30
        ) as answer:
            return dict(json.loads(answer.read())["data"])

    def _discover(self) -> None:
        while True:
            pods = self._core.api_client.sanitize_for_serialization(self._core.list_pod_for_all_namespaces())["items"]
            written = self._targets.with_suffix(".new")
            written.write_text(json.dumps([target for pod in pods for target in _targets(pod)]))
            written.rename(self._targets)
            if self._end.wait(_DISCOVERY_SECONDS):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stop()
        self._end.set()
        self._thread.join()


def _targets(pod: Json) -> Iterable[Json]:
    """What Kubernetes' service discovery (role pod) tells of a pod: one target a port."""
    metadata, address = pod["metadata"], pod["status"].get("podIP")
    labels = {
        "__meta_kubernetes_namespace": metadata["namespace"],
        "__meta_kubernetes_pod_name": metadata["name"],
        "__meta_kubernetes_pod_phase": pod["status"].get("phase", ""),
    }
    for kind in ("labels", "annotations"):
        prefix = f"__meta_kubernetes_pod_{kind.removesuffix('s')}_"
        labels |= {prefix + _escaped(key): value for key, value in metadata.get(kind, {}).items()}
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            own = {
                "__meta_kubernetes_pod_container_name": container["name"],
                "__meta_kubernetes_pod_container_port_name": port.get("name", ""),
            }
            if address:
                yield {"targets": [f"{address}:{port['containerPort']}"], "labels": labels | own}


def _scrape_config(monitor: Json, targets: Path) -> Json:
    """What the Prometheus operator makes of a PodMonitor, as far as the chart's use its fields."""
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    keep = [
        {"source_labels": [_POD_LABEL + _escaped(name)], "regex": value, "action": "keep"}
        for name, value in spec["selector"]["matchLabels"].items()
    ]
    port = {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": endpoint["port"], "action": "keep"}
    named = [
        {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target}
        for source, target in (("namespace", "namespace"), ("pod_name", "pod"), ("pod_container_name", "container"))
    ]
    job = {"source_labels": [_POD_LABEL + _escaped(spec["jobLabel"])], "target_label": "job", "regex": "(.+)"}
    own = [
        {_RELABEL_FIELDS[key]: value for key, value in relabeling.items()}
        for relabeling in endpoint.get("relabelings", ())
    ]
    chosen = spec.get("namespaceSelector", {"matchNames": [monitor["metadata"]["namespace"]]})
    if "matchNames" in chosen:
        within = "|".join(chosen["matchNames"])
        keep.append({"source_labels": ["__meta_kubernetes_namespace"], "regex": within, "action": "keep"})
    keep.append({"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "Failed|Succeeded", "action": "drop"})
    return {
        "job_name": monitor["metadata"]["name"],
        "honor_labels": endpoint.get("honorLabels", False),
        "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "5s"}],
        "relabel_configs": [*keep, port, *named, job, *own],
    }


_RELABEL_FIELDS = {
    "sourceLabels": "source_labels",
    "targetLabel": "target_label",
    "replacement": "replacement",
    "regex": "regex",
}


def _escaped(label: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in label)
