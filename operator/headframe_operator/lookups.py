"""What is asked for on demand: Events and Kueue's Workload, which most jobs never need."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from headframe_operator.api_server import ApiError, ApiServer
from headframe_operator.reasons import hanging_pods, lacks_pods
from headframe_operator.snapshot import Snapshot
from headframe_operator.views import JobView, WarningView, WorkloadView, warning_view, workload_view

_KUEUE = "kueue.x-k8s.io"
_PODS_ASKED_ABOUT = 2
_PATIENCE = timedelta(seconds=3)
"""Pods that follow each other leave gaps; only one that lasts needs an explanation."""
_FIRST_PAUSE = timedelta(seconds=3)
_LONGEST_PAUSE = timedelta(seconds=60)
_PROMPT_SECONDS = 0.5
"""A namespace with very many Events takes seconds to search. The status does not wait for that: the next look has the answer."""
_FRESH_SECONDS = 1.0
_REST_FACTOR = 2
"""A namespace whose Events took long to list rests for twice as long before they are listed again."""


@dataclass
class _Listing:
    """One reading of a namespace's Warnings."""

    answer: asyncio.Task[dict[str, list[WarningView]]]
    """By the uid of what they are about."""
    started: float
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """How long it took, or takes so far."""
        return (self.ended or time.monotonic()) - self.started

    @property
    def serves(self) -> bool:
        """Whether it answers who asks now."""
        if self.ended is None:
            return not self.answer.done()
        return time.monotonic() - self.ended < max(_FRESH_SECONDS, _REST_FACTOR * self.seconds)


class Warnings:
    """The Warning Events of each namespace, listed once for all ExtractionJobs that wonder at the same time.

    Asking for those of one object costs the API server as much as asking for all: it reads every Event of the namespace.
    """

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._listings: dict[str, _Listing] = {}

    async def about(self, namespace: str, uids: tuple[str, ...]) -> tuple[WarningView, ...]:
        """What is said of these objects."""
        listing = self._listings.get(namespace)
        if listing is None or not listing.serves:
            answer = asyncio.create_task(self._list(namespace), name=f"list the Warnings of {namespace}")
            listing = self._listings[namespace] = _Listing(answer, time.monotonic())
        found = await asyncio.shield(listing.answer)
        return tuple(warning for uid in uids for warning in found.get(uid, ()))

    def are_slow(self, namespace: str) -> bool:
        """Whether an answer takes so long that nobody should wait for it."""
        listing = self._listings.get(namespace)
        return listing is not None and listing.seconds > _PROMPT_SECONDS

    async def _list(self, namespace: str) -> dict[str, list[WarningView]]:
        found: dict[str, list[WarningView]] = {}
        for event in await self._api.list(f"/api/v1/namespaces/{namespace}/events", fieldSelector="type=Warning"):
            found.setdefault(event["involvedObject"].get("uid", ""), []).append(warning_view(event))
        self._listings[namespace].ended = time.monotonic()
        return found


@dataclass
class Inquiry:
    """When to ask for Events about one ExtractionJob, and what they said last.

    No API server keeps Events in memory: each question makes it read those of a namespace from etcd. So a question that
    stays the same is asked less and less often, until nothing is odd for a while.
    """

    missing_since: datetime | None = None
    about: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()
    """What is odd: a large job has other pods that hang at every look."""
    asked_at: datetime | None = None
    pause: timedelta = _FIRST_PAUSE
    found: tuple[WarningView, ...] = ()
    asking: asyncio.Task[tuple[WarningView, ...]] | None = None

    def note(self, lacking: tuple[str, ...], hanging: tuple[str, ...], now: datetime) -> bool:
        """Note the uids of Jobs that lack pods and of pods that hang; returns whether to ask about ``about`` now."""
        self.missing_since = (self.missing_since or now) if lacking else None
        patient = self.missing_since is not None and now - self.missing_since < _PATIENCE
        about = hanging if patient else (*lacking, *hanging)
        kinds = frozenset((*(() if patient else lacking), *(("hanging",) if hanging else ())))
        if not about:
            self.found = ()
            return False
        since = timedelta.max if self.asked_at is None else now - self.asked_at
        if since >= 2 * self.pause or (since >= _FIRST_PAUSE and not kinds <= self.kinds):
            self.pause = _FIRST_PAUSE
        elif since >= self.pause:
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        else:
            return False
        self.about, self.kinds, self.asked_at = about, kinds, now
        return True


async def look_up_warnings(
    warnings: Warnings, snapshot: Snapshot, now: datetime, inquiry: Inquiry
) -> tuple[WarningView, ...]:
    """The Warning Events about Jobs that lack pods and about pods that hang; none are asked for where nothing is odd."""
    lacking = tuple(job.uid for stage, job in snapshot.jobs.items() if lacks_pods(snapshot, stage, now))
    hanging = tuple(
        pod.uid for stage in snapshot.jobs for pod in hanging_pods(snapshot, stage, now)[:_PODS_ASKED_ABOUT]
    )
    namespace = snapshot.extraction.namespace
    if inquiry.note(lacking, hanging, now) and inquiry.asking is None:
        inquiry.asking = asyncio.create_task(warnings.about(namespace, inquiry.about))
    if inquiry.asking is not None:
        await asyncio.wait({inquiry.asking}, timeout=0 if warnings.are_slow(namespace) else _PROMPT_SECONDS)
        if inquiry.asking.done():
            answered, inquiry.asking = inquiry.asking, None
            inquiry.found = answered.result()
    return inquiry.found


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
