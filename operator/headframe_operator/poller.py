"""Asks running workers for their progress: bounded in number and time, so that a silent one delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime

import aiohttp
from pydantic import ValidationError

from headframe_api.names import HTTP_PORT
from headframe_api.progress import Progress
from headframe_operator.metrics import POLLS
from headframe_operator.settings import Settings
from headframe_operator.snapshot import Poll
from headframe_operator.views import PodView

_LARGEST_ANSWER_BYTES = 64 * 1024


def session_for_workers() -> aiohttp.ClientSession:
    """Each connection is closed after its answer: thousands of workers, asked every few seconds, would keep as many open."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


class Poller:
    """Keeps the last answer of each worker, and of a silent one how long it has been silent."""

    def __init__(self, session: aiohttp.ClientSession, settings: Settings, port: int = HTTP_PORT) -> None:
        self._session = session
        self._port = port
        self._timeout = aiohttp.ClientTimeout(total=settings.poll_timeout_seconds)
        self._slots = asyncio.Semaphore(settings.poll_concurrency)

    async def poll(self, pods: Iterable[PodView], before: dict[str, Poll]) -> dict[str, Poll]:
        """The answers of the running workers among ``pods``, by pod uid, given what they answered before."""
        workers = [pod for pod in pods if pod.stage == "extract" and pod.running and pod.address]
        answers = await asyncio.gather(*(self._ask(pod, before.get(pod.uid)) for pod in workers))
        return {pod.uid: answer for pod, answer in zip(workers, answers, strict=True)}

    async def _ask(self, pod: PodView, before: Poll | None) -> Poll:
        host = f"[{pod.address}]" if ":" in pod.address else pod.address
        async with self._slots:
            try:
                url = f"http://{host}:{self._port}/progress"
                async with self._session.get(url, timeout=self._timeout, allow_redirects=False) as answer:
                    answer.raise_for_status()
                    progress = Progress.model_validate_json(await _whole(answer.content))
            except (TimeoutError, aiohttp.ClientError, ValidationError, OSError) as error:
                POLLS.labels("failed").inc()
                # Since when it is silent, with what it said last: its work is not undone by silence.
                silent_since = before.at if before is not None and before.error else datetime.now(UTC)
                last = before.progress if before is not None else None
                return Poll(at=silent_since, progress=last, error=str(error) or type(error).__name__)
        POLLS.labels("answered").inc()
        return Poll(at=datetime.now(UTC), progress=progress)


async def _whole(content: aiohttp.StreamReader) -> bytes:
    """A body that may come in pieces; cut where it is longer than any worker's."""
    body = bytearray()
    while len(body) < _LARGEST_ANSWER_BYTES and (piece := await content.read(_LARGEST_ANSWER_BYTES - len(body))):
        body += piece
    return bytes(body)
