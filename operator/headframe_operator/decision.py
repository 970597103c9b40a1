"""What is to be done about one ExtractionJob: the output of the decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headframe_api.status import ExtractionJobStatus


@dataclass(frozen=True)
class Update:
    """Fields of a Job that may change while it lives; only if it is still that very Job."""

    stage: str
    name: str
    uid: str
    suspend: bool | None = None
    parallelism: int | None = None


@dataclass(frozen=True)
class Deletion:
    """A Job to delete, only if it is still that very one."""

    stage: str
    name: str
    uid: str


@dataclass(frozen=True)
class Note:
    """A Kubernetes Event to post about the ExtractionJob."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """Empty fields mean that nothing is to be done."""

    create: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Job manifests by stage."""
    update: tuple[Update, ...] = ()
    delete: tuple[Deletion, ...] = ()
    workload_active: bool | None = None
    """What spec.active of Kueue's Workload must become."""
    status: ExtractionJobStatus | None = None
    """The whole status as it must be; None leaves it as it is."""
    notes: tuple[Note, ...] = ()
    delete_extraction: bool = False
    requeue_seconds: float | None = None
    """Look again after so long, even if nothing happens."""
