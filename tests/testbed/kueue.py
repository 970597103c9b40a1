"""A real Kueue on this machine, for tests of quotas and of Jobs that start suspended.

Its manifests come with its module. The Deployment is left out: the controller runs as a process of the test, as its own
service account. The API server reaches its webhooks through a Service that names this machine.
"""

import base64
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from testbed.cluster_access import ClusterAccess
from testbed.control_plane import healthy
from testbed.process import Process, free_port, wait_until
from testbed.tools import go_tool

_NAMESPACE = "kueue-system"
_SERVICE = "kueue-webhook-service"
_SECRET = "kueue-webhook-server-cert"
_LEFT_OUT = ("Deployment", "APIService")
Json = dict[str, Any]


class Kueue:
    """Kueue in a cluster; a context manager. It takes a Job whose label `kueue.x-k8s.io/queue-name` names a queue."""

    def __init__(self, cluster: ClusterAccess, folder: Path) -> None:
        self._cluster = cluster
        self._webhook_port = free_port()
        self._certificates = folder / "webhook-certificates"
        self._certificates.mkdir(parents=True)
        self._folder = folder

    def add_queue(self, namespace: str, name: str, *, gpus: int, borrow_from: str | None = None) -> None:
        """A queue in a namespace with a quota of GPUs of its own, in a cohort with others that name the same one."""
        resources = [
            {"name": resource, "nominalQuota": str(quota)}
            for resource, quota in (("nvidia.com/gpu", gpus), ("cpu", 10_000), ("memory", "100Ti"))
        ]
        group = {
            "coveredResources": [resource["name"] for resource in resources],
            "flavors": [{"name": "default", "resources": resources}],
        }
        cluster_queue = f"{namespace}-{name}"
        spec: Json = {"namespaceSelector": {}, "resourceGroups": [group]}
        spec |= {"cohortName": borrow_from} if borrow_from else {}
        self._cluster.apply(
            _object("ResourceFlavor", {"name": "default"}, {}),
            _object("ClusterQueue", {"name": cluster_queue}, spec),
            _object("LocalQueue", {"name": name, "namespace": namespace}, {"clusterQueue": cluster_queue}),
        )

    def __enter__(self) -> Self:
        config = go_tool("kueue", "config") / "default"
        manifests = yaml.safe_load_all(self._cluster.kubectl("kustomize", str(config)))
        self._cluster.apply(*(self._on_this_machine(one) for one in manifests if one["kind"] not in _LEFT_OUT))
        self._process = self._controller()
        self._process.launch()
        try:
            self._hand_over_certificates()
            self._process.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Without Kueue its webhooks would refuse every Job.
        for webhook in ("mutating", "validating"):
            self._cluster.kubectl("delete", f"{webhook}webhookconfiguration", f"kueue-{webhook}-webhook-configuration")
        self._process.stop()

    def _on_this_machine(self, manifest: Json) -> Json:
        """The manifest with its webhooks led to this process: their Service is an alias of localhost."""
        if manifest["kind"] == "Service" and manifest["metadata"]["name"] == _SERVICE:
            manifest["spec"] = {"type": "ExternalName", "externalName": "localhost"}
        clients = [webhook["clientConfig"] for webhook in manifest.get("webhooks", [])]
        if manifest["kind"] == "CustomResourceDefinition":
            clients += [manifest["spec"].get("conversion", {}).get("webhook", {}).get("clientConfig", {})]
        for client in clients:
            if "service" in client:
                client["service"]["port"] = self._webhook_port
        return manifest

    def _controller(self) -> Process:
        health = f"127.0.0.1:{free_port()}"
        configuration = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": _NAMESPACE,
            "health": {"healthProbeBindAddress": health},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": self._webhook_port, "certDir": str(self._certificates)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": True},
            "integrations": {"frameworks": ["batch/job"]},
        }
        config = self._folder / "kueue.yaml"
        config.write_text(yaml.safe_dump(configuration))
        kubeconfig = self._cluster.kubeconfig_of_service_account(_NAMESPACE, "kueue-controller-manager")
        return Process(
            [go_tool("kueue"), f"--config={config}", "--feature-gates=VisibilityOnDemand=false"],
            self._folder / "kueue.log",
            ready=lambda: healthy(f"http://{health}/readyz"),
            environment=os.environ | {"KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": _NAMESPACE},
        )

    def _hand_over_certificates(self) -> None:
        """Kueue keeps its certificates in a Secret and waits for them as files, as a kubelet would mount them."""

        def made() -> dict[str, str]:
            return dict(self._cluster.get("secret", _SECRET, _NAMESPACE).get("data", {}))

        wait_until(made)
        for name, content in made().items():
            (self._certificates / name).write_bytes(base64.b64decode(content))


def _object(kind: str, metadata: Json, spec: Json) -> Json:
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": metadata, "spec": spec}
