"""The operator in a real control plane: each test has a namespace, an operator that serves it, and its own nodes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testbed.control_plane import ControlPlane
from testbed.operator import Extraction, OperatorProcess, install_crd
from testbed.scripted_nodes import ScriptedNodes


@pytest.fixture(scope="session")
def crd(control_plane: ControlPlane) -> None:
    """The CRD, installed."""
    install_crd(control_plane)


@pytest.fixture
def operator(crd: None, control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator that serves the test's namespace alone, as its service account."""
    with OperatorProcess(control_plane, tmp_path, namespaces=(namespace,)) as running:
        yield running


@pytest.fixture
def extraction(control_plane: ControlPlane, namespace: str) -> Extraction:
    """The test's ExtractionJob, not yet applied."""
    return Extraction(control_plane, namespace)


@pytest.fixture
def nodes(control_plane: ControlPlane, namespace: str) -> Iterator[Callable[..., ScriptedNodes]]:
    """Makes scripted nodes that end with the test."""
    with ExitStack() as stack:
        count = 0

        def make(script: Any, **options: Any) -> ScriptedNodes:
            nonlocal count
            count += 1
            prefix = f"{namespace}-{count}"
            return stack.enter_context(ScriptedNodes(control_plane, script=script, prefix=prefix, **options))

        yield make
