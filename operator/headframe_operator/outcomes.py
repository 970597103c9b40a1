"""What a stage came to: by its Job's end, and by what its pods said with their last words."""

from __future__ import annotations

from dataclasses import dataclass

from headframe_api.exit_codes import ExitCode
from headframe_api.progress import TerminationMessage
from headframe_api.spec import ExtractionJobSpec
from headframe_api.status import OutputSummary, PlanSummary
from headframe_operator import index_lists
from headframe_operator.reasons import failure_of
from headframe_operator.snapshot import Snapshot
from headframe_operator.views import JobView, PodView


@dataclass(frozen=True)
class Failure:
    """Why an ExtractionJob cannot succeed."""

    reason: str
    message: str


def stage_succeeded(snapshot: Snapshot, spec: ExtractionJobSpec, stage: str) -> bool:
    """Whether a stage is done: its Job complete, or of the shards no more failed than the spec allows."""
    job = snapshot.jobs.get(stage)
    if job is None or job.finished is None:
        return False
    return job.finished == "Complete" or _partly_done(job, spec)


def stage_failure(snapshot: Snapshot, spec: ExtractionJobSpec, stage: str) -> Failure | None:
    """Why a stage has failed for good, in the words of the pod that failed it where there are any."""
    job = snapshot.jobs.get(stage)
    if job is None or job.finished != "Failed" or _partly_done(job, spec):
        if stage == "prepare" and job is not None and job.finished == "Complete":
            return _no_plan(snapshot)
        return None
    failed = [pod for pod in snapshot.pods_of(stage) if pod.phase == "Failed" and not pod.disruption]
    told = _most_telling(failed)
    if job.finish_reason == "PodFailurePolicy" and told is not None:
        cause = failure_of(told)
        return Failure(cause.reason, cause.message)
    if stage != "extract":
        cause_message = failure_of(told).message if told is not None else job.finish_message
        reason = failure_of(told).reason if told is not None else job.finish_reason
        return Failure(reason or "StageFailed", f"{stage} failed: {cause_message}")
    count, allowed = index_lists.count(job.failed_indexes), spec.failure_policy.max_failed_shards
    last = f"; {failure_of(told).message}" if told is not None else f"; {job.finish_message}"
    return Failure(
        "TooManyFailedShards",
        f"{count} of {job.completions} shards failed ({job.failed_indexes or 'none named'}), "
        f"failurePolicy.maxFailedShards allows {allowed}{last}",
    )


def plan_of(snapshot: Snapshot) -> PlanSummary | None:
    """The plan in the prepare pod's last words."""
    message = _last_words(snapshot, "prepare")
    return None if message is None else message.plan


def prepare_quarantined(snapshot: Snapshot) -> int | None:
    """Samples that prepare refused, where its pod still says so."""
    message = _last_words(snapshot, "prepare")
    return None if message is None else message.quarantined


def output_of(snapshot: Snapshot, plan: PlanSummary | None) -> OutputSummary:
    """What finalize wrote, in its pod's last words; where that pod is gone, what follows from spec and plan."""
    message = _last_words(snapshot, "finalize")
    if message is not None and message.output is not None:
        return message.output
    spec = snapshot.extraction.spec
    uri = "" if spec is None else spec.output.uri
    return OutputSummary(uri=uri, bytes=plan.bytes if plan else 0, manifest=f"{uri.rstrip('/')}/manifest.json")


def _partly_done(job: JobView, spec: ExtractionJobSpec) -> bool:
    """Every shard was tried, and no more failed than allowed: Kubernetes calls that Job Failed, we do not."""
    if job.stage != "extract" or job.finish_reason != "FailedIndexes":
        return False
    failed = index_lists.count(job.failed_indexes)
    return 0 < failed <= spec.failure_policy.max_failed_shards and failed < job.completions


def _last_words(snapshot: Snapshot, stage: str) -> TerminationMessage | None:
    for pod in snapshot.pods_of(stage):
        if pod.phase == "Succeeded" and pod.report is not None and pod.report.details is not None:
            return pod.report.details
    return None


def _no_plan(snapshot: Snapshot) -> Failure | None:
    """Prepare ended well but left no plan: not the image that this operator knows."""
    ended = [pod for pod in snapshot.pods_of("prepare") if pod.phase == "Succeeded"]
    if not ended or plan_of(snapshot) is not None:
        return None
    said = ended[0].report.message if ended[0].report is not None else ""
    return Failure("NoPlan", f"prepare ended without a plan; is the worker image of this version? It said: {said!r}")


def _most_telling(failed: list[PodView]) -> PodView | None:
    """The pod that explains the failure best: a configuration error before a data error before any other; the newest."""
    order = {int(ExitCode.CONFIG): 2, int(ExitCode.DATA): 1}
    return max(failed, key=lambda pod: (order.get(pod.exit_code or 0, 0), pod.created, pod.name), default=None)
