"""A missing component is a skip with a reason, or a failure where nothing may be missing; a tool is built once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.tools import GO_MODULES, MissingTool, require, system_tool


def test_a_missing_program_says_how_to_get_it() -> None:
    with pytest.raises(MissingTool, match=r"no-such-program is not installed: run .* \(Debian package some-package\)"):
        system_tool("no-such-program", "some-package")


def test_a_missing_component_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADFRAME_REQUIRE_ALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no engine"), require():
        raise MissingTool("no engine")


def test_a_missing_component_fails_where_all_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADFRAME_REQUIRE_ALL", "1")
    with pytest.raises(pytest.fail.Exception, match="no engine"), require():
        raise MissingTool("no engine")


def test_two_processes_build_a_tool_once(tmp_path: Path) -> None:
    with require():
        go = system_tool("go", "golang")
    build_cache = subprocess.run([go, "env", "GOCACHE"], capture_output=True, text=True, check=True).stdout.strip()
    paths = {"XDG_CACHE_HOME": str(tmp_path), "GOCACHE": build_cache, "PYTHONPATH": str(GO_MODULES.parents[1])}
    command = [sys.executable, "-m", "testbed.tools", "kubeconform"]
    builders = [
        subprocess.Popen(command, env=os.environ | paths, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [builder.communicate() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert "".join(complaints for _, complaints in outputs).count("built kubeconform") == 1
    (binary,) = {printed.strip() for printed, _ in outputs}
    assert subprocess.run([binary, "-v"], check=False, capture_output=True).returncode == 0
