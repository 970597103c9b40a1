"""The status: what users and `kubectl wait` read, after Kubernetes' API conventions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from headframe_api.spec import ExtractionJobSpec
from headframe_api.status import (
    Condition,
    ConditionType,
    ExtractionJobStatus,
    Phase,
    PlanSummary,
    ProgressSummary,
    ShardCounts,
)
from headframe_operator import index_lists
from headframe_operator.deadlines import worker_has_run
from headframe_operator.decision import Note
from headframe_operator.outcomes import Failure, output_of, prepare_quarantined
from headframe_operator.reasons import Obstacle, wanted_pods
from headframe_operator.snapshot import Rates, Snapshot
from headframe_operator.times import to_text
from headframe_operator.totals import done_so_far, finished_shards

_PHASES: dict[str, Phase] = {"prepare": "Preparing", "extract": "Extracting", "finalize": "Finalizing"}
_RUNNING = {
    "prepare": ("Preparing", "reads the dataset and makes the plan"),
    "extract": ("Extracting", "extracts hidden states"),
    "finalize": ("Finalizing", "verifies all shards and writes the manifest"),
}
_USUAL = {"Starting", *(reason for reason, _ in _RUNNING.values())}
_QUEUE_REASONS = ("Queued", "EvictedByKueue")
_STILL = ("NodeLost", "WorkerStalled")
"""Obstacles under which a container counts as running though it does nothing."""
_MESSAGE_LIMIT = 2048


@dataclass(frozen=True)
class Situation:
    """What the decision found out; the status follows from it."""

    snapshot: Snapshot
    spec: ExtractionJobSpec | None
    stage: str
    """The first stage that is not done, or `done`."""
    plan: PlanSummary | None
    suspended: bool = False
    """By spec.suspend."""
    obstacles: tuple[Obstacle, ...] = ()
    ended: Literal["Succeeded", "Failed"] | None = None
    failure: Failure | None = None

    @property
    def queued(self) -> Obstacle | None:
        """What Kueue says while it holds the job back."""
        return next((found for found in self.obstacles if found.reason in _QUEUE_REASONS), None)

    @property
    def running(self) -> int:
        """Pods of the stage whose container runs."""
        return sum(pod.running for pod in self.snapshot.pods_of(self.stage))

    @property
    def pods_missing(self) -> bool:
        """Whether fewer pods run than the stage should have now."""
        return self.stage not in self.snapshot.jobs or self.running < wanted_pods(self.snapshot.jobs[self.stage])


def status_of(s: Situation, now: datetime) -> ExtractionJobStatus:
    """The whole status, as it must be now."""
    x = s.snapshot.extraction
    old, held = x.status, s.suspended
    shards = _shards(s, old.shards)
    message = _message(s)[:_MESSAGE_LIMIT]
    return ExtractionJobStatus(
        phase=_phase(s),
        observed_generation=x.generation,
        start_time=None if held else old.start_time or to_text(now),
        completion_time=to_text(now) if s.ended else None,
        message=message,
        conditions=_conditions(s, shards, message, now),
        plan=s.plan,
        shards=shards,
        progress=_progress(s, old.progress, now),
        quarantined=_quarantined(s, old.quarantined),
        output=output_of(s.snapshot, s.plan) if s.ended == "Succeeded" else None,
    )


def only_progress_differs(old: ExtractionJobStatus, new: ExtractionJobStatus) -> bool:
    """Whether two statuses tell the same story, but for numbers that change all the time."""
    ignored = {"progress", "quarantined"}
    return old.model_dump(exclude=ignored) == new.model_dump(exclude=ignored)


def notes_of(old: ExtractionJobStatus, new: ExtractionJobStatus) -> tuple[Note, ...]:
    """The Kubernetes Events that a change of status deserves."""
    message = new.message or ""
    notes = []
    if new.phase != old.phase and new.phase is not None:
        notes.append(Note("Warning" if new.phase == "Failed" else "Normal", _event_reason(new), _news(new)))
    elif (after := _condition(new, "Progressing")) is not None:
        before = _condition(old, "Progressing")
        # Obstacles that come and go are news; that one pod follows another is not.
        if before is not None and before.reason != after.reason and not {before.reason, after.reason} <= _USUAL:
            notes.append(Note("Normal" if after.reason in _USUAL else "Warning", after.reason, message))
    return tuple(notes)


def _news(status: ExtractionJobStatus) -> str:
    """What a new phase is about. Its message is still that of the first moment, when no pod can be there yet."""
    progressing = _condition(status, "Progressing")
    if progressing is None or progressing.reason not in _USUAL:
        return status.message or ""
    if status.phase == "Extracting" and status.plan is not None:
        plan = status.plan
        return f"the plan has {plan.samples:,} samples with {plan.tokens:,} tokens in {plan.shards:,} shards"
    if status.phase == "Finalizing" and status.shards is not None:
        return f"{status.shards.summary} shards are done; {_RUNNING['finalize'][1]}"
    return status.message or ""


def _event_reason(status: ExtractionJobStatus) -> str:
    failed = _condition(status, "Failed")
    return failed.reason if failed is not None and failed.status == "True" else str(status.phase)


def _phase(s: Situation) -> Phase:
    if s.ended:
        return s.ended
    if s.suspended or s.queued:
        return "Suspended"
    if s.stage == "prepare" and not s.snapshot.jobs.get("prepare") and s.snapshot.extraction.status.phase is None:
        return "Pending"
    if s.stage == "prepare" and not any(
        pod.running or pod.exit_code is not None for pod in s.snapshot.pods_of("prepare")
    ):
        return "Pending"
    return _PHASES[s.stage]


def _message(s: Situation) -> str:
    if s.failure is not None:
        return s.failure.message
    if s.ended:
        return "all states are extracted and verified" + _failed_shards(s)
    if s.suspended:
        return "suspended by spec.suspend; what is done is kept"
    if s.queued:
        return s.queued.message
    if s.running == 0:
        return s.obstacles[0].message if s.obstacles else f"waits for a pod of stage {s.stage}"
    _, doing = _RUNNING[s.stage]
    workers = f"{s.running} {'worker' if s.running == 1 else 'workers'}: {doing}" if s.stage == "extract" else doing
    slow = _slow_path(s)
    notes = [workers, *(found.message for found in s.obstacles[:1]), *([slow] if slow else [])]
    return "; ".join(notes)


def _slow_path(s: Situation) -> str:
    """A hybrid model on its reference path is many times slower than it need be: never let that pass in silence."""
    mixers = sorted({m for poll in s.snapshot.polls.values() if poll.progress for m in poll.progress.slow_path})
    return f"slow reference path for {', '.join(mixers)}: fused kernels are missing in the image" if mixers else ""


def _failed_shards(s: Situation) -> str:
    job = s.snapshot.jobs.get("extract")
    shards = (
        job.failed_indexes if job is not None else (s.snapshot.extraction.status.shards or ShardCounts()).failed_indexes
    )
    return f", but for the failed shards {shards}" if shards else ""


def _conditions(s: Situation, shards: ShardCounts | None, message: str, now: datetime) -> list[Condition]:
    failed_shards = shards is not None and shards.failed > 0
    extracted = s.plan is not None and s.stage in ("finalize", "done")
    succeeded, failed = s.ended == "Succeeded", s.ended == "Failed"
    old = {condition.type: condition for condition in s.snapshot.extraction.status.conditions}
    generation = s.snapshot.extraction.generation

    def condition(kind: ConditionType, holds: bool, reason: str, text: str = "") -> Condition:
        state: Literal["True", "False"] = "True" if holds else "False"
        before = old.get(kind)
        changed = before is None or before.status != state
        return Condition(
            type=kind,
            status=state,
            observed_generation=generation,
            last_transition_time=to_text(now) if changed or before is None else before.last_transition_time,
            reason=reason,
            message=text,
        )

    partly = f"shards {shards.failed_indexes} failed" if shards is not None and failed_shards else ""
    progressing, reason = _progressing(s)
    return [
        condition("Prepared", s.plan is not None, "PlanMade" if s.plan is not None else "NoPlanYet"),
        condition(
            "Extracted",
            extracted,
            ("SomeShardsFailed" if failed_shards else "AllShardsDone") if extracted else "ShardsLeft",
            partly if extracted else "",
        ),
        condition("Complete", succeeded, "Succeeded" if succeeded else "NotComplete", message if succeeded else ""),
        condition("Failed", failed, s.failure.reason if s.failure else "NotFailed", message if failed else ""),
        condition("Suspended", *_suspended(s)),
        condition("Progressing", progressing, reason, message),
    ]


def _suspended(s: Situation) -> tuple[bool, str, str]:
    if s.suspended:
        return True, "SuspendedByUser", "spec.suspend is true"
    if s.queued:
        return True, s.queued.reason, s.queued.message
    return False, "NotSuspended", ""


def _progressing(s: Situation) -> tuple[bool, str]:
    """Whether it goes on, and how; else the reason why not."""
    if s.ended:
        return False, s.ended
    if s.suspended:
        return False, "SuspendedByUser"
    if s.queued:
        return False, s.queued.reason
    first = s.obstacles[0].reason if s.obstacles else None
    if s.running > (1 if first in _STILL else 0):
        return True, first or _RUNNING[s.stage][0]
    return first is None, first or "Starting"


def _shards(s: Situation, old: ShardCounts | None) -> ShardCounts | None:
    if s.plan is None:
        return None
    total, job = s.plan.shards, s.snapshot.jobs.get("extract")
    if job is None:
        return (old or ShardCounts(total=total, summary=f"0/{total}")).model_copy(update={"active": 0})
    succeeded, failed = finished_shards(s.snapshot), index_lists.count(job.failed_indexes)
    return ShardCounts(
        total=total,
        active=0 if job.finished else min(job.active, total - succeeded - failed),
        succeeded=succeeded,
        failed=failed,
        failed_indexes=job.failed_indexes[:_MESSAGE_LIMIT],
        summary=f"{succeeded}/{total}",
    )


def _progress(s: Situation, old: ProgressSummary | None, now: datetime) -> ProgressSummary | None:
    """Sums, rates and the end at this rate. None until a worker has run."""
    if s.plan is None or not worker_has_run(s.snapshot):
        return old
    if s.stage != "extract" or "extract" not in s.snapshot.jobs:
        kept = old or ProgressSummary()
        over = s.stage in ("finalize", "done") and not _failed_shards(s)
        whole = {"samples": s.plan.samples, "tokens": s.plan.tokens, "percent": 100.0} if over else {}
        return kept.model_copy(
            update={**whole, "samples_per_second": 0.0, "tokens_per_second": 0.0, "estimated_completion_time": None}
        )
    done, rates = done_so_far(s.snapshot, s.plan), s.snapshot.rates
    if not s.running and (s.suspended or s.queued or s.obstacles):
        rates = Rates()  # the window still holds the minute before; a gap between two shards stays in it
    left = s.plan.tokens - done.tokens
    end = None
    if rates.tokens_per_second > 0 and left > 0 and s.running:
        end = to_text(now + timedelta(seconds=min(left / rates.tokens_per_second, 10 * 365 * 86_400)))
    return ProgressSummary(
        samples=done.samples,
        tokens=done.tokens,
        percent=round(100 * done.tokens / s.plan.tokens, 1) if s.plan.tokens else 0.0,
        samples_per_second=round(rates.samples_per_second, 1),
        tokens_per_second=round(rates.tokens_per_second, 1),
        estimated_completion_time=end,
    )


def _quarantined(s: Situation, old: int | None) -> int | None:
    """Of prepare and extract together. Never less than what was said before: pods that said so may be gone."""
    if s.plan is None:
        return old
    prepared = prepare_quarantined(s.snapshot)
    if prepared is None:
        return old
    return max(old or 0, prepared + done_so_far(s.snapshot, s.plan).quarantined)


def _condition(status: ExtractionJobStatus, kind: ConditionType) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == kind), None)
