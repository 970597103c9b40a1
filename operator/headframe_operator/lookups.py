"""What is asked for on demand: Events and Kueue's Workload, which most jobs never need."""

from __future__ import annotations

import asyncio
from datetime import datetime

from headframe_operator.api_server import ApiError, ApiServer
from headframe_operator.reasons import hanging_pods, needs_warnings
from headframe_operator.snapshot import Snapshot
from headframe_operator.views import JobView, WarningView, WorkloadView, warning_view, workload_view

_KUEUE = "kueue.x-k8s.io"
_PODS_ASKED_ABOUT = 3


async def look_up_warnings(api: ApiServer, snapshot: Snapshot, now: datetime) -> tuple[WarningView, ...]:
    """The Warning Events about Jobs that lack pods and about pods that hang; none are asked for where nothing is odd."""
    namespace = snapshot.extraction.namespace
    uids = [
        uid
        for stage, job in snapshot.jobs.items()
        if needs_warnings(snapshot, stage, now)
        for uid in (job.uid, *(pod.uid for pod in hanging_pods(snapshot, stage, now)[:_PODS_ASKED_ABOUT]))
    ]
    selectors = [f"involvedObject.uid={uid},type=Warning" for uid in uids]
    answers = await asyncio.gather(
        *(api.list(f"/api/v1/namespaces/{namespace}/events", fieldSelector=selector) for selector in selectors)
    )
    return tuple(warning_view(event) for answer in answers for event in answer)


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


def _kueue_decides(snapshot: Snapshot, job: JobView) -> bool:
    wants_suspension = snapshot.extraction.spec is not None and snapshot.extraction.spec.suspend
    return job.queued and job.finished is None and (job.suspended or wants_suspension)
