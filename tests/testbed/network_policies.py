"""Enforces NetworkPolicies on the real node, whose network plug-in does not: kube-network-policies of Kubernetes' SIG Network, by its own chart.

It takes the first packet of each connection from a queue of the kernel and says whether it may pass. It also makes the rules
that fill the queue, by an expression of nftables that not every kernel has; so the rule is made here, by iptables.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from testbed.helm import helm
from testbed.images import program_image
from testbed.machine import NETWORK_POLICY_RULES, POD_ADDRESSES, remove_packet_rules
from testbed.node import NodeCluster
from testbed.tools import go_tool, system_tool

_NAME, _NAMESPACE = "kube-network-policies", "kube-system"
_QUEUE = "98"  # the chart's


@contextmanager
def network_policies_enforced(cluster: NodeCluster) -> Iterator[None]:
    """NetworkPolicies hold within for connections between pods. The machine's own reach every pod, as a kubelet's must."""
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
    _divert("--append")
    try:
        cluster.kubectl("rollout", "status", f"daemonset/{_NAME}", "-n", _NAMESPACE, "--timeout=60s")
        yield
    finally:
        _divert("--delete")
        helm(cluster, f"--namespace={_NAMESPACE}", "uninstall", _NAME, "--wait", "--cascade=foreground")
        remove_packet_rules(NETWORK_POLICY_RULES)


def _divert(how: str) -> None:
    """Put the first packet of each connection between pods into the queue; where nobody reads it, it passes."""
    between_pods = [
        "--source",
        POD_ADDRESSES,
        "--destination",
        POD_ADDRESSES,
        "-m",
        "addrtype",
        "!",
        "--src-type",
        "LOCAL",
    ]
    new = ["-m", "conntrack", "--ctstate", "NEW", "--jump", "NFQUEUE", "--queue-num", _QUEUE, "--queue-bypass"]
    iptables = str(system_tool("iptables"))
    subprocess.run([iptables, "--table", "mangle", how, "POSTROUTING", *between_pods, *new], check=True)
