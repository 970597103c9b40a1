"""What is asked for on demand: Events and Kueue's Workload, which most jobs never need."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta

from headframe_operator.api_server import ApiError, ApiServer
from headframe_operator.reasons import hanging_pods, lacks_pods
from headframe_operator.snapshot import Snapshot
from headframe_operator.views import JobView, WarningView, WorkloadView, warning_view, workload_view

_KUEUE = "kueue.x-k8s.io"
_PODS_ASKED_ABOUT = 3
_PATIENCE = timedelta(seconds=3)
"""Pods that follow each other leave gaps; only one that lasts needs an explanation."""
_ASK_AGAIN = timedelta(seconds=3)
"""No API server keeps Events in memory: each question makes it read a namespace's Events from etcd."""


@dataclass
class WarningMemory:
    """What the Events said last about one ExtractionJob, and since when its pods are missing."""

    missing_since: datetime | None = None
    asked_at: datetime | None = None
    asked_about: tuple[str, ...] = ()
    found: tuple[WarningView, ...] = ()


async def look_up_warnings(
    api: ApiServer, snapshot: Snapshot, now: datetime, memory: WarningMemory
) -> tuple[WarningView, ...]:
    """The Warning Events about Jobs that lack pods and about pods that hang; none are asked for where nothing is odd."""
    lacking = [job.uid for stage, job in snapshot.jobs.items() if lacks_pods(snapshot, stage, now)]
    memory.missing_since = (memory.missing_since or now) if lacking else None
    if memory.missing_since is not None and now - memory.missing_since < _PATIENCE:
        lacking = []
    hanging = [pod.uid for stage in snapshot.jobs for pod in hanging_pods(snapshot, stage, now)[:_PODS_ASKED_ABOUT]]
    about = (*lacking, *hanging)
    if memory.asked_at is None or now - memory.asked_at >= _ASK_AGAIN or memory.asked_about != about:
        memory.found = await _warnings_about(api, snapshot.extraction.namespace, about)
        memory.asked_at, memory.asked_about = now, about
    return memory.found


async def look_up_workload(api: ApiServer, snapshot: Snapshot) -> WorkloadView | None:
    """Kueue's Workload of the extract Job, where Kueue holds the Job back or must be told to."""
    job = snapshot.jobs.get("extract")
    if job is None or not _kueue_decides(snapshot, job):
        return None
    try:
        version = await api.preferred_version(_KUEUE)
        path = f"/apis/{_KUEUE}/{version}/namespaces/{job.namespace}/workloads"
        found = await api.list(path, labelSelector=f"kueue.x-k8s.io/job-uid={job.uid}")
    except ApiError as error:
        if error.status == 404:
            return None  # Kueue is not installed: the Job waits in a queue that nobody serves
        raise
    return workload_view(found[0], path) if found else None


async def _warnings_about(api: ApiServer, namespace: str, uids: tuple[str, ...]) -> tuple[WarningView, ...]:
    selectors = [f"involvedObject.uid={uid},type=Warning" for uid in uids]
    answers = await asyncio.gather(
        *(api.list(f"/api/v1/namespaces/{namespace}/events", fieldSelector=selector) for selector in selectors)
    )
    return tuple(warning_view(event) for answer in answers for event in answer)


def _kueue_decides(snapshot: Snapshot, job: JobView) -> bool:
    wants_suspension = snapshot.extraction.spec is not None and snapshot.extraction.spec.suspend
    return job.queued and job.finished is None and (job.suspended or wants_suspension)
