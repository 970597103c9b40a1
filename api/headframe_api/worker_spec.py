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


class EnvVar(KubernetesModel):
    """One environment variable of the worker container."""

    name: Annotated[str, Field(min_length=1)]
    value: str | None = None
    value_from: KubernetesObject | None = None
    """core/v1 EnvVarSource: where a secret value comes from."""


class VolumeMount(KubernetesModel):
    """Where one of `volumes` is mounted in the worker container."""

    name: Annotated[str, Field(min_length=1)]
    mount_path: Annotated[str, Field(min_length=1)]
    sub_path: str | None = None
    sub_path_expr: str | None = None
    read_only: bool | None = None
    recursive_read_only: str | None = None
    mount_propagation: str | None = None


class WorkerSpec(KubernetesModel):
    """How the pods of all three stages look. On one machine only `env` is used."""

    image: str | None = None
    """Worker image; unset takes the operator's default."""
    resources: KubernetesObject | None = None
    """core/v1 ResourceRequirements of an extract pod; GPUs follow from model.gpus where not given here."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: Annotated[list[KubernetesObject], Field(max_length=64)] = Field(default_factory=list)
    affinity: KubernetesObject | None = None
    topology_spread_constraints: Annotated[list[KubernetesObject], Field(max_length=16)] = Field(default_factory=list)
    priority_class_name: str | None = None
    service_account_name: str | None = None
    """For cloud identities; its token is not mounted unless the cloud's webhook adds its own."""
    image_pull_secrets: Annotated[list[LocalObjectReference], Field(max_length=16)] = Field(default_factory=list)
    resource_claims: Annotated[list[KubernetesObject], Field(max_length=16)] = Field(default_factory=list)
    """core/v1 PodResourceClaim: devices by dynamic resource allocation."""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    env: Annotated[list[EnvVar], Field(max_length=256)] = Field(default_factory=list)
    volumes: Annotated[list[KubernetesObject], Field(max_length=64)] = Field(default_factory=list)
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=64)] = Field(default_factory=list)
    cache: KubernetesObject | None = None
    """core/v1 volume source (without a name) for the model hub, compiled kernels and autotuning results; unset is an emptyDir."""
