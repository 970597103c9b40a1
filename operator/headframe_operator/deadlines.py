"""Time limits of an ExtractionJob, counted from its start or its last resumption."""

from __future__ import annotations

from datetime import datetime

from headframe_api.spec import ExtractionJobSpec
from headframe_operator.outcomes import Failure
from headframe_operator.snapshot import Snapshot
from headframe_operator.times import from_text, seconds_between


def exceeded_deadline(snapshot: Snapshot, spec: ExtractionJobSpec, now: datetime) -> Failure | None:
    """The deadline that has passed, as the failure it is. A suspended job has no deadlines."""
    for field, limit in _deadlines(snapshot, spec):
        elapsed = _elapsed(snapshot, now)
        if elapsed is not None and elapsed >= limit:
            if field == "activeDeadlineSeconds":
                return Failure("DeadlineExceeded", f"not done {limit} s after its start (activeDeadlineSeconds)")
            return Failure(
                "PendingDeadlineExceeded",
                f"no worker ran in {limit} s (pendingDeadlineSeconds); the last obstacle: "
                f"{snapshot.extraction.status.message or 'none was seen'}",
            )
    return None


def seconds_to_next_deadline(snapshot: Snapshot, spec: ExtractionJobSpec | None, now: datetime) -> float | None:
    """How long until a deadline passes; None without one."""
    if spec is None:
        return None
    elapsed = _elapsed(snapshot, now) or 0.0
    return min((max(0.0, limit - elapsed) for _, limit in _deadlines(snapshot, spec)), default=None)


def worker_has_run(snapshot: Snapshot) -> bool:
    """Whether a worker runs or has ever run: then the pending deadline is met, and stays so."""
    job = snapshot.jobs.get("extract")
    counted = job is not None and (job.ready > 0 or job.succeeded > 0 or bool(job.failed_indexes))
    started = any(pod.running or pod.exit_code is not None for pod in snapshot.pods_of("extract"))
    return snapshot.extraction.status.progress is not None or counted or started


def _deadlines(snapshot: Snapshot, spec: ExtractionJobSpec) -> list[tuple[str, int]]:
    if spec.suspend:
        return []
    limits = [("activeDeadlineSeconds", spec.active_deadline_seconds)]
    if not worker_has_run(snapshot):
        limits.append(("pendingDeadlineSeconds", spec.pending_deadline_seconds))
    return [(field, limit) for field, limit in limits if limit is not None]


def _elapsed(snapshot: Snapshot, now: datetime) -> float | None:
    started = from_text(snapshot.extraction.status.start_time)
    return None if started is None else seconds_between(started, now)
