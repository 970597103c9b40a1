"""What the operator is told by its environment; docs/operator.md lists the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from headframe_api.errors import ConfigError
from headframe_api.worker_spec import WorkerSpec

_PREFIX = "HEADFRAME_OPERATOR_"


class Settings(BaseModel):
    """One environment variable a field: HEADFRAME_OPERATOR_ and the field's name in capitals."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    worker_image: str = "ghcr.io/headframe/headframe-worker:0.1.0"
    """Image of the stages where spec.worker.image is unset."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """How the worker image is pulled."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve, separated by commas; empty serves the whole cluster."""
    worker_defaults: WorkerSpec = Field(default_factory=WorkerSpec)
    """What spec.worker says where it says nothing itself, as JSON."""
    gpu_resource: str = "nvidia.com/gpu"
    """The extended resource that model.gpus asks for."""
    cpu_stage_resources: dict[str, Any] = Field(
        default_factory=lambda: {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "16Gi"}}
    )
    """core/v1 ResourceRequirements of the prepare and finalize pods, as JSON."""
    pod_user_id: Annotated[int, Field(ge=1)] | None = 10001
    """User, group and volume group of the pods; empty leaves them to the image and the namespace."""
    termination_grace_seconds: Annotated[int, Field(ge=1)] = 60
    """How long a worker may take to finish or abandon its part after SIGTERM."""
    shared_memory: str = "2Gi"
    """Size limit of /dev/shm in an extract pod; it counts as the pod's memory."""
    poll_interval_seconds: Annotated[float, Field(gt=0)] = 5.0
    """How often the running workers of a job are asked for their progress."""
    poll_timeout_seconds: Annotated[float, Field(gt=0)] = 2.0
    """How long one worker may take to answer."""
    poll_concurrency: Annotated[int, Field(ge=1)] = 64
    """Workers asked at the same time, over all jobs."""
    status_interval_seconds: Annotated[float, Field(ge=0)] = 5.0
    """Shortest time between two writes of a job's status that differ in progress alone."""
    reconcile_concurrency: Annotated[int, Field(ge=1)] = 16
    """Jobs worked on at the same time."""
    audit_interval_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How often what the watches said is compared with what the API server holds."""
    watch_silence_seconds: Annotated[float, Field(gt=0)] = 45.0
    """A watch that tells nothing for so long is opened anew; where one lags so far behind all the same, /healthz fails."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """Where the operator serves /metrics, /healthz and /readyz."""
    log_format: Literal["json", "text"] = "text"
    """json: one object a line; every line about a job names it."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """What is logged."""


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings in the environment. Raises ConfigError that names every variable at fault."""
    given: dict[str, Any] = {}
    known = {f"{_PREFIX}{name.upper()}": name for name in Settings.model_fields}
    faults = [f"{key}: unknown setting" for key in environment if key.startswith(_PREFIX) and key not in known]
    for variable, name in known.items():
        if variable in environment:
            given[name] = _value(name, environment[variable])
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path = ".".join(str(part) for part in detail["loc"][1:])
            where = f"{_PREFIX}{str(detail['loc'][0]).upper()}"
            faults.append(f"{where}{f' ({path})' if path else ''}: {detail['msg']}, not {detail['input']!r}")
    if faults:
        raise ConfigError("\n".join(["the operator's environment:", *(f"  {fault}" for fault in faults)]))
    return settings


def _value(name: str, text: str) -> Any:
    if name == "namespaces":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name in ("cpu_stage_resources", "worker_defaults"):
        try:
            return from_json(text)
        except ValueError:
            return text  # the validation says what is wrong
    if name == "pod_user_id" and not text:
        return None
    return text
