"""What the operator writes back: the status of an ExtractionJob, after Kubernetes' API conventions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headframe_api.base import ReportModel

Phase = Literal["Pending", "Preparing", "Extracting", "Finalizing", "Succeeded", "Failed", "Suspended"]
ConditionType = Literal["Prepared", "Extracted", "Complete", "Failed", "Suspended", "Progressing"]
TERMINAL_PHASES: tuple[Phase, ...] = ("Succeeded", "Failed")


class Condition(ReportModel):
    """A metav1.Condition: reason is a CamelCase word, message says what a user can do."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    observed_generation: int | None = None
    last_transition_time: str
    """RFC 3339, UTC, whole seconds."""
    reason: str
    message: str = ""


class PlanSummary(ReportModel):
    """What prepare found: known before a GPU is taken."""

    samples: int
    tokens: int
    shards: int
    bytes: int
    """Expected size of all parts."""
    layers: list[int]
    """0-based decoder layers whose output is kept, in stored order; -1 is the embeddings."""
    hidden_size: int
    model_revision: str
    """Commit of a hub model, else a digest of its files."""


class ShardCounts(ReportModel):
    """The extract Job's shards."""

    total: int = 0
    active: int = 0
    succeeded: int = 0
    failed: int = 0
    failed_indexes: str = ""
    """Kubernetes' index list, such as `1,3-5`."""


class ProgressSummary(ReportModel):
    """All shards together, finished and running."""

    samples: int = 0
    tokens: int = 0
    percent: Annotated[float, Field(ge=0, le=100)] = 0.0
    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    estimated_completion_time: str | None = None
    """RFC 3339, UTC."""


class OutputSummary(ReportModel):
    """What was written, once the job is complete."""

    uri: str
    bytes: int
    manifest: str
    """URI of the dataset's manifest.json."""


class ExtractionJobStatus(ReportModel):
    """Observed state; only the operator writes it."""

    phase: Phase | None = None
    observed_generation: int | None = None
    start_time: str | None = None
    completion_time: str | None = None
    message: str | None = None
    conditions: list[Condition] = Field(default_factory=list)
    plan: PlanSummary | None = None
    shards: ShardCounts | None = None
    progress: ProgressSummary | None = None
    quarantined: int | None = None
    """Samples refused by prepare and by extract so far."""
    output: OutputSummary | None = None
