"""What pods tell the operator: /progress while they run, the termination message when they end."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headframe_api.base import ReportModel
from headframe_api.status import OutputSummary, PlanSummary

Stage = Literal["prepare", "extract", "finalize"]
ProgressState = Literal["starting", "loading", "warming", "running", "waiting", "done", "failed"]
TERMINATION_MESSAGE_LIMIT_BYTES = 4096


class Progress(ReportModel):
    """GET /progress of one worker, about the shard (or the stage) it works on now."""

    stage: Stage
    shard: int | None = None
    state: ProgressState = "starting"
    """`waiting`: the pipeline stands still because of something outside, such as an object store that is down."""
    message: str = ""
    """What it waits for, or what is odd, in words."""
    samples: int = 0
    """Done, counting what an earlier run of this shard had committed."""
    samples_total: int = 0
    tokens: int = 0
    tokens_total: int = 0
    bytes: int = 0
    """Written by this process."""
    quarantined: int = 0
    samples_per_second: float = 0.0
    """Over about the last 30 seconds."""
    tokens_per_second: float = 0.0
    seconds_by_stage: dict[str, float] = Field(default_factory=dict)
    out_of_memory_retries: int = 0
    slow_path: list[str] = Field(default_factory=list)
    """Mixers on a slow reference path: worth a warning."""
    stalled: bool = False
    """No batch for longer than the stall limit."""
    updated_at: str = ""
    """RFC 3339, UTC."""


class TerminationMessage(ReportModel):
    """What a stage leaves in /dev/termination-log: at most 4,096 bytes of JSON."""

    stage: Stage
    exit_code: int
    reason: str
    """CamelCase: Completed, or why not."""
    message: str = ""
    shard: int | None = None
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    quarantined: int = 0
    seconds: float = 0.0
    plan: PlanSummary | None = None
    """From prepare."""
    output: OutputSummary | None = None
    """From finalize."""
    slow_path: list[str] = Field(default_factory=list)

    def to_text(self) -> str:
        """JSON of at most TERMINATION_MESSAGE_LIMIT_BYTES: the message is cut, never the structure."""
        text = self.model_dump_json(by_alias=True, exclude_none=True)
        excess = len(text.encode()) - TERMINATION_MESSAGE_LIMIT_BYTES
        if excess <= 0:
            return text
        # A character of the message can take six bytes in JSON; cutting by the excess in characters is always enough.
        kept = max(0, len(self.message) - excess - 3)
        return self.model_copy(update={"message": self.message[:kept] + "..."}).to_text()
