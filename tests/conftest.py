"""The real components that tests share, each started once in a session by the first test that asks for it."""

from collections.abc import Iterator

import pytest

from testbed.control_plane import ControlPlane
from testbed.kueue import Kueue
from testbed.node import NodeCluster, borrowed_node_cluster
from testbed.s3 import S3Server
from testbed.tools import require
from testbed.toxiproxy import Toxiproxy


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` a file stays in one process, and so do all files that use this machine's only real node."""
    for item in items:
        on_the_node = "node_cluster" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("node" if on_the_node else item.path.stem))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server on loopback; a test makes its own bucket with `new_bucket()`."""
    with require(), S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def toxiproxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toxiproxy]:
    """A TCP proxy that fails on command; a test makes its own proxy with `proxy(upstream)`."""
    with require(), Toxiproxy(tmp_path_factory.mktemp("toxiproxy")) as server:
        yield server


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A Kubernetes without nodes; a test makes its own namespace and its own `ScriptedNodes`."""
    with require(), ControlPlane(tmp_path_factory.mktemp("control-plane")) as cluster:
        yield cluster


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace of the control plane for one test."""
    with control_plane.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def node_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeCluster]:
    """A Kubernetes with one real node, on which containers run; a test makes its own `namespace()` in it."""
    with require(), borrowed_node_cluster(tmp_path_factory.mktemp("node-cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kueue(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kueue]:
    """Kueue in the control plane; a test makes its own queue with `add_queue(namespace, name, gpus=...)`."""
    with require(), Kueue(control_plane, tmp_path_factory.mktemp("kueue")) as running:
        yield running
