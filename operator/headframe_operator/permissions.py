"""What the operator may do: exactly the requests it makes. The chart's roles are this table, and a test runs under it."""

from __future__ import annotations

from typing import Any

from headframe_api.names import GROUP, PLURAL

RULES: tuple[dict[str, list[str]], ...] = (
    {"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["list", "watch", "delete"]},
    {"apiGroups": [GROUP], "resources": [f"{PLURAL}/status"], "verbs": ["patch"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["list", "watch", "create", "patch", "delete"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list", "create"]},
    {"apiGroups": ["kueue.x-k8s.io"], "resources": ["workloads"], "verbs": ["list", "patch"]},
)


def roles(account: str, account_namespace: str, namespaces: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The role and its binding for a service account: in each of ``namespaces``, or in the whole cluster."""
    subject = {"kind": "ServiceAccount", "name": account, "namespace": account_namespace}
    documents: list[dict[str, Any]] = []
    for namespace in namespaces or (None,):
        kind = "ClusterRole" if namespace is None else "Role"
        metadata = {"name": "headframe-operator"} | ({} if namespace is None else {"namespace": namespace})
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "headframe-operator"}
        version = "rbac.authorization.k8s.io/v1"
        documents += [
            {"apiVersion": version, "kind": kind, "metadata": metadata, "rules": list(RULES)},
            {
                "apiVersion": version,
                "kind": f"{kind}Binding",
                "metadata": metadata,
                "roleRef": reference,
                "subjects": [subject],
            },
        ]
    return documents
