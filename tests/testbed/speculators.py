"""speculators in an environment of its own, since it pins an older Transformers than ours; built once, cached by version."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from testbed.tools import CACHE, MissingTool, locked

VERSION = "0.9.0"
_REPOSITORY = Path(__file__).parents[2]


def speculators_python() -> Path:
    """The Python of an environment with speculators and what headframe-worker depends on; headframe itself is not in it."""
    project = tomllib.loads((_REPOSITORY / "worker/pyproject.toml").read_text())["project"]
    packages = [f"speculators=={VERSION}", *(name for name in project["dependencies"] if "headframe" not in name)]
    digest = hashlib.sha256(repr((packages, sys.version_info[:2])).encode()).hexdigest()[:10]
    folder = CACHE / "tools" / f"speculators-{VERSION}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not folder.exists():
                _build(folder, packages)
    return folder / "bin/python"


def run_with_speculators(arguments: list[str], *, timeout_seconds: float = 500) -> str:
    """Run that Python on this checkout's sources, without the network; its standard output. Raises AssertionError where it fails."""
    paths = [_REPOSITORY / "api", _REPOSITORY / "worker", _REPOSITORY / "tests"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [str(speculators_python()), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(arguments)} ended with {result.returncode}:\n{result.stderr[-4000:]}"
    return result.stdout


def _build(folder: Path, packages: list[str]) -> None:
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        raise MissingTool(f"speculators needs {uv} to build its environment: run make setup")
    with TemporaryDirectory(dir=folder.parent, prefix=".speculators-") as temporary:
        built = Path(temporary) / "environment"
        for command in (
            [str(uv), "venv", "--quiet", "--relocatable", "--python", sys.executable, str(built)],
            [str(uv), "pip", "install", "--quiet", "--python", str(built / "bin/python"), *packages],
        ):
            result = subprocess.run(["nice", "-n", "10", *command], capture_output=True, text=True, check=False)
            if result.returncode != 0:
                raise MissingTool(f"speculators cannot be installed: {result.stderr[-1500:]}")
        built.rename(folder)
