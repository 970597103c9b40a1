"""The real node runs containers, gives them addresses and Services, and can be left as it was found."""

from pathlib import Path
from typing import Any

import pytest

from testbed.images import base_image
from testbed.node import GPUS, NodeCluster
from testbed.s3 import S3Server

pytestmark = pytest.mark.cluster


def python_pod(name: str, namespace: str, program: str, **container: Any) -> dict[str, Any]:
    command = {"image": base_image(), "imagePullPolicy": "Never", "command": ["python3", "-c", program]}
    spec = {"restartPolicy": "Never", "containers": [{"name": "python", **command, **container}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": spec,
    }


def logs_of(cluster: NodeCluster, pod: str, namespace: str) -> str:
    """The log of a pod that ends well."""
    cluster.kubectl("wait", f"pod/{pod}", "-n", namespace, "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")
    return cluster.kubectl("logs", pod, "-n", namespace)


def test_a_pod_reaches_a_service_and_prints_to_its_log(node_cluster: NodeCluster) -> None:
    serve = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, port=8080)"
    fetch = "import urllib.request; print(urllib.request.urlopen('http://{}').status)"
    probe = {"httpGet": {"port": 8080}, "periodSeconds": 1}
    node_cluster.import_image(base_image())
    with node_cluster.namespace() as namespace:
        port = {"port": 80, "targetPort": 8080}
        service = {
            "metadata": {"name": "web", "namespace": namespace},
            "spec": {"selector": {"app": "web"}, "ports": [port]},
        }
        node_cluster.apply(
            {"apiVersion": "v1", "kind": "Service", **service},
            python_pod(
                "web", namespace, serve, readinessProbe=probe, resources={"limits": {"nvidia.com/gpu": str(GPUS)}}
            ),
        )
        node_cluster.kubectl("wait", "pod/web", "-n", namespace, "--for=condition=Ready", "--timeout=60s")
        address = node_cluster.get("service", "web", namespace)["spec"]["clusterIP"]
        node_cluster.apply(python_pod("client", namespace, fetch.format(address)))
        assert logs_of(node_cluster, "client", namespace).strip() == "200"


def test_a_pod_reaches_a_server_of_the_test(node_cluster: NodeCluster, tmp_path: Path) -> None:
    fetch = "import socket; socket.create_connection(('{}', {})); print('reached')"
    node_cluster.import_image(base_image())
    with S3Server(tmp_path, node_cluster.host) as server, node_cluster.namespace() as namespace:
        node_cluster.apply(python_pod("client", namespace, fetch.format(server.host, server.port)))
        assert logs_of(node_cluster, "client", namespace).strip() == "reached"


def test_a_deleted_pod_gets_sigterm(node_cluster: NodeCluster) -> None:
    wait = "import signal; s=[signal.SIGTERM]; signal.pthread_sigmask(0, s); print(signal.sigwait(s).name)"
    ready = {"exec": {"command": ["true"]}, "periodSeconds": 1}
    node_cluster.import_image(base_image())
    with node_cluster.namespace() as namespace:
        node_cluster.apply(python_pod("waits", namespace, wait, readinessProbe=ready))
        node_cluster.kubectl("wait", "pod/waits", "-n", namespace, "--for=condition=Ready", "--timeout=60s")
        node_cluster.kubectl("delete", "pod/waits", "-n", namespace, "--grace-period=20", "--wait=false")
        assert "SIGTERM" in node_cluster.kubectl("logs", "waits", "-n", namespace, "--follow")
