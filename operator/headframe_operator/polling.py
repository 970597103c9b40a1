"""The clock of the progress: at every beat the workers of every job are asked, each job on its own."""

from __future__ import annotations

import asyncio

from headframe_operator.mirror import Key, Mirror, key_of_extraction
from headframe_operator.reconcile import Reconciler
from headframe_operator.work_queue import WorkQueue


async def poll_forever(mirror: Mirror, reconciler: Reconciler, queue: WorkQueue, interval_seconds: float) -> None:
    """Ask all jobs' workers every so often. A job whose workers are slow to answer is skipped, not waited for."""
    running: dict[Key, asyncio.Task[None]] = {}

    async def ask(key: Key) -> None:
        try:
            if await reconciler.poll(key):
                queue.add(key)
        finally:
            del running[key]

    while True:
        for x in mirror.extractions():
            key = key_of_extraction(x.namespace, x.name)
            if x.status.phase == "Extracting" and key not in running:
                running[key] = asyncio.create_task(ask(key), name=f"poll {x.namespace}/{x.name}")
        await asyncio.sleep(interval_seconds)
