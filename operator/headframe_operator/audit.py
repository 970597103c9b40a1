"""Compares what the watches told with what the API server holds: an operator whose watch is dead must not look alive.

It mends, too, the one thing that a watch which was cut off for long never tells: what was deleted meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from headframe_api.names import GROUP, JOB_LABEL, PLURAL, VERSION
from headframe_operator.api_server import ApiError, ApiServer
from headframe_operator.metrics import WATCH_LAG_SECONDS
from headframe_operator.mirror import Mirror, key_of_extraction
from headframe_operator.settings import Settings
from headframe_operator.work_queue import WorkQueue

_log = logging.getLogger(__name__)
_RECHECK_SECONDS = 5.0


class Audit:
    """Knows whether the watches keep up."""

    def __init__(self, api: ApiServer, mirror: Mirror, queue: WorkQueue, settings: Settings) -> None:
        self._api = api
        self._mirror = mirror
        self._queue = queue
        self._settings = settings
        self._behind: dict[str, tuple[float, int]] = {}
        self._passed_at: float | None = None
        self.objects = 0
        """ExtractionJobs and Jobs that the API server holds."""

    @property
    def dead_watch(self) -> str | None:
        """What a watch should have told long ago; None while all keep up."""
        now, patience = time.monotonic(), self._settings.watch_silence_seconds
        late = [uid for uid, (since, _) in self._behind.items() if now - since > patience]
        return f"the watch has not told of {len(late)} changed objects for {patience:.0f} s" if late else None

    @property
    def passed(self) -> bool:
        """Whether the API server answered lately."""
        return (
            self._passed_at is not None
            and time.monotonic() - self._passed_at < 3 * self._settings.audit_interval_seconds
        )

    async def run(self) -> None:
        """Compare for ever; more often while something is behind, or after no answer."""
        while True:
            interval = self._settings.audit_interval_seconds
            try:
                await self.compare()
            except ApiError as error:
                _log.warning("the API server does not answer the audit: %s", error)
                interval = min(interval, _RECHECK_SECONDS)
            await asyncio.sleep(min(interval, _RECHECK_SECONDS) if self._behind else interval)

    async def compare(self) -> None:
        """Compare once."""
        told_before = self._told()
        held: dict[str, int] = {}
        for path, query in self._collections():
            for item in await self._api.list(path, metadata_only=True, **query):
                held[item["metadata"]["uid"]] = int(item["metadata"]["resourceVersion"])
        for uid in told_before:
            if uid not in held:
                self._mirror.forget(uid)
                _log.info("an object is gone that no watch told of; mended")
                for x in self._mirror.extractions():
                    self._queue.add(key_of_extraction(x.namespace, x.name))
        self._note_lag(held, self._told())
        self._passed_at, self.objects = time.monotonic(), len(held)

    def _note_lag(self, held: Mapping[str, int], told: Mapping[str, int]) -> None:
        now = time.monotonic()
        for uid, (since, version) in list(self._behind.items()):
            if uid not in held or told.get(uid, -1) >= version:
                WATCH_LAG_SECONDS.observe(now - since)
                del self._behind[uid]
        for uid, version in held.items():
            if told.get(uid, -1) < version:
                self._behind.setdefault(uid, (now, version))

    def _told(self) -> dict[str, int]:
        told = {x.uid: x.version for x in self._mirror.extractions()}
        return told | {job.uid: job.version for job in self._mirror.jobs()}

    def _collections(self) -> list[tuple[str, dict[str, str]]]:
        scopes = [f"/namespaces/{name}" for name in self._settings.namespaces] or [""]
        return [
            collection
            for scope in scopes
            for collection in (
                (f"/apis/{GROUP}/{VERSION}{scope}/{PLURAL}", {}),
                (f"/apis/batch/v1{scope}/jobs", {"labelSelector": JOB_LABEL}),
            )
        ]
