"""A real Kubernetes control plane on this machine: etcd, API server, controllers and scheduler, ready in seconds.

It is enough for most tests of the operator: Kubernetes itself makes, schedules and counts the pods of Jobs, and
`ScriptedNodes` plays them. Authorization is RBAC, so a client with a service account's token can do what its roles say.
"""

import json
import secrets
import ssl
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from testbed.certificates import CertificateAuthority
from testbed.cluster_access import ADMIN, ClusterAccess, exists
from testbed.process import Process, free_port, wait_until
from testbed.tools import go_tool

SERVICE_ADDRESSES = "10.96.0.0/16"
KUBERNETES_SERVICE = "10.96.0.1"
_UNUSED_ADDRESS = "198.51.100.1"  # loopback may not be advertised; without real nodes nobody dials it
_LOOPBACK = "127.0.0.1"
# The controllers' own rate limits would hide how fast the operator is.
_UNTHROTTLED = ["--kube-api-qps=1000", "--kube-api-burst=2000"]


class ControlPlane(ClusterAccess):
    """etcd, kube-apiserver, kube-controller-manager and kube-scheduler; a context manager.

    `host` is the address the API server listens on: that of a bridge where real nodes join (`node_names` are the names
    they may take), else loopback. `node_grace_seconds` is how long a node may be silent before it counts as gone.
    What a user of `audit_users` asks for is counted by `requests_of`.
    """

    def __init__(
        self,
        folder: Path,
        host: str = _LOOPBACK,
        *,
        node_names: tuple[str, ...] = (),
        node_grace_seconds: int = 20,
        audit_users: tuple[str, ...] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._audit_users = audit_users
        self.host = host
        self.authority = CertificateAuthority(folder / "pki")
        self._port = free_port(host)
        self._node_grace_seconds = node_grace_seconds
        groups = {ADMIN: "system:masters"}
        groups |= {f"system:{name}": "" for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy")}
        groups |= {f"system:node:{name}": "system:nodes" for name in node_names}
        tokens = {user: secrets.token_hex(16) for user in groups}
        super().__init__(folder, f"https://{host}:{self._port}", self.authority.certificate, tokens)
        lines = [f'{token},{user},{user},"{groups[user]}"' for user, token in tokens.items()]
        (folder / "tokens.csv").write_text("\n".join(lines) + "\n")
        etcd_port, signing_key = free_port(), self.authority.key("service-accounts")
        self._etcd = self._process("etcd", self._etcd_flags(etcd_port), f"http://{_LOOPBACK}:{etcd_port}/readyz")
        flags = self._api_server_flags(etcd_port, signing_key.certificate, signing_key.key)
        self.api_server = self._process("kube-apiserver", flags, f"{self.url}/readyz")
        self._controllers = self._controller("kube-controller-manager", self._controller_manager_flags(signing_key.key))
        self._scheduler = self._controller("kube-scheduler", [])

    def requests_of(self, user: str) -> Counter[tuple[str, str]]:
        """What one of the audited users asked the API server for, by verb and resource: `("patch", "jobs")`."""
        counts: Counter[tuple[str, str]] = Counter()
        for line in (self.folder / "audit.log").read_text().splitlines():
            entry = json.loads(line)
            if entry["user"]["username"] == user and entry["stage"] == "ResponseComplete":
                asked = entry.get("objectRef", {})
                resource = "/".join(filter(None, (asked.get("resource"), asked.get("subresource"))))
                counts[entry["verb"], resource or entry["requestURI"]] += 1
        return counts

    def start(self) -> None:
        """Start every component; return when they are ready, which the first service account proves."""
        components = (self._etcd, self.api_server, self._controllers, self._scheduler)
        for component in components:
            component.launch()
            if component is self.api_server:
                component.wait_ready()
        for component in components:
            component.wait_ready()
        core = self.core()
        wait_until(lambda: exists(lambda: core.read_namespaced_service_account("default", "default")))

    def stop(self) -> None:
        """Kill every component; nothing of a test's cluster is worth a graceful end."""
        for component in (self._scheduler, self._controllers, self.api_server, self._etcd):
            component.stop(kill=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _process(self, name: str, flags: list[str], health: str) -> Process:
        log = self.folder / f"{name}.log"
        return Process([go_tool("kube", name), *flags], log, ready=lambda: healthy(health), timeout_seconds=120)

    def _controller(self, name: str, flags: list[str]) -> Process:
        port = free_port()
        kubeconfig = str(self.kubeconfig_of(f"system:{name}"))
        common = [
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--bind-address={_LOOPBACK}",
            f"--secure-port={port}",
            "--leader-elect=false",
            "--profiling=false",
        ]
        return self._process(name, [*common, *_UNTHROTTLED, *flags], f"https://{_LOOPBACK}:{port}/healthz")

    def _etcd_flags(self, port: int) -> list[str]:
        peer, client = f"http://{_LOOPBACK}:{free_port()}", f"http://{_LOOPBACK}:{port}"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _api_server_flags(self, etcd_port: int, public_key: Path, private_key: Path) -> list[str]:
        addresses = tuple({_LOOPBACK, self.host, KUBERNETES_SERVICE})
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
        serving = self.authority.issue("kube-apiserver", addresses=addresses, hosts=names)
        kubelet_client = self.authority.issue("kube-apiserver-kubelet-client", organization="system:masters")
        return [
            *self._audit_flags(),
            f"--etcd-servers=http://{_LOOPBACK}:{etcd_port}",
            f"--bind-address={self.host}",
            f"--advertise-address={_UNUSED_ADDRESS if self.host == _LOOPBACK else self.host}",
            f"--secure-port={self._port}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.certificate}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={public_key}",
            f"--service-account-signing-key-file={private_key}",
            f"--service-cluster-ip-range={SERVICE_ADDRESSES}",
            f"--kubelet-certificate-authority={self.authority.certificate}",
            f"--kubelet-client-certificate={kubelet_client.certificate}",
            f"--kubelet-client-key={kubelet_client.key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged",
            "--profiling=false",
        ]

    def _audit_flags(self) -> list[str]:
        if not self._audit_users:
            return []
        rules = [{"level": "Metadata", "users": list(self._audit_users)}, {"level": "None"}]
        policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}
        (self.folder / "audit-policy.yaml").write_text(yaml.safe_dump(policy))
        return [
            f"--audit-policy-file={self.folder / 'audit-policy.yaml'}",
            f"--audit-log-path={self.folder / 'audit.log'}",
        ]

    def _controller_manager_flags(self, signing_key: Path) -> list[str]:
        return [
            "--use-service-account-credentials",
            f"--service-account-private-key-file={signing_key}",
            f"--root-ca-file={self.authority.certificate}",
            f"--node-monitor-grace-period={self._node_grace_seconds}s",
            "--node-monitor-period=1s",
        ]


def healthy(url: str) -> bool:
    """Whether a component says that it is ready. Its own certificate is not checked: the address is ours."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
