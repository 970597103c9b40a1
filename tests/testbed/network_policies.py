"""Enforces NetworkPolicies on the real node, whose network plug-in does not: kube-network-policies of Kubernetes' SIG Network, by its own chart."""

from collections.abc import Iterator
from contextlib import contextmanager

from testbed.helm import helm
from testbed.images import program_image
from testbed.machine import NETWORK_POLICY_RULES, remove_packet_rules
from testbed.node import NodeCluster
from testbed.tools import go_tool

_NAME, _NAMESPACE = "kube-network-policies", "kube-system"


@contextmanager
def network_policies_enforced(cluster: NodeCluster) -> Iterator[None]:
    """NetworkPolicies hold within, for connections between pods and from them; what root does on the machine is let through."""
    image = program_image(go_tool(_NAME), "bin/netpol")
    cluster.import_image(image)
    repository, tag = image.rsplit(":", 1)
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "adminNetworkPolicy": "false",
        "daemonset.securityContext.privileged": "false",  # it also adds NET_ADMIN, which is enough
    }
    chart = go_tool(_NAME).parent / "charts/kube-network-policies"
    options = [f"--set={key}={value}" for key, value in values.items()]
    helm(cluster, f"--namespace={_NAMESPACE}", "install", _NAME, chart, *options)
    try:
        cluster.kubectl("rollout", "status", f"daemonset/{_NAME}", "-n", _NAMESPACE, "--timeout=60s")
        yield
    finally:
        helm(cluster, f"--namespace={_NAMESPACE}", "uninstall", _NAME, "--wait", "--cascade=foreground")
        remove_packet_rules(NETWORK_POLICY_RULES)
