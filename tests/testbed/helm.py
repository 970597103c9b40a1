"""Helm over the project's chart: rendered without a cluster, or installed in one of the testbed."""

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from testbed.cluster_access import ClusterAccess
from testbed.tools import KUBERNETES_VERSION, go_tool

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "charts/headframe"
VALUES = sorted((CHART / "ci").glob("*.yaml"))
Json = dict[str, Any]


def render(
    *arguments: str | Path, namespace: str = "headframe-system", version: str = KUBERNETES_VERSION
) -> list[Json]:
    """The objects of `helm template` with these arguments, hooks included; the release is called headframe."""
    return [
        document
        for document in yaml.safe_load_all(render_text(*arguments, namespace=namespace, version=version))
        if document
    ]


def render_text(*arguments: str | Path, namespace: str = "headframe-system", version: str = KUBERNETES_VERSION) -> str:
    """What `helm template` prints. Raises RuntimeError with Helm's complaint."""
    return _run("template", "headframe", CHART, f"--namespace={namespace}", f"--kube-version={version}", *arguments)


def helm(cluster: ClusterAccess, *arguments: str | Path, kubeconfig: Path | None = None) -> str:
    """Run a Helm command against a cluster, as administrator or as the user of a kubeconfig file."""
    return _run(f"--kubeconfig={kubeconfig or cluster.kubeconfig}", *arguments)


def _run(*arguments: str | Path) -> str:
    command = [str(go_tool("helm")), *map(str, arguments)]
    environment = os.environ | {
        "HELM_CACHE_HOME": "/nonexistent",
        "HELM_CONFIG_HOME": "/nonexistent",
        "HELM_DATA_HOME": "/nonexistent",
    }
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        raise RuntimeError(f"helm {' '.join(map(str, arguments))}: {result.stderr.strip()}\n{result.stdout.strip()}")
    return result.stdout
