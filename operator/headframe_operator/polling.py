"""The clock of the progress: at every beat the workers of every job are asked, each job on its own."""

from __future__ import annotations

import asyncio

from headframe_operator.mirror import Key, Mirror, key_of_extraction
from headframe_operator.reconcile import Reconciler
from headframe_operator.work_queue import WorkQueue

_WORKERS_A_SECOND = 200
"""What asking costs is bounded: with thousands of workers the beat slows down."""


async def poll_forever(mirror: Mirror, reconciler: Reconciler, queue: WorkQueue, interval_seconds: float) -> None:
    """Ask all jobs' workers every so often, or more seldom where there are very many. A job whose workers are slow to
    answer is skipped, not waited for."""
    running: dict[Key, asyncio.Task[None]] = {}

    async def ask(key: Key) -> None:
        try:
            if await reconciler.poll(key):
                queue.add(key)
        finally:
            del running[key]

    while True:
        workers = 0
        for x in mirror.extractions():
            key = key_of_extraction(x.namespace, x.name)
            if x.status.phase == "Extracting" and key not in running:
                running[key] = asyncio.create_task(ask(key), name=f"poll {x.namespace}/{x.name}")
                workers += x.status.shards.active if x.status.shards is not None else 0
        await asyncio.sleep(max(interval_seconds, workers / _WORKERS_A_SECOND))
