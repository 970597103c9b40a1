"""The real components that tests share, each started once in a session by the first test that asks for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from testbed.control_plane import ControlPlane
from testbed.kueue import Kueue
from testbed.node import NodeCluster, borrowed_node_cluster
from testbed.s3 import S3Server
from testbed.tools import require
from testbed.toxiproxy import Toxiproxy

ON_THE_NODE = ("test_end_to_end", "test_operator_on_node", "test_testbed_images", "test_testbed_node")
"""Files that use this machine's only real node: one process runs them all, so that none waits for another's."""

LONG = (
    "test_model_ends",
    "test_parity",
    "test_prepare_model",
    "test_extract",
    "test_s3_faults_that_pass",
    "test_prepare_rows",
    "test_fusion_kernels",
)
"""Unit tests of more than ten seconds a file."""


class FileByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Every file in one process, for the sake of its fixtures. `--dist loadgroup` could say so, if it worked with pytest 9."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "node" if Path(file).stem in ON_THE_NODE else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FileByFile:
    """Where tests run side by side, this says which go together."""
    return FileByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files begin first, so that no process is left with one at the end. And a file that uses the node is known to."""
    items.sort(key=lambda item: item.path.stem not in LONG)
    for item in items:
        if "node_cluster" in getattr(item, "fixturenames", ()) and item.path.stem not in ON_THE_NODE:
            raise pytest.UsageError(f"{item.path} uses node_cluster: name it in ON_THE_NODE of {__file__}")


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
