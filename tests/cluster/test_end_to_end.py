"""What every user meets: images from the Dockerfile, `helm install`, `kubectl apply`, Succeeded, and a dataset that is proven right."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from monitoring.alerts import ALERTS
from testbed.helm import CHART
from testbed.images import known_images
from testbed.installed import BUCKET, EXAMPLE, NAMESPACE, Installed, headframe_installed
from testbed.network_policies import network_policies_enforced
from testbed.node import NODE_NAME, NodeCluster
from testbed.process import Process, wait_until
from testbed.prometheus import Prometheus
from testbed.tools import go_tool, require
from testbed.toxiproxy import Proxy, Toxiproxy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
Json = dict[str, Any]
SAMPLES = 24
UPLOAD_KILOBYTES_PER_SECOND = 8
"""Of a held worker, a connection: requests pass, a part of megabytes does not."""
OUTAGE_SECONDS = float(os.environ.get("HEADFRAME_OUTAGE_SECONDS", "0"))
"""How long the store is gone at least; it is always gone until the status tells of it."""
EMPTY_ON_A_GOOD_CPU_RUN = {
    "What stands in the way": "nothing does",
    "Blocked": "nothing is",
    "GPU utilisation": "no GPU",
    "GPU memory": "no GPU",
    "GPU power": "no GPU",
    "Quarantine": "nothing is refused",
    "Lag of the watches": "never behind",
    "Time to write an object": "a shard of one part writes it just before its pod ends: no scrape sees that",
}
"""Panels without data on such a run, and why that is right."""


@dataclass(frozen=True)
class Run:
    """A run of the example that succeeded, between two moments in seconds since 1970."""

    namespace: str
    status: Json
    prometheus: Prometheus
    started: float
    ended: float
    watched: str
    """What `kubectl get xj -w` printed meanwhile."""


@dataclass(frozen=True)
class Caller:
    """A running pod with Python, from which connections to port 8080 of others are tried."""

    installed: Installed
    namespace: str
    pod: str

    @classmethod
    def new(cls, installed: Installed, namespace: str) -> Self:
        """A pod of nobody's, made for it; it listens too."""
        serve = ["python3", "-m", "http.server", "8080"]
        allowed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        image = known_images("localhost/headframe-operator")[0]
        container = {"name": "caller", "image": image, "command": serve, "securityContext": allowed}
        secure = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        spec = {"containers": [container], "securityContext": secure, "terminationGracePeriodSeconds": 0}
        metadata = {"name": "caller", "namespace": namespace}
        installed.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        installed.cluster.kubectl("wait", "pod/caller", "-n", namespace, "--for=condition=Ready", "--timeout=60s")
        return cls(installed, namespace, "caller")

    @property
    def address(self) -> str:
        return str(self.installed.cluster.get("pod", self.pod, self.namespace)["status"]["podIP"])

    def reaches(self, address: str) -> bool:
        """Whether a TCP connection from the pod is made; a NetworkPolicy lets it hang."""
        program = f"import socket; s = socket.socket(); s.settimeout(2); print(s.connect_ex(('{address}', 8080)))"
        command = ["exec", self.pod, "-n", self.namespace, "--", "python3", "-c", program]
        return self.installed.cluster.kubectl(*command).strip() == "0"


@pytest.fixture(scope="module")
def installed(node_cluster: NodeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    with require(), headframe_installed(node_cluster, tmp_path_factory.mktemp("s3")) as made:
        yield made


@pytest.fixture(scope="module")
def store(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The way of all pods to the S3 server."""
    with Toxiproxy(tmp_path_factory.mktemp("toxiproxy"), installed.cluster.host) as toxiproxy:
        yield toxiproxy.proxy(installed.s3.endpoint.removeprefix("http://"))


@pytest.fixture(scope="module")
def quickstart(installed: Installed, store: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The example, run to its end without a disturbance, and the Prometheus that watched."""
    with (
        drafters(installed, store) as namespace,
        Prometheus(tmp_path_factory.mktemp("prometheus"), installed.cluster, installed.documents()) as prometheus,
    ):
        started = time.time()
        printed = tmp_path_factory.mktemp("kubectl") / "watch"
        words = [f"--kubeconfig={installed.cluster.kubeconfig}", "get", "xj", "-n", namespace, "-w"]
        watch = Process([go_tool("kube", "kubectl"), *words], printed, ready=lambda: True)
        watch.start()
        try:
            apply_example(installed, namespace)
            status = wait_for_success(installed, namespace)
            wait_until(lambda: "Succeeded" in printed.read_text())
        finally:
            watch.stop()
        yield Run(namespace, status, prometheus, started, time.time(), printed.read_text())


@pytest.fixture
def namespace(installed: Installed, store: Proxy) -> Iterator[str]:
    with drafters(installed, store) as name:
        yield name


@contextmanager
def drafters(installed: Installed, store: Proxy) -> Iterator[str]:
    """A namespace with the store's credentials, under Restricted Pod Security."""
    with installed.cluster.namespace("drafters") as name:
        installed.cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        installed.give_credentials(name, endpoint=f"http://{store.address}")
        yield name


def apply_example(installed: Installed, namespace: str, name: str = "cluster-quickstart") -> None:
    """Half the example's samples."""
    job = yaml.safe_load(EXAMPLE.read_text())
    job["metadata"] |= {"name": name, "namespace": namespace}
    job["spec"]["output"]["uri"] = f"s3://{BUCKET}/{name}"
    job["spec"]["dataset"]["limit"] = SAMPLES
    installed.cluster.apply(job)


@contextmanager
def workers_that_last(installed: Installed, store: Proxy, namespace: str, name: str) -> Iterator[None]:
    """From the moment the plan is made, uploads hardly move: no worker ends before the context does.

    A few samples take a second or two, less than there is between two probes: else a worker could be over unseen.
    """
    wait_until(
        lambda: installed.cluster.get("xj", name, namespace).get("status", {}).get("phase") == "Extracting",
        timeout_seconds=300,
        poll_seconds=0.2,
    )
    toxic = store.add("bandwidth", stream="upstream", rate=UPLOAD_KILOBYTES_PER_SECOND)
    try:
        yield
    finally:
        store.remove(toxic)


def wait_for_success(installed: Installed, namespace: str, name: str = "cluster-quickstart") -> Json:
    """The status of the ExtractionJob once it has ended; a failure is told in its own words."""

    def status() -> Json:
        return dict(installed.cluster.get("xj", name, namespace).get("status", {}))

    wait_until(lambda: status().get("phase") in ("Succeeded", "Failed"), timeout_seconds=1200, poll_seconds=1)
    assert status()["phase"] == "Succeeded", json.dumps(status(), indent=1)
    return status()


def extract_pods(installed: Installed, namespace: str) -> list[Json]:
    listed = installed.cluster.kubectl(
        "get", "pods", "-n", namespace, "-l", "headframe.dev/stage=extract", "-o", "json"
    )
    return list(json.loads(listed)["items"])


def wait_for_worker(installed: Installed, namespace: str) -> Json:
    """A pod that extracts now."""

    def extracts(pod: Json) -> bool:
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
        return ready and "deletionTimestamp" not in pod["metadata"]

    found: list[Json] = []

    def look() -> bool:
        found.extend(pod for pod in extract_pods(installed, namespace) if extracts(pod))
        return bool(found)

    try:
        wait_until(look, timeout_seconds=300, poll_seconds=0.5)
    except TimeoutError as error:
        raise AssertionError(f"no worker extracts: {error}\n{installed.account(namespace)}") from None
    return found[0]


def waiting_is_told(installed: Installed, namespace: str, name: str) -> bool:
    conditions = installed.cluster.get("xj", name, namespace)["status"]["conditions"]
    return any(condition["reason"] == "WorkerWaiting" for condition in conditions)


def verify(name: str, installed: Installed, *options: str) -> None:
    command = [Path(sys.executable).parent / "headframe", "verify", f"s3://{BUCKET}/{name}", *options]
    result = subprocess.run(
        command, env=os.environ | installed.s3.environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def stored(name: str, installed: Installed) -> dict[str, bytes]:
    """Every object of an output that holds data, by its key below the output."""
    client, prefix = installed.s3.client(), f"{name}/"
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]]
    data = [key for key in keys if key.endswith((".safetensors", ".arrow", ".parquet", ".jsonl"))]
    return {key.removeprefix(prefix): client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in data}


def assert_same_output(name: str, installed: Installed, quickstart: Run) -> None:
    """Bit for bit what the undisturbed run wrote."""
    assert quickstart.status["phase"] == "Succeeded"
    expected, found = stored("cluster-quickstart", installed), stored(name, installed)
    assert len([key for key in expected if key.startswith("states/")]) == 4
    assert found.keys() == expected.keys()
    assert [key for key in expected if found[key] != expected[key]] == []


def panel_queries() -> Iterator[tuple[str, str]]:
    for file in (CHART / "files/dashboards").glob("*.json"):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                text = (
                    target["expr"].replace("$namespace", ".*").replace("$job", ".*").replace("$__rate_interval", "30s")
                )
                yield panel["title"], text


def has_values(series: list[Json]) -> bool:
    return any(value != "NaN" for one in series for _, value in one["values"])


def test_the_quickstart_succeeds(installed: Installed, quickstart: Run) -> None:
    status = quickstart.status
    assert status["plan"]["samples"] == SAMPLES
    assert status["shards"]["summary"] == "4/4"
    assert status["progress"]["percent"] == 100
    true = {condition["type"] for condition in status["conditions"] if condition["status"] == "True"}
    assert true == {"Prepared", "Extracted", "Complete"}
    verify("cluster-quickstart", installed, "--deep")


def test_kubectl_shows_it_live(installed: Installed, quickstart: Run) -> None:
    rows = [line.split() for line in quickstart.watched.splitlines()[1:]]
    phases = [row[1] for row in rows if len(row) > 2]  # the first row of all has no phase yet
    in_order = ["Pending", "Preparing", "Extracting", "Finalizing", "Succeeded"]
    assert [phase for phase in in_order if phase in phases] == list(dict.fromkeys(phases))
    assert phases[-1] == "Succeeded"
    # NAME PHASE % SAMPLES/S ETA SHARDS AGE
    live = [row for row in rows if row[1] == "Extracting" and len(row) == 7]
    assert any(0 < float(percent) < 100 and float(rate) > 0 for _, _, percent, rate, *_ in live), quickstart.watched
    described = installed.cluster.kubectl("describe", "xj", "cluster-quickstart", "-n", quickstart.namespace)
    assert f"the plan has {SAMPLES} samples with" in described
    assert "4/4 shards are done; verifies all shards and writes the manifest" in described
    assert "all states are extracted and verified" in described
    assert "Warning" not in described


def test_prometheus_sees_the_run(quickstart: Run) -> None:
    prometheus, span = quickstart.prometheus, (quickstart.started, quickstart.ended)
    up = {series["metric"]["headframe"] for series in prometheus.query_range("sum by (headframe) (up == 1)", *span)}
    assert up == {"operator", "worker"}
    scraped = prometheus.query_range('headframe_samples_total{headframe="worker"}', *span)
    assert {series["metric"]["shard"] for series in scraped} == {"0", "1", "2", "3"}
    names = {(series["metric"]["namespace"], series["metric"]["job"]) for series in scraped}
    assert names == {(quickstart.namespace, "cluster-quickstart")}
    empty = {title for title, query in panel_queries() if not has_values(prometheus.query_range(query, *span))}
    assert empty <= set(EMPTY_ON_A_GOOD_CPU_RUN)
    for alert in ALERTS:  # each is a query that Prometheus takes; none but the waiting of a slow machine fires
        prometheus.query_range(alert.expression, *span)
    firing = prometheus.query_range('ALERTS{alertstate="firing"}', *span)
    assert {series["metric"]["alertname"] for series in firing} <= {"HeadframeGpuWaits"}


def test_disruptions_change_nothing(installed: Installed, store: Proxy, namespace: str, quickstart: Run) -> None:
    """A worker deleted, the operator restarted, the node drained, the store gone for a while: the same bits, no failure counted."""
    cluster, name = installed.cluster, "disrupted"
    apply_example(installed, namespace, name)
    with workers_that_last(installed, store, namespace, name):
        worker = wait_for_worker(installed, namespace)["metadata"]["name"]
        cluster.kubectl("delete", "pod", worker, "-n", namespace, "--wait=false")
        cluster.kubectl("rollout", "restart", "deployment/headframe", "-n", NAMESPACE)
        wait_for_worker(installed, namespace)
        drain_workers(cluster)
        cluster.kubectl("rollout", "status", "deployment/headframe", "-n", NAMESPACE, "--timeout=180s")
        wait_for_worker(installed, namespace)
        installed.s3.stop()
        over = time.monotonic() + OUTAGE_SECONDS
        try:
            wait_until(lambda: waiting_is_told(installed, namespace, name), timeout_seconds=300, poll_seconds=0.5)
            wait_until(lambda: time.monotonic() > over, OUTAGE_SECONDS + 1, poll_seconds=0.5)
        finally:
            installed.s3.start()
    status = wait_for_success(installed, namespace, name)
    assert status["shards"]["failed"] == 0
    verify(name, installed)
    assert_same_output(name, installed, quickstart)


def drain_workers(cluster: NodeCluster) -> None:
    """Cordon the node, evict its workers, let it take pods again."""
    cluster.kubectl("cordon", NODE_NAME)
    try:
        selector = "--pod-selector=headframe.dev/stage=extract"
        cluster.kubectl("drain", NODE_NAME, selector, "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=180s")
    finally:
        cluster.kubectl("uncordon", NODE_NAME)


def test_an_upgrade_and_a_rollback_leave_a_running_job_alone(
    installed: Installed, store: Proxy, namespace: str, quickstart: Run
) -> None:
    """No pod is restarted or replaced. In between the release has NetworkPolicies, and what they should refuse is refused.

    The store is away meanwhile, so that the workers are there from the beginning to the end.
    """
    cluster, name = installed.cluster, "upgraded"
    apply_example(installed, namespace, name)
    with workers_that_last(installed, store, namespace, name):
        worker = wait_for_worker(installed, namespace)
        installed.s3.stop()
    try:
        with network_policies_enforced(cluster), cluster.namespace("prometheus") as monitoring:
            upgrade_with_network_policies(installed, workers=namespace, prometheus=monitoring)
            operator = Caller(installed, NAMESPACE, installed.operator_pod())
            prometheus, stranger = Caller.new(installed, monitoring), Caller.new(installed, namespace)
            wait_until(lambda: not stranger.reaches(operator.address))
            assert not stranger.reaches(worker["status"]["podIP"])
            assert prometheus.reaches(operator.address)
            assert prometheus.reaches(worker["status"]["podIP"])
            assert prometheus.reaches(stranger.address)
            assert operator.reaches(worker["status"]["podIP"])
            assert not operator.reaches(stranger.address), "its way out is the API server, DNS and workers"
            wait_until(lambda: waiting_is_told(installed, namespace, name), timeout_seconds=300, poll_seconds=0.5)
            assert "extracted and verified" in installed.helm("test", "headframe", "--logs", "--timeout=10m")
            installed.helm("rollback", "headframe", "--wait")
            operator = Caller(installed, NAMESPACE, installed.operator_pod())
            wait_until(lambda: stranger.reaches(operator.address))
    finally:
        installed.s3.start()
    wait_for_success(installed, namespace, name)
    pods = extract_pods(installed, namespace)
    assert len(pods) == 4, "each shard had one pod"
    assert worker["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in pods}
    assert {status["restartCount"] for pod in pods for status in pod["status"]["containerStatuses"]} == {0}
    assert_same_output(name, installed, quickstart)


def upgrade_with_network_policies(installed: Installed, workers: str, prometheus: str) -> None:
    """A new operator, and policies for workers in one namespace and Prometheus in another."""
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": prometheus}}}]
    policy = json.dumps({"enabled": True, "workerNamespaces": [workers], "prometheus": peers})
    before = installed.operator_pod()
    options = ["--reset-then-reuse-values", "--set=settings.logLevel=DEBUG", f"--set-json=networkPolicy={policy}"]
    installed.helm("upgrade", "headframe", CHART, "--wait", *options)
    assert installed.operator_pod() != before


def test_the_operator_is_small_and_neither_image_has_a_compiler(installed: Installed) -> None:
    """In the images themselves, by pods: no gcc, cc, clang or uv, nothing of the build's certificates, user 10001."""
    search = "for tool in gcc cc clang g++ uv pip; do command -v $tool && exit 1; done; test ! -e /etc/uv && test $(id -u) = 10001"
    with installed.cluster.namespace("images") as namespace:
        for component in ("operator", "worker"):
            image = known_images(f"localhost/headframe-{component}")[0]
            container = {"name": "look", "image": image, "imagePullPolicy": "Never", "command": ["sh", "-c", search]}
            spec = {"restartPolicy": "Never", "containers": [container]}
            installed.cluster.apply(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": component, "namespace": namespace},
                    "spec": spec,
                }
            )
            ended = "--for=jsonpath={.status.phase}=Succeeded"
            installed.cluster.kubectl("wait", f"pod/{component}", "-n", namespace, ended, "--timeout=60s")
