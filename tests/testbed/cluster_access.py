"""How tests reach a cluster of the testbed: kubeconfig files, Python clients, kubectl, and a namespace per test."""

import json
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import ApiClient, BatchV1Api, CoreV1Api, V1Namespace, V1ObjectMeta
from kubernetes.client.exceptions import ApiException
from kubernetes.config import new_client_from_config

from testbed.process import wait_until
from testbed.tools import go_tool

ADMIN = "admin"


class ClusterAccess:
    """Ways to talk to the API server at `url`, for each user named in `tokens`, and for service accounts."""

    def __init__(self, folder: Path, url: str, authority_file: Path, tokens: Mapping[str, str]) -> None:
        self.folder = folder
        self.url = url
        self.authority_file = authority_file
        self._tokens = tokens

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig file of an administrator."""
        return self.kubeconfig_of(ADMIN)

    def kubeconfig_of(self, user: str) -> Path:
        """The kubeconfig file of `admin`, of a component (`system:kube-proxy`), or of a node (`system:node:NAME`)."""
        return self._write_kubeconfig(user.replace(":", "-"), self._tokens[user])

    def token(self, user: str) -> str:
        """The bearer token of a user named above."""
        return self._tokens[user]

    def kubeconfig_of_service_account(self, namespace: str, name: str, url: str = "") -> Path:
        """A kubeconfig file with a fresh token of a service account, bound by its roles; `url` is that of a proxy."""
        token = self.kubectl("create", "token", name, "-n", namespace, "--duration=2h").strip()
        return self._write_kubeconfig(f"{namespace}-{name}", token, url)

    def client(self, kubeconfig: Path | None = None) -> ApiClient:
        """An API client for an administrator, or for the user of a kubeconfig file."""
        made: ApiClient = new_client_from_config(str(kubeconfig or self.kubeconfig))  # type: ignore[no-untyped-call]
        return made

    def core(self) -> CoreV1Api:
        """The core API as administrator."""
        return CoreV1Api(self.client())

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as administrator and return what it printed; raises RuntimeError with its complaint."""
        command = [str(go_tool("kube", "kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments]
        result = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {result.stderr.strip()}")
        return result.stdout

    def apply(self, *manifests: Mapping[str, Any]) -> None:
        """Apply manifests server-side, as `kubectl apply --server-side` does."""
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(manifests))

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        """One object, as the API server has it."""
        return dict(json.loads(self.kubectl("get", kind, name, "-n", namespace, "-o", "json")))

    @contextmanager
    def namespace(self, prefix: str = "test") -> Iterator[str]:
        """A namespace of its own for a test. Afterwards its Jobs are deleted, then it; Kubernetes takes its time."""
        core, name = self.core(), f"{prefix}-{secrets.token_hex(4)}"
        core.create_namespace(V1Namespace(metadata=V1ObjectMeta(name=name)))
        wait_until(lambda: exists(lambda: core.read_namespaced_service_account("default", name)))
        try:
            yield name
        finally:
            BatchV1Api(self.client()).delete_collection_namespaced_job(name, propagation_policy="Background")
            core.delete_namespace(name)

    def _write_kubeconfig(self, name: str, token: str, url: str = "") -> Path:
        path = self.folder / f"{name}.kubeconfig"
        cluster = {"server": url or self.url, "certificate-authority": str(self.authority_file)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "testbed", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": name}}],
            "current-context": "testbed",
        }
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o600)
        return path


def exists(read: Callable[[], object]) -> bool:
    """Whether a read of one object finds it."""
    try:
        read()
    except ApiException as error:
        if error.status == 404:
            return False
        raise
    return True
