"""Why nothing runs, or not as much as asked for: one small function a cause, each in words that a user can act on.

Every function looks at the current stage's Job and pods and returns an Obstacle or None. Nothing is remembered: an
obstacle that has passed is not found again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from headframe_operator import index_lists
from headframe_operator.snapshot import Snapshot
from headframe_operator.views import JobView, PodView, WarningView

_IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
_STARTING = {"", "ContainerCreating", "PodInitializing"}
_MOUNT_REASONS = {"FailedMount", "FailedAttachVolume", "FailedMapVolume"}
_LONG_AFTER_DELETION = timedelta(seconds=15)
_LONG_IN_CREATION = timedelta(seconds=3)
_LONG_SILENCE = timedelta(seconds=30)
_REFUSALS = (
    (re.compile(r"exceeded quota|must specify .* for:|failed quota"), "QuotaExceeded"),
    (re.compile(r"violates PodSecurity"), "PodSecurityRefused"),
    (re.compile(r"(maximum|minimum|max|min|limit to request) .*(usage|ratio).* per|LimitRanger"), "LimitRangeExceeded"),
    (re.compile(r"[sS]ervice ?account"), "ServiceAccountMissing"),
    (re.compile(r"PriorityClass"), "PriorityClassMissing"),
    (re.compile(r"[iI]nvalid|Required value|unknown field"), "InvalidPodTemplate"),
)


@dataclass(frozen=True)
class Obstacle:
    """What stands in the way: a CamelCase reason and a sentence."""

    reason: str
    message: str


@dataclass(frozen=True)
class Stage:
    """What the causes look at: one stage of one ExtractionJob, now."""

    snapshot: Snapshot
    name: str
    now: datetime
    gpu_resource: str

    @property
    def job(self) -> JobView | None:
        """The stage's Job."""
        return self.snapshot.jobs.get(self.name)

    @cached_property
    def live(self) -> tuple[PodView, ...]:
        """Pods that have not ended."""
        return tuple(pod for pod in self.snapshot.pods_of(self.name) if pod.phase not in ("Succeeded", "Failed"))

    @property
    def wanted(self) -> int:
        """Pods that the Job should have now."""
        return 0 if self.job is None else wanted_pods(self.job)

    def warnings(self, uid: str, reasons: set[str]) -> list[WarningView]:
        """Warnings about one object, the newest first."""
        found = [w for w in self.snapshot.warnings if w.about_uid == uid and w.reason in reasons]
        return sorted(found, key=lambda warning: warning.seen, reverse=True)


def wanted_pods(job: JobView) -> int:
    """Pods that a Job should have now."""
    if job.suspended or job.finished or job.deleting:
        return 0
    left = job.completions - job.succeeded - index_lists.count(job.failed_indexes)
    return min(job.parallelism, max(left, 0))


def obstacles(snapshot: Snapshot, stage: str, now: datetime, gpu_resource: str) -> list[Obstacle]:
    """Everything that stands in the way of a stage, the most telling first."""
    context = Stage(snapshot, stage, now, gpu_resource)
    return [found for cause in _CAUSES if (found := cause(context)) is not None]


def lacks_pods(snapshot: Snapshot, stage: str, now: datetime) -> bool:
    """Whether a stage has fewer pods than it should have now."""
    context = Stage(snapshot, stage, now, "")
    return len(context.live) < context.wanted


def hanging_pods(snapshot: Snapshot, stage: str, now: datetime) -> list[PodView]:
    """Pods of a stage that have a node but no container for longer than one takes to start."""
    return [pod for pod in Stage(snapshot, stage, now, "").live if _hangs(pod, now)]


def _refused(stage: Stage) -> Obstacle | None:
    """The API server refuses the Job itself."""
    refusal = stage.snapshot.refusals.get(stage.name)
    if refusal is None:
        return None
    return Obstacle(_classified(refusal.message, refusal.reason), f"the {stage.name} Job is refused: {refusal.message}")


def _name_taken(stage: Stage) -> Obstacle | None:
    """A Job of our name belongs to something else, mostly an ExtractionJob of the same name that is still going away."""
    taken = stage.snapshot.taken.get(stage.name)
    return None if taken is None else Obstacle("NameTaken", taken)


def _queued(stage: Stage) -> Obstacle | None:
    """Kueue holds the Job back."""
    job, workload = stage.job, stage.snapshot.workload
    if job is None or not job.queued or not job.suspended or job.finished:
        return None
    if workload is None:
        return Obstacle("Queued", "waits for Kueue; is there a LocalQueue of that name in this namespace?")
    if workload.evicted:
        return Obstacle("EvictedByKueue", f"Kueue took the quota back ({workload.evicted}); {workload.message}")
    return Obstacle("Queued", f"waits in Kueue's queue: {workload.message or 'no answer yet'}")


def _pods_not_created(stage: Stage) -> Obstacle | None:
    """Kubernetes cannot make the pods: quota, limits, admission, a missing ServiceAccount."""
    job = stage.job
    if job is None or len(stage.live) >= stage.wanted:
        return None
    found = stage.warnings(job.uid, {"FailedCreate"})
    made_since = any(pod.created > found[0].seen for pod in stage.snapshot.pods_of(stage.name)) if found else False
    if not found or made_since:
        return None
    return Obstacle(_classified(found[0].message, "PodCreationFailed"), f"pods cannot be made: {found[0].message}")


def _unschedulable(stage: Stage) -> Obstacle | None:
    """The scheduler finds no node; its own words say why."""
    waiting = [pod for pod in stage.live if pod.unschedulable and not pod.node]
    if not waiting:
        return None
    words = waiting[0].unschedulable
    share = f"{len(waiting)} of {stage.wanted or len(stage.live)} pods wait for a node: {words}"
    if f"Insufficient {stage.gpu_resource}" in words:
        return Obstacle("InsufficientGPUs", share)
    if "persistentvolumeclaim" in words.lower():
        return Obstacle("VolumeClaimNotReady", share)
    return Obstacle("Unschedulable", share)


def _image(stage: Stage) -> Obstacle | None:
    """The image cannot be had."""
    pod = next((pod for pod in stage.live if pod.waiting_reason in _IMAGE_REASONS), None)
    if pod is None:
        return None
    return Obstacle("ImagePullFailed", f"{pod.waiting_reason}: {pod.waiting_message or 'the image cannot be pulled'}")


def _container_configuration(stage: Stage) -> Obstacle | None:
    """The container cannot be made: mostly a Secret or ConfigMap that is not there."""
    pod = next((pod for pod in stage.live if pod.waiting_reason.startswith(("Create", "RunContainer"))), None)
    if pod is None:
        return None
    missing = re.search(r"(secret|configmap) \"[^\"]+\" not found|couldn't find key", pod.waiting_message)
    reason = "SecretOrConfigMapMissing" if missing else "ContainerCannotStart"
    return Obstacle(reason, f"{pod.waiting_reason}: {pod.waiting_message}")


def _mount(stage: Stage) -> Obstacle | None:
    """A volume cannot be mounted: a missing Secret, ConfigMap or PersistentVolumeClaim, or storage that fails."""
    for pod in stage.live:
        if _hangs(pod, stage.now):
            found = stage.warnings(pod.uid, _MOUNT_REASONS | {"FailedCreatePodSandBox"})
            if found:
                reason = "VolumeMountFailed" if found[0].reason in _MOUNT_REASONS else "ContainerCannotStart"
                return Obstacle(reason, f"{pod.name}: {found[0].message}")
    return None


def _node_lost(stage: Stage) -> Obstacle | None:
    """A node does not answer, and podReplacementPolicy Failed keeps its shards from running elsewhere until it does."""
    for pod in stage.live:
        # The kubelet reports both together; only the node controller takes Ready away from a pod alone.
        silent = pod.running and pod.container_ready and not pod.ready
        overdue = pod.deletion_due is not None and stage.now - pod.deletion_due > _LONG_AFTER_DELETION
        if pod.node and (silent or overdue):
            what = "its pod cannot end" if overdue else "its pod's state is unknown"
            shard = "" if pod.index is None else f" shard {pod.index} waits for it;"
            return Obstacle(
                "NodeLost",
                f"node {pod.node} does not answer and {what};{shard} bring the node back, delete the Node object, or "
                f"force-delete pod {pod.name}",
            )
    return None


def _workers_silent(stage: Stage) -> Obstacle | None:
    """A worker is stalled, waits for something outside, or does not answer."""
    for pod in stage.live:
        poll = stage.snapshot.polls.get(pod.uid)
        where = pod.name if pod.index is None else f"the worker of shard {pod.index}"
        if poll is None or not pod.running:
            continue
        if poll.progress is not None and poll.progress.stalled:
            return Obstacle(
                "WorkerStalled", f"{where} makes no progress: {poll.progress.message or 'no batch for long'}"
            )
        if poll.progress is not None and poll.progress.state == "waiting":
            return Obstacle("WorkerWaiting", f"{where} waits: {poll.progress.message}")
        served = (
            pod.container_ready or poll.progress is not None
        )  # else it still starts, which its startup probe bounds
        if poll.error and served and stage.now - poll.at > _LONG_SILENCE:
            return Obstacle("WorkerUnreachable", f"{where} does not answer on port 8080: {poll.error}")
    return None


def _failing(stage: Stage) -> Obstacle | None:
    """Pods fail and are tried again: the newest failure, while its shard is not done."""
    job = stage.job
    failed = [pod for pod in stage.snapshot.pods_of(stage.name) if pod.phase == "Failed" and not pod.disruption]
    if job is None or job.finished or not failed:
        return None
    open_ones = [
        pod for pod in failed if pod.index is None or not index_lists.contains(job.completed_indexes, pod.index)
    ]
    if not open_ones:
        return None
    return failure_of(max(open_ones, key=lambda pod: (pod.created, pod.name)))


def _no_workers(stage: Stage) -> Obstacle | None:
    """Nobody asked for workers."""
    job = stage.job
    if job is None or job.parallelism > 0 or job.finished:
        return None
    return Obstacle("NoWorkers", "spec.workers is 0; scale the ExtractionJob up to go on")


_CAUSES: tuple[Callable[[Stage], Obstacle | None], ...] = (
    _refused,
    _name_taken,
    _queued,
    _pods_not_created,
    _unschedulable,
    _image,
    _container_configuration,
    _mount,
    _node_lost,
    _workers_silent,
    _failing,
    _no_workers,
)


def failure_of(pod: PodView) -> Obstacle:
    """What a failed pod died of, by its own message where it left one."""
    where = f"pod {pod.name}" if pod.index is None else f"shard {pod.index}"
    if pod.terminated_reason == "OOMKilled":
        return Obstacle(
            "OOMKilled", f"{where} was killed for using more memory than its limit; raise it in spec.worker.resources"
        )
    said = (pod.report.message if pod.report is not None else pod.failure) or "it left no message"
    said = " ".join(said.split())  # conditions and Events are read in one line
    if pod.report is not None and pod.report.reason:
        return Obstacle(pod.report.reason, f"{where}: {said}")
    code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
    return Obstacle("PodFailed", f"{where} failed{code}: {said}")


def _hangs(pod: PodView, now: datetime) -> bool:
    starting = pod.phase == "Pending" and pod.waiting_reason in _STARTING and bool(pod.node)
    return starting and now - pod.created > _LONG_IN_CREATION


def _classified(message: str, otherwise: str) -> str:
    return next((reason for pattern, reason in _REFUSALS if pattern.search(message)), otherwise)
