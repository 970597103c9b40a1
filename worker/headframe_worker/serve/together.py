"""The progress of several workers on one machine as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headframe_api.progress import Progress, ProgressState

_MOST_TELLING: tuple[ProgressState, ...] = ("failed", "waiting", "running", "warming", "loading", "starting", "done")


def together(workers: Sequence[Progress]) -> Progress:
    """Sums of the counts and rates; of the states the most telling one. One worker's progress is left as it is."""
    if len(workers) == 1:
        return workers[0]
    state = next((state for state in _MOST_TELLING if any(worker.state == state for worker in workers)), "starting")
    seconds: Counter[str] = Counter()
    for worker in workers:
        seconds.update(worker.seconds_by_stage)
    return Progress(
        stage=workers[0].stage if workers else "extract",
        state=state,
        message=next((worker.message for worker in workers if worker.state == state and worker.message), ""),
        samples=sum(worker.samples for worker in workers),
        samples_total=sum(worker.samples_total for worker in workers),
        tokens=sum(worker.tokens for worker in workers),
        tokens_total=sum(worker.tokens_total for worker in workers),
        bytes=sum(worker.bytes for worker in workers),
        quarantined=sum(worker.quarantined for worker in workers),
        samples_per_second=round(sum(worker.samples_per_second for worker in workers), 3),
        tokens_per_second=round(sum(worker.tokens_per_second for worker in workers), 1),
        seconds_by_stage={name: round(value, 3) for name, value in seconds.items()},
        out_of_memory_retries=sum(worker.out_of_memory_retries for worker in workers),
        slow_path=sorted({mixer for worker in workers for mixer in worker.slow_path}),
        stalled=any(worker.stalled for worker in workers),
        updated_at=max((worker.updated_at for worker in workers), default=""),
    )
