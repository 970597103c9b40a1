"""Builds the Go programs the tests need, and keeps them per version: their binaries cannot be downloaded everywhere.

Each tool is a Go module under `go/<name>/`: its `go.mod` pins the version, `go.sum` the content. A built tool lies in
`~/.cache/headframe/tools/<name>-<version>-<digest of the module files>/`, so a fresh checkout does not build it again.
`python -m testbed.tools [NAME ...]` builds ahead of the tests; a cold build of everything takes minutes.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headframe"
GO_MODULES = Path(__file__).parent / "go"
KUBERNETES_VERSION = "1.34.4"


class MissingTool(Exception):  # noqa: N818  (a reason to skip, not an error)
    """A real component cannot be had on this machine; the message says which and how to get it."""


@dataclass(frozen=True)
class GoTool:
    """A program in a Go module under `go/<name>/`.

    `package` is the Go package of its main function, and `module` the one whose version names the tool. `applets` are
    the names that a many-in-one binary answers to; each becomes a link beside it. `data` is a folder of the module
    that the tool's user needs at run time; it is copied beside the binary.
    """

    name: str
    module: str
    package: str
    linker_flags: str = "-s -w"
    applets: tuple[str, ...] = ()
    data: str | None = None


_VERSION_FLAGS = f"-s -w -X k8s.io/component-base/version.gitVersion=v{KUBERNETES_VERSION} " + " ".join(
    f"-X k8s.io/component-base/version.git{part}={number}"
    for part, number in zip(("Major", "Minor"), KUBERNETES_VERSION.split("."), strict=False)
)

TOOLS = {
    tool.name: tool
    for tool in (
        GoTool("versitygw", "github.com/versity/versitygw", "github.com/versity/versitygw/cmd/versitygw"),
        GoTool("toxiproxy", "github.com/Shopify/toxiproxy/v2", "github.com/Shopify/toxiproxy/v2/cmd/server"),
        GoTool("kubeconform", "github.com/yannh/kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform"),
        GoTool(
            "kube",
            "k8s.io/kubernetes",
            ".",
            linker_flags=_VERSION_FLAGS,
            applets=(
                "etcd",
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
                "kubectl",
            ),
        ),
        GoTool("helm", "helm.sh/helm/v3", "helm.sh/helm/v3/cmd/helm"),
        GoTool("helm-docs", "github.com/norwoodj/helm-docs", "github.com/norwoodj/helm-docs/cmd/helm-docs"),
        GoTool("grafana-schema", "github.com/grafana/grafana-foundation-sdk/go", "."),
        GoTool(
            "kube-network-policies",
            "sigs.k8s.io/kube-network-policies",
            "sigs.k8s.io/kube-network-policies/cmd",
            data="charts",
        ),
        GoTool("kueue", "sigs.k8s.io/kueue", "sigs.k8s.io/kueue/cmd/kueue", data="config"),
    )
}


def go_tool(name: str, applet: str | None = None) -> Path:
    """The path of a built tool (or of one applet of it), building it first where the cache lacks it."""
    tool = TOOLS[name]
    folder = CACHE / "tools" / f"{name}-{_version(tool)}-{_digest(GO_MODULES / name, tool)}"
    if not folder.exists():
        with locked(folder):
            if not folder.exists():
                _build(tool, folder)
    return folder / (applet or name)


def system_tool(command: str, package: str | None = None) -> Path:
    """The path of a program that the system's packages provide."""
    found = shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise MissingTool(f"{command} is not installed: run .ci/system-packages (Debian package {package or command})")
    return Path(found)


def need_root() -> None:
    """Raise MissingTool unless this process may make mounts, bridges and cgroups."""
    if os.geteuid() != 0:
        raise MissingTool("this needs root: it makes mounts, network devices and cgroups")


@contextmanager
def require() -> Iterator[None]:
    """Turn MissingTool into a skip, or into a failure where HEADFRAME_REQUIRE_ALL=1 forbids skips."""
    try:
        yield
    except MissingTool as reason:
        if os.environ.get("HEADFRAME_REQUIRE_ALL") == "1":
            pytest.fail(f"HEADFRAME_REQUIRE_ALL=1, but {reason}", pytrace=False)
        pytest.skip(str(reason))


@contextmanager
def locked(thing: Path) -> Iterator[None]:
    """Hold the lock file beside `thing`, so that two processes do not make it at once."""
    thing.parent.mkdir(parents=True, exist_ok=True)
    with thing.with_name(f"{thing.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def go_command() -> Path:
    """The Go command: the machine's, or the one that .ci/system-packages installed."""
    found = shutil.which("go") or shutil.which("/usr/local/go/bin/go")
    installed = sorted((CACHE / "go").glob("*/bin/go"))
    if found is None and not installed:
        raise MissingTool("no Go: install Go 1.26 or newer, or run .ci/system-packages")
    return Path(found) if found else installed[-1]


def _version(tool: GoTool) -> str:
    for line in (GO_MODULES / tool.name / "go.mod").read_text().splitlines():
        words = line.removeprefix("require ").split()
        if words[:1] == [tool.module] and "=>" not in words:
            return words[1].removeprefix("v")
    raise ValueError(f"go/{tool.name}/go.mod does not require {tool.module}")


def _digest(module: Path, tool: GoTool) -> str:
    digest = hashlib.sha256(repr(tool).encode())
    for file in sorted(module.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:10]


def _build(tool: GoTool, folder: Path) -> None:
    go, module = go_command(), GO_MODULES / tool.name
    # "auto" lets an older Go fetch the toolchain a go.mod asks for from the module proxy.
    environment = os.environ | {"GOTOOLCHAIN": "auto", "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"}
    started = time.monotonic()
    with TemporaryDirectory(dir=folder.parent, prefix=f".{tool.name}-") as temporary:
        built = Path(temporary) / "tool"
        built.mkdir()
        command = ["nice", "-n", "10", str(go), "build", "-trimpath", "-ldflags", tool.linker_flags]
        _run([*command, "-o", str(built / tool.name), tool.package], module, environment)
        for applet in tool.applets:
            (built / applet).symlink_to(tool.name)
        if tool.data:
            source = _run([str(go), "list", "-m", "-f", "{{.Dir}}", tool.module], module, environment).strip()
            shutil.copytree(Path(source) / tool.data, built / tool.data, copy_function=shutil.copyfile)
            _make_writable(built / tool.data)
        built.rename(folder)
    print(f"built {folder.name} in {time.monotonic() - started:.0f} s", file=sys.stderr)


def _make_writable(folder: Path) -> None:
    """The module cache is read-only; a copy of it must be removable."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise MissingTool(f"`{' '.join(command)}` failed in {folder}:\n{result.stderr[-2000:]}")
    return result.stdout


if __name__ == "__main__":
    for name in sys.argv[1:] or TOOLS:
        print(go_tool(name))
