"""The pod template that all three stages share: locked down, documented by its labels, fed by one environment variable."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from headframe_api.names import (
    CA_BUNDLE_ENVIRONMENT,
    CA_BUNDLE_PATH,
    CACHE_PATH,
    HTTP_PORT,
    JOB_ENVIRONMENT,
    JOB_LABEL,
    STAGE_LABEL,
    TERMINATION_LOG_ENVIRONMENT,
)
from headframe_api.spec import ExtractionJobSpec
from headframe_operator.child_names import job_label
from headframe_operator.settings import Settings
from headframe_operator.views import ExtractionView
from headframe_operator.worker_defaults import with_worker_defaults

CONTAINER = "worker"
_CA_FOLDER = str(PurePosixPath(CA_BUNDLE_PATH).parent)
_TERMINATION_LOG = "/dev/termination-log"
SPEC_LIMIT_BYTES = 100_000
"""Linux takes at most 128 KiB in one environment variable."""


def pod_template(x: ExtractionView, spec: ExtractionJobSpec, stage: str, settings: Settings) -> dict[str, Any]:
    """The template of a stage's Job: metadata and spec."""
    spec = with_worker_defaults(spec, settings.worker_defaults)
    worker = spec.worker
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.termination_grace_seconds,
        "securityContext": _pod_security(settings),
        "containers": [_container(x, spec, stage, settings)],
        "volumes": [*_own_volumes(spec, stage, settings), *worker.volumes],
    }
    passed_on: dict[str, Any] = {
        "nodeSelector": worker.node_selector,
        "tolerations": worker.tolerations,
        "affinity": worker.affinity,
        "topologySpreadConstraints": worker.topology_spread_constraints,
        "priorityClassName": worker.priority_class_name,
        "serviceAccountName": worker.service_account_name,
        "imagePullSecrets": [secret.to_dict() for secret in worker.image_pull_secrets],
        "resourceClaims": worker.resource_claims if stage == "extract" else None,
    }
    metadata = {"labels": {**worker.labels, **labels(x, stage)}, "annotations": dict(worker.annotations)}
    return {"metadata": metadata, "spec": pod | {key: value for key, value in passed_on.items() if value}}


def labels(x: ExtractionView, stage: str) -> dict[str, str]:
    """The labels of a stage's Job and its pods."""
    return {
        "app.kubernetes.io/name": "headframe",
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/managed-by": "headframe-operator",
        JOB_LABEL: job_label(x.name),
        STAGE_LABEL: stage,
    }


def spec_text(x: ExtractionView) -> str:
    """The ExtractionJob as its pods read it from their environment."""
    return json.dumps(x.document, ensure_ascii=False, separators=(",", ":"))


def _container(x: ExtractionView, spec: ExtractionJobSpec, stage: str, settings: Settings) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": spec.worker.image or settings.worker_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["headframe", stage],
        "env": [
            # The user's come first, for Kubernetes lets the last of two win.
            *(variable.to_dict() for variable in spec.worker.env),
            *({"name": name, "value": value} for name, value in _environment(x, spec).items()),
        ],
        "resources": _resources(spec, stage, settings),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePath": _TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "headframe-tmp", "mountPath": "/tmp"},  # noqa: S108  (the pod's own)
            {"name": "headframe-cache", "mountPath": CACHE_PATH},
            *([{"name": "headframe-shm", "mountPath": "/dev/shm"}] if stage == "extract" else []),  # noqa: S108
            *([{"name": "headframe-s3-ca", "mountPath": _CA_FOLDER, "readOnly": True}] if spec.s3.ca_secret else []),
            *(mount.to_dict() for mount in spec.worker.volume_mounts),
        ],
    }
    if spec.s3.credentials_secret:
        container["envFrom"] = [{"secretRef": {"name": spec.s3.credentials_secret}}]
    if stage == "extract":
        container |= _probes()
    return container


def _probes() -> dict[str, Any]:
    """Only workers serve HTTP. A worker that hangs is restarted; how long it takes to load its model does not matter."""

    def probe(path: str, period_seconds: int, failures: int) -> dict[str, Any]:
        request = {"httpGet": {"path": path, "port": "http"}}
        return {**request, "periodSeconds": period_seconds, "failureThreshold": failures, "timeoutSeconds": 5}

    return {
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "startupProbe": probe("/healthz", 2, 150),
        "livenessProbe": probe("/healthz", 20, 6),
        "readinessProbe": probe("/readyz", 5, 3),
    }


def _environment(x: ExtractionView, spec: ExtractionJobSpec) -> dict[str, str]:
    environment = {
        JOB_ENVIRONMENT: spec_text(x),
        TERMINATION_LOG_ENVIRONMENT: _TERMINATION_LOG,
        "HOME": "/tmp",  # noqa: S108  (the pod's own)
        "XDG_CACHE_HOME": CACHE_PATH,
        "HF_HOME": f"{CACHE_PATH}/huggingface",
        "TRITON_CACHE_DIR": f"{CACHE_PATH}/triton",
    }
    if spec.s3.ca_secret:
        environment[CA_BUNDLE_ENVIRONMENT] = CA_BUNDLE_PATH
    return environment


def _resources(spec: ExtractionJobSpec, stage: str, settings: Settings) -> dict[str, Any]:
    if stage != "extract":
        return dict(settings.cpu_stage_resources)
    resources: dict[str, Any] = dict(spec.worker.resources or {})
    asked = {**resources.get("requests", {}), **resources.get("limits", {})}
    if spec.model.gpus and settings.gpu_resource not in asked and not spec.worker.resource_claims:
        limits = {**resources.get("limits", {}), settings.gpu_resource: str(spec.model.gpus)}
        resources["limits"] = limits
    return resources


def _own_volumes(spec: ExtractionJobSpec, stage: str, settings: Settings) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "headframe-tmp", "emptyDir": {}},
        {"name": "headframe-cache", **(spec.worker.cache or {"emptyDir": {}})},
    ]
    if stage == "extract":
        volumes.append({"name": "headframe-shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}})
    if spec.s3.ca_secret:
        volumes.append({"name": "headframe-s3-ca", "secret": {"secretName": spec.s3.ca_secret}})
    return volumes


def _pod_security(settings: Settings) -> dict[str, Any]:
    user = settings.pod_user_id
    ids = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **ids}
