"""Which ExtractionJobs to look at, and when: each at most once at a time, however often it is asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from headframe_operator.mirror import Key

_log = logging.getLogger(__name__)
_COALESCE_SECONDS = 0.05
"""Events come in bursts; one look answers them all."""
_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 15.0
_SOONEST_RETRY_SECONDS = 5.0
"""Events bring a key that fails back earlier, but not so often that a failing API server drowns in them."""


class WorkQueue:
    """Calls ``handle(key)`` for every key that was added, soon; it returns after how many seconds to come again, or None.

    A key that is added while it is handled is handled again. A failure is tried again, later every time. Between two
    looks at the same key lie at least ``rest_seconds(key)``.
    """

    def __init__(
        self,
        handle: Callable[[Key], Awaitable[float | None]],
        concurrency: int,
        rest_seconds: Callable[[Key], float] = lambda _: 0.0,
    ) -> None:
        self._handle = handle
        self._rest_seconds = rest_seconds
        self._slots = asyncio.Semaphore(concurrency)
        self._due: dict[Key, asyncio.TimerHandle] = {}
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}

    def add(self, key: Key, after_seconds: float = _COALESCE_SECONDS) -> None:
        """Look at a key after so long, or earlier where that is planned already."""
        if key in self._running and after_seconds <= _COALESCE_SECONDS:
            self._again.add(key)
            return
        if key in self._failures:
            after_seconds = max(after_seconds, min(self._backoff_seconds(key), _SOONEST_RETRY_SECONDS))
        after_seconds = max(after_seconds, self._rest_seconds(key))
        loop = asyncio.get_running_loop()
        planned = self._due.get(key)
        if planned is not None:
            if planned.when() <= loop.time() + after_seconds:
                return
            planned.cancel()
        self._due[key] = loop.call_later(after_seconds, self._start, key)

    async def stop(self) -> None:
        """Start nothing more, and wait for what runs."""
        for planned in self._due.values():
            planned.cancel()
        self._due.clear()
        self._again.clear()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _start(self, key: Key) -> None:
        self._due.pop(key, None)
        if key in self._running:
            self._again.add(key)
        else:
            self._running[key] = asyncio.create_task(self._run(key), name=f"reconcile {key[0]}/{key[1]}")

    def _backoff_seconds(self, key: Key) -> float:
        return float(min(_FIRST_RETRY_SECONDS * 2 ** (self._failures[key] - 1), _LONGEST_RETRY_SECONDS))

    async def _run(self, key: Key) -> None:
        after: float | None = None
        try:
            async with self._slots:
                after = await self._handle(key)
            self._failures.pop(key, None)
        except Exception as error:  # noqa: BLE001  (the queue must outlive every failure of one key)
            self._failures[key] = self._failures.get(key, 0) + 1
            after = max(self._backoff_seconds(key), getattr(error, "retry_after_seconds", None) or 0.0)
            extra = {"namespace": key[0], "job": key[1]}
            _log.warning("tried again in %.1f s: %s", after, error, extra=extra, exc_info=not hasattr(error, "status"))
        finally:
            del self._running[key]
            if after is not None:
                self.add(key, after)
            if key in self._again:
                self._again.discard(key)
                self.add(key)
