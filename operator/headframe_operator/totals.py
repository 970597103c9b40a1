"""How much is done: finished shards by what their pods reported, running ones by what their workers answer."""

from __future__ import annotations

from dataclasses import dataclass

from headframe_api.status import PlanSummary
from headframe_operator import index_lists
from headframe_operator.snapshot import Snapshot


@dataclass(frozen=True)
class Totals:
    """Sums over all shards."""

    samples: int = 0
    tokens: int = 0
    quarantined: int = 0
    """Of the extract stage alone."""


def finished_shards(snapshot: Snapshot) -> int:
    """Shards that are done: by the Job's count, or by a pod's end that the Job has yet to count, seconds later."""
    job = snapshot.jobs.get("extract")
    if job is None:
        return 0
    ended = {pod.index for pod in snapshot.pods_of("extract") if pod.phase == "Succeeded" and pod.index is not None}
    return max(job.succeeded, len(index_lists.indexes(job.completed_indexes) | ended))


def done_so_far(snapshot: Snapshot, plan: PlanSummary) -> Totals:
    """Samples and tokens done. A finished shard whose pod is gone counts as an average one."""
    job = snapshot.jobs.get("extract")
    if job is None:
        return Totals()
    samples = tokens = quarantined = 0
    reported: set[int] = set()
    for pod in snapshot.pods_of("extract"):
        if pod.index is None:
            continue
        if pod.phase == "Succeeded" and pod.report is not None:
            if pod.index not in reported:
                reported.add(pod.index)
                samples, tokens = samples + pod.report.samples, tokens + pod.report.tokens
                quarantined += pod.report.quarantined
        elif pod.phase == "Running" and (poll := snapshot.polls.get(pod.uid)) and poll.progress:
            samples, tokens = samples + poll.progress.samples, tokens + poll.progress.tokens
            quarantined += poll.progress.quarantined
    unreported = len(index_lists.indexes(job.completed_indexes) - reported)
    share = unreported / plan.shards if plan.shards else 0.0
    return Totals(
        samples=min(plan.samples, samples + round(plan.samples * share)),
        tokens=min(plan.tokens, tokens + round(plan.tokens * share)),
        quarantined=quarantined,
    )
