"""The part of the spec that shapes pods: Kubernetes' own fields under Kubernetes' own names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from headframe_api.base import KubernetesModel

KubernetesObject = dict[str, Any]
"""An object of the core/v1 API, passed on as it is and checked by the API server."""


class LocalObjectReference(KubernetesModel):
    """Names a Secret in the job's namespace."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the Secret."""


class EnvVar(KubernetesModel):
    """One environment variable of the worker container."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the variable."""
    value: str | None = None
    """Its value, as text."""
    value_from: KubernetesObject | None = None
    """core/v1 EnvVarSource: where a secret value comes from."""


class VolumeMount(KubernetesModel):
    """Where one of `volumes` is mounted in the worker container."""

    name: Annotated[str, Field(min_length=1)]
    """Name of one of `volumes`."""
    mount_path: Annotated[str, Field(min_length=1)]
    """Absolute path in the container."""
    sub_path: str | None = None
    """Path inside the volume to mount instead of its root."""
    sub_path_expr: str | None = None
    """The same with `$(VARIABLE)` expanded from the environment."""
    read_only: bool | None = None
    """Mounted read-only where true."""
    recursive_read_only: str | None = None
    """Disabled, IfPossible or Enabled: whether mounts below are read-only too."""
    mount_propagation: str | None = None
    """None, HostToContainer or Bidirectional."""


class WorkerSpec(KubernetesModel):
    """How the pods of all three stages look. `headframe run` takes nothing from it: its environment is the shell's."""

    image: str | None = None
    """Worker image; unset takes the operator's default."""
    resources: KubernetesObject | None = None
    """core/v1 ResourceRequirements of an extract pod; GPUs follow from model.gpus where not given here."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[list[KubernetesObject], Field(max_length=64)] = Field(default_factory=list)
    """core/v1 Toleration: taints that the pods accept, such as those of GPU nodes."""
    affinity: KubernetesObject | None = None
    """core/v1 Affinity."""
    topology_spread_constraints: Annotated[list[KubernetesObject], Field(max_length=16)] = Field(default_factory=list)
    """core/v1 TopologySpreadConstraint."""
    priority_class_name: str | None = None
    """PriorityClass of the pods: who is preempted for whom."""
    service_account_name: str | None = None
    """For cloud identities; its token is not mounted unless the cloud's webhook adds its own."""
    image_pull_secrets: Annotated[list[LocalObjectReference], Field(max_length=16)] = Field(default_factory=list)
    """Secrets with the credentials of a private registry."""
    resource_claims: Annotated[list[KubernetesObject], Field(max_length=16)] = Field(default_factory=list)
    """core/v1 PodResourceClaim: devices by dynamic resource allocation."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the pods, beside Headframe's own."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods."""
    env: Annotated[list[EnvVar], Field(max_length=256)] = Field(default_factory=list)
    """Environment of the worker container, such as HF_TOKEN from a Secret."""
    volumes: Annotated[list[KubernetesObject], Field(max_length=64)] = Field(default_factory=list)
    """core/v1 Volume: storage of the pods; local paths of the spec must lie on one of them."""
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=64)] = Field(default_factory=list)
    """Where the volumes are mounted."""
    cache: KubernetesObject | None = None
    """core/v1 volume source (without a name) for the model hub, compiled kernels and autotuning results; unset is an emptyDir."""
