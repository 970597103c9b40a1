"""What a real node takes from this machine (a bridge, a cgroup, packet rules, mounts), and how the machine gets it back.

There is one node at a time on a machine: a second test run waits for the first. What an aborted run left behind is
cleaned away before the next begins.
"""

import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from testbed.process import wait_until
from testbed.tools import need_root, system_tool

BRIDGE = "headframe0"
ADDRESS = "10.88.0.1"  # the machine's on the bridge
POD_ADDRESSES = "10.88.0.0/16"
STATE = Path("/run/headframe-testbed")
CGROUP = "headframe-testbed"
NETWORK_POLICY_RULES = ("inet", "kube-network-policies")
_CGROUPS = Path("/sys/fs/cgroup")
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")  # whether packet rules see what pods send each other


@contextmanager
def borrowed_machine() -> Iterator[None]:
    """Hold the machine for one node: its bridge and cgroup are there within, and nothing of the node afterwards."""
    need_root()
    with STATE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _clean_up()
        found = {setting: setting.read_text() for setting in (_FORWARDING, _BRIDGED) if setting.exists()}
        try:
            _set_up()
            for setting in found:
                setting.write_text("1\n")
            yield
        finally:
            for setting, value in found.items():
                setting.write_text(value)
            _clean_up()


def _set_up() -> None:
    STATE.mkdir()
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("address", "add", f"{ADDRESS}/{POD_ADDRESSES.split('/')[1]}", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    for parent in _hierarchies():
        (parent / CGROUP).mkdir()
        for setting in (
            "cpuset.cpus",
            "cpuset.mems",
        ):  # empty in a new cgroup of version 1, which then takes no process
            if (parent / setting).exists():
                (parent / CGROUP / setting).write_text((parent / setting).read_text())


def _clean_up() -> None:
    _kill_processes()
    for mount in reversed(_mounts_below(STATE)):
        subprocess.run(["umount", "--lazy", mount], check=True)
    for trace in _traces():
        trace.unlink()
    shutil.rmtree(STATE, ignore_errors=True)
    for parent in [*_hierarchies(), _CGROUPS / "unified"]:
        for group, _, _ in os.walk(parent / CGROUP, topdown=False):
            wait_until(partial(_removed, Path(group)))
    if Path("/sys/class/net", BRIDGE).exists():
        _ip("link", "delete", BRIDGE)
    remove_packet_rules()


def remove_packet_rules(*tables: tuple[str, str]) -> None:
    """Delete tables of nftables, each a family and a name, where they are there; all that a node makes when none is named.

    The programs that make them leave them in place when they end.
    """
    for family, name in tables or (("ip", "kube-proxy"), ("ip6", "kube-proxy"), NETWORK_POLICY_RULES):
        nft = str(system_tool("nft", "nftables"))
        subprocess.run([nft, "delete", "table", family, name], capture_output=True, check=False)


def _traces() -> list[Path]:
    """What kubelet and the network plug-ins write about our pods at places that cannot be set."""
    links = [link for link in Path("/var/log/containers").glob("*") if link.readlink().is_relative_to(STATE)]
    results = [file for file in Path("/var/lib/cni/results").glob("*") if str(STATE) in file.read_text()]
    return links + results


def _kill_processes() -> None:
    """Kill what runs in the node's cgroup, and the shims that outlive their containerd."""
    for parent in _hierarchies():
        for procs in (parent / CGROUP).rglob("cgroup.procs"):
            for pid in procs.read_text().split():
                _kill(int(pid))
    socket = f"{STATE}/containerd.sock"
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_text().split("\0")
            if words[0].endswith("containerd-shim-runc-v2") and socket in words:
                _kill(int(process.name))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _removed(group: Path) -> bool:
    """Whether a cgroup is gone; the kernel refuses while a killed process is still on its way out."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def _hierarchies() -> list[Path]:
    """The roots of the cgroup hierarchies: one for version 2, one per controller for version 1."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [path for path in _CGROUPS.iterdir() if path.is_dir() and path.name != "unified" and not path.is_symlink()]


def _mounts_below(folder: Path) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(folder)]


def _ip(*arguments: str) -> None:
    subprocess.run([system_tool("ip", "iproute2"), *arguments], check=True)
