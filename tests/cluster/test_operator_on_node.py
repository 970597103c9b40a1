"""Causes that only a real kubelet knows: images, Secrets, ConfigMaps, memory. And what its pods are allowed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.images import base_image
from testbed.node import NodeCluster
from testbed.operator import Extraction, OperatorProcess, install_crd
from testbed.process import wait_until

pytestmark = pytest.mark.cluster
SMALL = '{"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}}'


@pytest.fixture
def on_node(node_cluster: NodeCluster, tmp_path: Path) -> Iterator[Extraction]:
    """An ExtractionJob in a namespace of the real node, with an operator that serves it."""
    install_crd(node_cluster)
    node_cluster.import_image(base_image())
    with node_cluster.namespace() as namespace:
        settings = {"worker_image": base_image(), "image_pull_policy": "Never", "cpu_stage_resources": SMALL}
        with OperatorProcess(node_cluster, tmp_path, namespaces=(namespace,), **settings):
            yield Extraction(node_cluster, namespace)


def test_an_image_that_is_nowhere(on_node: Extraction) -> None:
    on_node.apply({"worker": {"image": "headframe.invalid/absent:1"}})
    on_node.wait_reason("ImagePullFailed", "headframe.invalid/absent:1")
    on_node.patch({"worker": {"image": base_image()}})
    # The base image has no `headframe`: the kubelet's own words say so.
    on_node.wait_reason("PodFailed", "headframe", timeout_seconds=60)


def test_a_secret_that_is_not_there(on_node: Extraction) -> None:
    on_node.apply({"s3": {"credentialsSecret": "keys"}})
    on_node.wait_reason("SecretOrConfigMapMissing", 'secret "keys" not found')


def test_a_volume_of_a_config_map_that_is_not_there(on_node: Extraction) -> None:
    volume = {"name": "settings", "configMap": {"name": "absent"}}
    mount = {"name": "settings", "mountPath": "/settings"}
    on_node.apply({"worker": {"volumes": [volume], "volumeMounts": [mount]}})
    on_node.wait_reason("VolumeMountFailed", 'configmap "absent" not found')


def test_a_ca_secret_that_is_not_there(on_node: Extraction) -> None:
    on_node.apply({"s3": {"caSecret": "ca"}})
    on_node.wait_reason("VolumeMountFailed", 'secret "ca" not found')
    on_node.delete()
    wait_until(lambda: not on_node.names("pods"), 60, poll_seconds=0.5)
