"""One look at one ExtractionJob: gather, decide, apply. The same whatever caused it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from headframe_api.status import ExtractionJobStatus
from headframe_operator.api_server import ApiServer
from headframe_operator.apply import Applier
from headframe_operator.decide import decide
from headframe_operator.decision import Decision
from headframe_operator.lookups import Inquiry, Warnings, look_up_warnings, look_up_workload
from headframe_operator.metrics import RECONCILE_ERRORS, RECONCILE_SECONDS
from headframe_operator.mirror import Key, Mirror
from headframe_operator.poller import Poller
from headframe_operator.rates import RateWindow
from headframe_operator.report import only_progress_differs
from headframe_operator.settings import Settings
from headframe_operator.snapshot import Poll, Rates, Refusal, Snapshot
from headframe_operator.totals import done_so_far
from headframe_operator.views import ExtractionView

_COALESCE_WRITES_SECONDS = 1.0
_RETRY_REFUSED_SECONDS = 15.0
_PROGRESS_WRITES_A_SECOND = 20
"""Of all jobs together: with hundreds at work their progress is told less often, so that news does not queue behind it."""


@dataclass
class _Memory:
    """What is remembered of one ExtractionJob between two looks. All of it can be lost without harm."""

    polls: dict[str, Poll] = field(default_factory=dict)
    window: RateWindow = field(default_factory=RateWindow)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    refused_at: float = 0.0
    refused_generation: int = 0
    inquiry: Inquiry = field(default_factory=Inquiry)
    written: ExtractionJobStatus | None = None
    written_version: int = 0
    written_at: float = -_COALESCE_WRITES_SECONDS


class Reconciler:
    """Handles the keys of the work queue."""

    def __init__(self, api: ApiServer, mirror: Mirror, poller: Poller, settings: Settings) -> None:
        self._api = api
        self._mirror = mirror
        self._poller = poller
        self._settings = settings
        self._applier = Applier(api, mirror)
        self._warnings = Warnings(api)
        self._memories: dict[str, _Memory] = {}
        self._uids: dict[Key, str] = {}
        self._at_work: set[str] = set()

    async def reconcile(self, key: Key) -> float | None:
        """Look at one ExtractionJob; returns after how many seconds to look again, if nothing happens before."""
        known = self._mirror.snapshot(key)
        if known is None:
            self._forget(self._uids.pop(key, ""))
            return None
        with RECONCILE_SECONDS.time(), RECONCILE_ERRORS.count_exceptions():
            memory = self._memory(key, known.extraction)
            snapshot = await self._gather(known, memory)
            decision = decide(snapshot, datetime.now(UTC), self._settings)
            decision = await self._apply_children(snapshot, decision, memory)
            return await self._report(snapshot.extraction, decision, memory)

    async def poll(self, key: Key) -> bool:
        """Ask the workers of one ExtractionJob for their progress; returns whether there are any."""
        snapshot = self._mirror.snapshot(key)
        if snapshot is None:
            return False
        memory = self._memory(key, snapshot.extraction)
        before, memory.polls = memory.polls, await self._poller.poll(snapshot.pods_of("extract"), memory.polls)
        plan = snapshot.extraction.status.plan
        if plan is not None:
            memory.window.add(time.monotonic(), done_so_far(replace(snapshot, polls=memory.polls), plan))
        return bool(before or memory.polls)

    def _memory(self, key: Key, x: ExtractionView) -> _Memory:
        if self._uids.get(key) != x.uid:
            self._forget(self._uids.get(key, ""))
            self._uids[key] = x.uid
        return self._memories.setdefault(x.uid, _Memory())

    def _forget(self, uid: str) -> None:
        self._memories.pop(uid, None)
        self._at_work.discard(uid)

    async def _gather(self, known: Snapshot, memory: _Memory) -> Snapshot:
        x = known.extraction
        if memory.written is not None and x.version < memory.written_version:
            x = replace(x, status=memory.written)  # the watch has yet to repeat what we wrote
        if memory.refused_generation != x.generation:
            memory.refusals = {}  # of another spec
        for stage in list(memory.refusals):
            if stage in known.jobs:
                del memory.refusals[stage]
        now = datetime.now(UTC)
        warnings, workload = await asyncio.gather(
            look_up_warnings(self._warnings, known, now, memory.inquiry), look_up_workload(self._api, known)
        )
        return replace(
            known,
            extraction=x,
            warnings=warnings,
            workload=workload,
            polls=memory.polls,
            rates=memory.window.rates() or _reported_rates(memory.polls),
            refusals=dict(memory.refusals),
        )

    async def _apply_children(self, snapshot: Snapshot, decision: Decision, memory: _Memory) -> Decision:
        """Carry out what concerns Jobs. A refusal is news, so the decision is made again with it."""
        if decision.workload_active is not None and snapshot.workload is not None:
            await self._applier.workload(snapshot.workload, decision.workload_active)
        fresh = time.monotonic() - memory.refused_at < _RETRY_REFUSED_SECONDS
        if fresh and memory.refusals.keys() & decision.create.keys():
            decision = replace(decision, create={})
        refusals = await self._applier.children(snapshot.extraction, decision)
        if not refusals:
            return decision
        memory.refusals, memory.refused_at = refusals, time.monotonic()
        memory.refused_generation = snapshot.extraction.generation
        return replace(
            decide(replace(snapshot, refusals=refusals), datetime.now(UTC), self._settings),
            create={},
            update=(),
            delete=(),
        )

    async def _report(self, x: ExtractionView, decision: Decision, memory: _Memory) -> float | None:
        """Write the status where it tells something new, but not too often."""
        if decision.delete_extraction:
            await self._applier.extraction(x)
            return None
        new = decision.status
        if (new or x.status).phase == "Extracting":
            self._at_work.add(x.uid)
        else:
            self._at_work.discard(x.uid)
        if new is None or new == x.status:
            return decision.requeue_seconds
        elapsed = time.monotonic() - memory.written_at
        interval = _COALESCE_WRITES_SECONDS if new.phase == x.status.phase else 0.0
        if only_progress_differs(x.status, new):
            slowest = len(self._at_work) / _PROGRESS_WRITES_A_SECOND
            interval = max(self._settings.status_interval_seconds, slowest)
        if elapsed < interval:
            return min(interval - elapsed, decision.requeue_seconds or interval)
        version = await self._applier.status(x, new)
        if version is not None:
            memory.written, memory.written_version, memory.written_at = new, version, time.monotonic()
            for note in decision.notes:
                await self._applier.note(x, note)
        return decision.requeue_seconds


def _reported_rates(polls: dict[str, Poll]) -> Rates:
    """The workers' own rates, until our window is long enough."""
    answers = [poll.progress for poll in polls.values() if poll.progress is not None and not poll.error]
    return Rates(
        sum(answer.samples_per_second for answer in answers), sum(answer.tokens_per_second for answer in answers)
    )
