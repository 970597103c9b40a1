"""The decision: what must become of one ExtractionJob, from what is known about it now.

Pure: no clock, no client, no memory. It reads from top to bottom as the life of an ExtractionJob: refused, ended,
suspended, and the three stages one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from headframe_api.mounts import unmounted_paths
from headframe_api.spec import ExtractionJobSpec
from headframe_api.status import TERMINAL_PHASES, PlanSummary
from headframe_operator.children.cpu_stage import cpu_stage_job
from headframe_operator.children.extract import extract_job, parallelism
from headframe_operator.children.job import spec_digest
from headframe_operator.children.pod import SPEC_LIMIT_BYTES, spec_text
from headframe_operator.deadlines import exceeded_deadline, seconds_to_next_deadline
from headframe_operator.decision import Decision, Deletion, Update
from headframe_operator.outcomes import Failure, plan_of, stage_failure, stage_succeeded
from headframe_operator.reasons import obstacles
from headframe_operator.report import Situation, notes_of, status_of
from headframe_operator.settings import Settings
from headframe_operator.snapshot import STAGES, Snapshot
from headframe_operator.times import from_text, seconds_between
from headframe_operator.views import JobView
from headframe_operator.worker_defaults import with_worker_defaults

_WAIT_FOR_DELETION_SECONDS = 2.0
_LOOK_SOON_SECONDS = 3.0
_LOOK_LATER_SECONDS = 6.0
_YOUNG_SECONDS = 60.0
_RETRY_REFUSED_SECONDS = 15.0
_WAIT_FOR_POD_SECONDS = 1.0


def decide(snapshot: Snapshot, now: datetime, settings: Settings) -> Decision:  # noqa: PLR0911  (one a chapter of life)
    """What is to be done about one ExtractionJob now, and when to look again."""
    x = snapshot.extraction
    if x.deleting:
        return Decision()  # its children have owner references: Kubernetes deletes them
    if x.status.phase in TERMINAL_PHASES:
        return _after_the_end(snapshot, now)
    if x.spec is None:
        return _end(snapshot, Failure("InvalidSpec", x.fault or "the spec cannot be read"), now)
    refused = _refused_spec(snapshot, x.spec, settings)
    if refused is not None:
        return _end(snapshot, refused, now)
    plan, stage, failure = _current_stage(snapshot, x.spec)
    situation = Situation(snapshot=snapshot, spec=x.spec, stage=stage, plan=plan)
    if stage == "done":  # even if a deadline passed before anybody looked
        return _with_status(replace(situation, ended="Succeeded"), Decision(), now)
    if failure is None:
        failure = exceeded_deadline(snapshot, x.spec, now)
    if failure is not None:
        return _end(snapshot, failure, now, situation)
    if x.spec.suspend:
        return _with_status(replace(situation, suspended=True), _suspend(snapshot, stage), now)
    action = _drive(snapshot, x.spec, stage, plan, settings)
    found = obstacles(snapshot, stage, now, settings.gpu_resource)
    return _with_status(replace(situation, obstacles=tuple(found)), action, now)


def _current_stage(snapshot: Snapshot, spec: ExtractionJobSpec) -> tuple[PlanSummary | None, str, Failure | None]:
    """The plan where it is known, the first stage that is not done (or `done`), and why it never will be."""
    status = snapshot.extraction.status
    plan = status.plan or plan_of(snapshot)
    done = {condition.type for condition in status.conditions if condition.status == "True"}
    for stage in STAGES:
        # What the status says is done stays done, even if its Job is deleted.
        if (stage == "prepare" and plan is not None) or (stage == "extract" and "Extracted" in done):
            continue
        failure = stage_failure(snapshot, spec, stage)
        if failure is not None:
            return plan, stage, failure
        if not stage_succeeded(snapshot, spec, stage):
            return plan, stage, None
        if stage == "prepare":
            return None, stage, None  # its Job is complete, but the pod that carries the plan is not seen yet, or gone
    return plan, "done", None


def _drive(
    snapshot: Snapshot, spec: ExtractionJobSpec, stage: str, plan: PlanSummary | None, settings: Settings
) -> Decision:
    """Bring the stage's Job into being, or up to date."""
    job = snapshot.jobs.get(stage)
    if stage in snapshot.taken:
        return Decision(requeue_seconds=_WAIT_FOR_DELETION_SECONDS)
    if job is None:
        manifest = _manifest(snapshot, spec, stage, plan, settings)
        wait = _RETRY_REFUSED_SECONDS if stage in snapshot.refusals else None
        return Decision(create={stage: manifest}, requeue_seconds=wait)
    if job.deleting:
        return Decision(requeue_seconds=_WAIT_FOR_DELETION_SECONDS)
    if job.finished == "Complete":
        return _await_report(snapshot, job)
    if job.spec_digest != spec_digest(spec):
        return Decision(delete=(Deletion(stage, job.name, job.uid),), requeue_seconds=_WAIT_FOR_DELETION_SECONDS)
    return _updated(snapshot, spec, job)


def _updated(snapshot: Snapshot, spec: ExtractionJobSpec, job: JobView) -> Decision:
    """The changes that a live Job needs. What Kueue owns is left to Kueue."""
    wanted = parallelism(spec, job.completions) if job.stage == "extract" else 1
    if not job.queued:
        update = Update(
            job.stage,
            job.name,
            job.uid,
            suspend=False if job.suspended else None,
            parallelism=wanted if job.parallelism != wanted else None,
        )
        changes = update.suspend is not None or update.parallelism is not None
        return Decision(update=(update,)) if changes else Decision()
    reactivate = True if snapshot.workload is not None and not snapshot.workload.active else None
    if job.asked_workers != wanted:
        return Decision(update=(Update(job.stage, job.name, job.uid, parallelism=wanted),), workload_active=reactivate)
    return Decision(workload_active=reactivate)


def _await_report(snapshot: Snapshot, job: JobView) -> Decision:
    """Prepare is complete but its plan is not known. Its pod's last state may be on its way; a lost one is made again."""
    pods = snapshot.pods_of(job.stage)
    if any(pod.phase != "Succeeded" for pod in pods) and not any(pod.phase == "Succeeded" for pod in pods):
        return Decision(requeue_seconds=_WAIT_FOR_POD_SECONDS)
    return Decision(delete=(Deletion(job.stage, job.name, job.uid),), requeue_seconds=_WAIT_FOR_DELETION_SECONDS)


def _suspend(snapshot: Snapshot, stage: str) -> Decision:
    """Stop the stage's pods and keep its Job, which remembers what is done."""
    job = snapshot.jobs.get(stage)
    if job is None or job.finished or job.deleting:
        return Decision()
    if job.queued:
        # Kueue starts what it has admitted, so it must be told; it then suspends the Job itself.
        workload = snapshot.workload
        return Decision(workload_active=False if workload is not None and workload.active else None)
    return Decision() if job.suspended else Decision(update=(Update(stage, job.name, job.uid, suspend=True),))


def _end(snapshot: Snapshot, failure: Failure, now: datetime, situation: Situation | None = None) -> Decision:
    """The ExtractionJob has failed: say why, and stop what runs."""
    situation = situation or Situation(snapshot=snapshot, spec=snapshot.extraction.spec, stage="prepare", plan=None)
    return _with_status(replace(situation, ended="Failed", failure=failure), _stop(snapshot), now)


def _after_the_end(snapshot: Snapshot, now: datetime) -> Decision:
    """A terminal phase is final. What is left: stop what still runs, and the time to live."""
    x = snapshot.extraction
    ttl = x.spec.ttl_seconds_after_finished if x.spec is not None else None
    ended = from_text(x.status.completion_time)
    stop = _stop(snapshot)
    if ttl is None or ended is None:
        return stop
    left = ttl - seconds_between(ended, now)
    return replace(stop, delete_extraction=True) if left <= 0 else replace(stop, requeue_seconds=left)


def _stop(snapshot: Snapshot) -> Decision:
    running = [job for job in snapshot.jobs.values() if not job.finished and not job.deleting]
    return Decision(delete=tuple(Deletion(job.stage, job.name, job.uid) for job in running))


def _with_status(situation: Situation, action: Decision, now: datetime) -> Decision:
    """The action with the status and the notes that go with it, and the time of the next look."""
    status = status_of(situation, now)
    waits = [action.requeue_seconds, seconds_to_next_deadline(situation.snapshot, situation.spec, now)]
    if not situation.ended and not situation.suspended and (situation.obstacles or situation.pods_missing):
        # What keeps pods from starting is told by Events, which are not watched but looked up.
        young = seconds_between(situation.snapshot.extraction.created, now) < _YOUNG_SECONDS
        waits.append(_LOOK_SOON_SECONDS if young else _LOOK_LATER_SECONDS)
    if situation.ended and situation.spec is not None:
        ttl = situation.spec.ttl_seconds_after_finished
        waits = [None if ttl is None else float(ttl)]
    return replace(
        action,
        status=status,
        notes=notes_of(situation.snapshot.extraction.status, status),
        requeue_seconds=min((wait for wait in waits if wait is not None), default=None),
    )


def _refused_spec(snapshot: Snapshot, spec: ExtractionJobSpec, settings: Settings) -> Failure | None:
    """What no API server can check: whether pods can reach the local paths, and whether the spec fits their environment."""
    faults = unmounted_paths(with_worker_defaults(spec, settings.worker_defaults))
    if faults:
        return Failure("LocalPathNotMounted", "; ".join(faults))
    size = len(spec_text(snapshot.extraction).encode())
    if size > SPEC_LIMIT_BYTES:
        return Failure(
            "SpecTooLarge", f"the spec takes {size:,} bytes, at most {SPEC_LIMIT_BYTES:,} fit; shorten chatTemplate"
        )
    return None


def _manifest(
    snapshot: Snapshot, spec: ExtractionJobSpec, stage: str, plan: PlanSummary | None, settings: Settings
) -> Mapping[str, Any]:
    if stage == "extract" and plan is not None:
        return extract_job(snapshot.extraction, spec, plan.shards, settings)
    return cpu_stage_job(snapshot.extraction, spec, stage, settings)
