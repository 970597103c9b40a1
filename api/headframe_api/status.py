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
    """Which aspect it speaks of."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: int | None = None
    """Generation of the spec it was decided on."""
    last_transition_time: str
    """RFC 3339, UTC, whole seconds."""
    reason: str
    """A CamelCase word for machines."""
    message: str = ""
    """What a user can act on."""


class PlanSummary(ReportModel):
    """What prepare found: known before a GPU is taken."""

    samples: int
    """Samples to extract."""
    tokens: int
    """Their tokens."""
    shards: int
    """Units of work."""
    bytes: int
    """Expected size of all parts."""
    layers: list[int]
    """0-based decoder layers whose output is kept, in stored order; -1 is the embeddings."""
    hidden_size: int
    """H, the width of one state."""
    model_revision: str
    """Commit of a hub model, else a digest of its files."""


class ShardCounts(ReportModel):
    """The extract Job's shards."""

    total: int = 0
    """All shards of the plan."""
    active: int = 0
    """Shards that a pod works on or waits for a node with."""
    succeeded: int = 0
    """Shards whose states are complete."""
    failed: int = 0
    """Shards that were given up."""
    failed_indexes: str = ""
    """Kubernetes' index list, such as `1,3-5`."""
    summary: str = ""
    """Finished and all, such as `3/8`, for a table."""


class ProgressSummary(ReportModel):
    """All shards together, finished and running."""

    samples: int = 0
    """Samples done."""
    tokens: int = 0
    """Tokens done."""
    percent: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Tokens done, of all."""
    samples_per_second: float = 0.0
    """Samples per second of all workers together."""
    tokens_per_second: float = 0.0
    """Tokens per second of all workers together."""
    estimated_completion_time: str | None = None
    """RFC 3339, UTC."""


class OutputSummary(ReportModel):
    """What was written, once the job is complete."""

    uri: str
    """URI of the dataset."""
    bytes: int
    """Size of all parts."""
    manifest: str
    """URI of the dataset's manifest.json."""


class ExtractionJobStatus(ReportModel):
    """Observed state; only the operator writes it."""

    phase: Phase | None = None
    """Where the job stands; Succeeded and Failed are final."""
    observed_generation: int | None = None
    """Generation of the spec that this status answers."""
    start_time: str | None = None
    """RFC 3339, UTC: when the operator took the job up, or took it up again after a suspension."""
    completion_time: str | None = None
    """RFC 3339, UTC: when the job became Succeeded or Failed."""
    message: str | None = None
    """What happens now, or what stands in the way, in one sentence."""
    conditions: list[Condition] = Field(default_factory=list)
    """Prepared, Extracted, Complete, Failed, Suspended and Progressing."""
    plan: PlanSummary | None = None
    """What prepare found."""
    shards: ShardCounts | None = None
    """How the shards stand."""
    progress: ProgressSummary | None = None
    """How far all workers together are."""
    quarantined: int | None = None
    """Samples refused by prepare and by extract so far."""
    output: OutputSummary | None = None
    """What was written."""
