"""What every user meets: images from the Dockerfile, `helm install`, `kubectl apply`, Succeeded, and a dataset that is proven right."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.alerts import ALERTS
from testbed.helm import CHART
from testbed.images import known_images
from testbed.installed import EXAMPLE, NAMESPACE, Installed, headframe_installed
from testbed.node import NODE_NAME, NodeCluster
from testbed.process import wait_until
from testbed.prometheus import Prometheus
from testbed.tools import require

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
Json = dict[str, Any]
OUTPUT = "s3://headframe/{name}"
EMPTY_ON_A_GOOD_CPU_RUN = {
    "What stands in the way": "nothing does",
    "Blocked": "nothing is",
    "GPU utilisation": "no GPU",
    "GPU memory": "no GPU",
    "GPU power": "no GPU",
    "Quarantine": "nothing is refused",
    "Lag of the watches": "never behind",
}
"""Panels without data on such a run, and why that is right."""


@pytest.fixture(scope="module")
def installed(node_cluster: NodeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    with require(), headframe_installed(node_cluster, tmp_path_factory.mktemp("s3")) as made:
        yield made


@pytest.fixture
def namespace(installed: Installed) -> Iterator[str]:
    """A namespace with the store's credentials, under Restricted Pod Security."""
    with installed.cluster.namespace("drafters") as name:
        installed.cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        installed.give_credentials(name)
        yield name


def apply_example(installed: Installed, namespace: str, name: str = "cluster-quickstart", limit: int = 48) -> None:
    job = yaml.safe_load(EXAMPLE.read_text())
    job["metadata"] |= {"name": name, "namespace": namespace}
    job["spec"]["output"]["uri"] = OUTPUT.format(name=name)
    job["spec"]["dataset"]["limit"] = limit
    installed.cluster.apply(job)


def wait_for_success(installed: Installed, namespace: str, name: str = "cluster-quickstart") -> Json:
    """The ExtractionJob once it has ended; a failure is told in its own words."""

    def ended() -> bool:
        return installed.cluster.get("xj", name, namespace).get("status", {}).get("phase") in ("Succeeded", "Failed")

    wait_until(ended, timeout_seconds=1200, poll_seconds=1)
    job = installed.cluster.get("xj", name, namespace)
    assert job["status"]["phase"] == "Succeeded", json.dumps(job["status"], indent=1)
    return job


def wait_for_worker(installed: Installed, namespace: str) -> str:
    """The name of a pod that extracts now."""
    selector = "--selector=headframe.dev/stage=extract"
    running: list[str] = []

    def one_is_ready() -> bool:
        pods = json.loads(installed.cluster.kubectl("get", "pods", "-n", namespace, selector, "-o", "json"))["items"]
        ready = [
            pod["metadata"]["name"]
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
            and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
        ]
        running[:] = ready
        return bool(ready)

    wait_until(one_is_ready, timeout_seconds=600, poll_seconds=0.5)
    return running[0]


def verify(installed: Installed, name: str = "cluster-quickstart", *options: str) -> str:
    command = [Path(sys.executable).parent / "headframe", "verify", OUTPUT.format(name=name), *options]
    result = subprocess.run(
        command, env=os.environ | installed.s3.environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def panel_queries() -> Iterator[tuple[str, str]]:
    for file in (CHART / "files/dashboards").glob("*.json"):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                text = (
                    target["expr"].replace("$namespace", ".*").replace("$job", ".*").replace("$__rate_interval", "30s")
                )
                yield panel["title"], text


def test_the_quickstart_succeeds_and_prometheus_sees_it(installed: Installed, namespace: str, tmp_path: Path) -> None:
    started = time.time()
    with Prometheus(tmp_path / "prometheus", installed.cluster, installed.documents()) as prometheus:
        apply_example(installed, namespace)
        job = wait_for_success(installed, namespace)
        ended = time.time()
        status = job["status"]
        assert status["plan"]["samples"] == 48
        assert status["shards"]["summary"] == "4/4"
        assert status["progress"]["percent"] == 100
        assert {c["type"] for c in status["conditions"] if c["status"] == "True"} == {
            "Prepared",
            "Extracted",
            "Complete",
        }
        verify(installed, "cluster-quickstart", "--deep")

        assert {series["metric"]["headframe"] for series in prometheus.query("sum by (headframe) (up == 1)")} >= {
            "operator"
        }
        scraped = prometheus.query_range('headframe_samples_total{headframe="worker"}', started, ended)
        assert {series["metric"]["shard"] for series in scraped} == {"0", "1", "2", "3"}
        assert {(s["metric"]["namespace"], s["metric"]["job"]) for s in scraped} == {(namespace, "cluster-quickstart")}
        empty = {title for title, query in panel_queries() if not prometheus.query_range(query, started, ended)}
        assert empty <= set(EMPTY_ON_A_GOOD_CPU_RUN)
        for alert in ALERTS:  # each is a query that Prometheus takes; none but the waiting of a slow machine fires
            prometheus.query_range(alert.expression, started, ended)
        firing = prometheus.query_range('ALERTS{alertstate="firing"}', started, ended)
        assert {series["metric"]["alertname"] for series in firing} <= {"HeadframeGpuWaits"}


def test_disruptions_change_nothing(installed: Installed, namespace: str) -> None:
    """A worker deleted, the operator restarted, the node drained, the store gone for a while: whole output, no failure counted."""
    cluster, name = installed.cluster, "disrupted"
    apply_example(installed, namespace, name, limit=96)
    cluster.kubectl("delete", "pod", wait_for_worker(installed, namespace), "-n", namespace, "--wait=false")
    cluster.kubectl("rollout", "restart", "deployment/headframe", "-n", NAMESPACE)
    wait_for_worker(installed, namespace)
    cluster.kubectl("cordon", NODE_NAME)
    try:
        selector = "--pod-selector=headframe.dev/stage=extract"
        cluster.kubectl("drain", NODE_NAME, selector, "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=180s")
    finally:
        cluster.kubectl("uncordon", NODE_NAME)
    cluster.kubectl("rollout", "status", "deployment/headframe", "-n", NAMESPACE, "--timeout=180s")
    wait_for_worker(installed, namespace)
    installed.s3.stop()
    try:

        def told() -> bool:
            conditions = cluster.get("xj", name, namespace)["status"]["conditions"]
            return any(condition["reason"] == "WorkerWaiting" for condition in conditions)

        wait_until(told, timeout_seconds=300, poll_seconds=0.5)
    finally:
        installed.s3.start()
    job = wait_for_success(installed, namespace, name)
    assert job["status"]["shards"]["failed"] == 0
    verify(installed, name)


def test_helm_test_passes(installed: Installed) -> None:
    told = installed.helm("test", "headframe", "--logs", "--timeout=10m")
    assert "extracted and verified" in told


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
