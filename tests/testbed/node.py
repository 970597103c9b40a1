"""A cluster with a real node: containerd, kubelet and kube-proxy, so that pods are processes and Services answer.

Images stay in containerd under `~/.cache/headframe/containerd`; all else of the node ends with it.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from testbed.control_plane import ControlPlane, healthy
from testbed.images import busybox_image, known_images, saved_image
from testbed.machine import ADDRESS, BRIDGE, CGROUP, POD_ADDRESSES, STATE, borrowed_machine
from testbed.process import Process, free_port, wait_until
from testbed.tools import CACHE, go_tool, system_tool

NODE_NAME = "node-1"
GPUS = 4
_CONTAINERD = CACHE / "containerd"
_SOCKET = STATE / "containerd.sock"
_LOOPBACK = "127.0.0.1"


class NodeCluster(ControlPlane):
    """A control plane and one real node with `GPUS` GPUs that exist on paper only.

    `host` is the machine's address on the pods' bridge: pods reach there what a test serves, and the test reaches pods.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ADDRESS, node_names=(NODE_NAME,))
        self._ctr = [str(system_tool("ctr", "containerd")), f"--address={_SOCKET}", "--namespace=k8s.io"]
        self._pause_image = busybox_image()
        self._containerd = self._containerd_process()
        self._kubelet = self._kubelet_process()
        self._proxy = self._proxy_process()

    def start(self) -> None:
        """Start the control plane and the node; return when the node is ready for pods."""
        self._containerd.launch()
        super().start()
        self._containerd.wait_ready()
        self._remove_containers()  # of an aborted run
        self.import_image(self._pause_image)
        self._kubelet.start()
        wait_until(lambda: NODE_NAME in self.kubectl("get", "nodes", "-o", "name"))
        self._proxy.start()
        gpus = json.dumps({"status": {part: {"nvidia.com/gpu": str(GPUS)} for part in ("capacity", "allocatable")}})
        self.kubectl("patch", "node", NODE_NAME, "--subresource=status", "--type=merge", "-p", gpus)
        self.kubectl("wait", "node", NODE_NAME, "--for=condition=Ready", "--timeout=60s")

    def stop(self) -> None:
        """Stop everything, containers included."""
        self._proxy.stop()
        self._kubelet.stop()
        self._remove_containers()
        self._containerd.stop()
        super().stop()

    def import_image(self, name: str) -> None:
        """Make an image of `testbed.images` known to the node, once; pods use it with `imagePullPolicy: Never`."""
        if name in self._run_ctr("images", "list", "--quiet").split():
            return
        repository = name.rsplit(":", 1)[0]
        with saved_image(name, _CONTAINERD / "io.containerd.content.v1.content/blobs/sha256") as archive:
            command = ["nice", "-n", "10", *self._ctr, "images", "import", f"--base-name={repository}", "-"]
            imported = subprocess.run(command, stdin=archive, capture_output=True, text=True, check=False)
        if imported.returncode:
            raise RuntimeError(f"could not import {name}: {imported.stderr}")
        self._remove_images(repository, kept=known_images(repository))

    def _remove_images(self, repository: str, kept: Sequence[str]) -> None:
        """Remove the images of a repository that are no longer built, and the kubelet's own names for them, which hold gigabytes too."""
        digests = {line.split()[0]: line.split()[2] for line in self._run_ctr("images", "list").splitlines()[1:]}
        stale = {name for name in digests if name.startswith(f"{repository}:") and name not in kept}
        named = {digest for name, digest in digests.items() if name not in stale and not name.startswith("sha256:")}
        for name, digest in digests.items():
            if name in stale or digest not in named:
                self._run_ctr("images", "remove", "--sync", name)

    def _remove_containers(self) -> None:
        if self._containerd.running:
            for container in self._run_ctr("containers", "list", "--quiet").split():
                self._run_ctr("tasks", "delete", "--force", container, check=False)  # it may have none
                self._run_ctr("containers", "delete", container)

    def _run_ctr(self, *arguments: str, check: bool = True) -> str:
        return subprocess.run([*self._ctr, *arguments], check=check, capture_output=True, text=True).stdout

    def _containerd_process(self) -> Process:
        networks = self._write("cni/bridge.conflist", json.dumps(_network()))
        config = _containerd_config(pause_image=self._pause_image, networks=networks.parent)
        command = [str(system_tool("containerd")), f"--config={self._write('containerd.toml', config)}"]
        return Process(command, self.folder / "containerd.log", ready=self._containerd_answers)

    def _containerd_answers(self) -> bool:
        return subprocess.run([*self._ctr, "version"], capture_output=True, check=False).returncode == 0

    def _kubelet_process(self) -> Process:
        health = free_port()
        serving = self.authority.issue(NODE_NAME, addresses=(ADDRESS,))
        config = _kubelet_config(health) | {
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.authority_file)},
            },
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
        }
        flags = [
            f"--config={self._write('kubelet.yaml', yaml.safe_dump(config))}",
            f"--kubeconfig={self.kubeconfig_of(f'system:node:{NODE_NAME}')}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={ADDRESS}",
            f"--root-dir={STATE / 'kubelet'}",
        ]
        return self._component("kubelet", flags, health)

    def _proxy_process(self) -> Process:
        health = free_port()
        flags = [
            f"--kubeconfig={self.kubeconfig_of('system:kube-proxy')}",
            f"--hostname-override={NODE_NAME}",
            "--proxy-mode=nftables",
            f"--cluster-cidr={POD_ADDRESSES}",
            "--masquerade-all",  # else the answer of a pod on the same bridge would bypass the translation
            "--conntrack-max-per-core=0",  # this and the next two leave the machine's settings alone
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            "--nodeport-addresses=primary",
            f"--healthz-bind-address={_LOOPBACK}:{health}",
            f"--metrics-bind-address={_LOOPBACK}:{free_port()}",
        ]
        return self._component("kube-proxy", flags, health)

    def _component(self, name: str, flags: list[str], health_port: int) -> Process:
        url = f"http://{_LOOPBACK}:{health_port}/healthz"
        log = self.folder / f"{name}.log"
        return Process([go_tool("kube", name), *flags], log, ready=lambda: healthy(url))

    def _write(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return path


@contextmanager
def borrowed_node_cluster(folder: Path) -> Iterator[NodeCluster]:
    """The machine's one real node, in a cluster of its own."""
    with borrowed_machine(), NodeCluster(folder) as cluster:
        yield cluster


def _network() -> dict[str, Any]:
    addresses = {"ranges": [[{"subnet": POD_ADDRESSES, "gateway": ADDRESS}]], "dataDir": str(STATE / "addresses")}
    bridge = {"type": "bridge", "bridge": BRIDGE, "isDefaultGateway": True, "ipam": {"type": "host-local", **addresses}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


def _containerd_config(pause_image: str, networks: Path) -> str:
    return f"""
version = 2
root = "{_CONTAINERD}"
state = "{STATE / "containerd"}"
[grpc]
address = "{_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause_image}"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "{STATE / "runc"}"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{networks}"
"""


def _kubelet_config(health_port: int) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": ADDRESS,
        "port": free_port(ADDRESS),
        "healthzBindAddress": _LOOPBACK,
        "healthzPort": health_port,
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": 0,
        "podLogsDir": str(STATE / "logs"),
        "volumePluginDir": str(STATE / "volume-plugins"),
        # A test machine's disk may be nearly full; images must stay all the same.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }
