"""What the operator counts. Counters live here; what is true of jobs now is read from the mirror when Prometheus asks."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import get_args

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headframe_api.status import TERMINAL_PHASES, Phase
from headframe_operator.times import from_text
from headframe_operator.views import ExtractionView, JobView

_WHERE = ["namespace", "job"]

API_REQUESTS = Counter(
    "headframe_operator_api_requests_total",
    "Requests to the API server, by method and status code.",
    ["method", "code"],
)
RECONCILE_SECONDS = Histogram(
    "headframe_operator_reconcile_seconds",
    "Seconds to decide on one ExtractionJob and to apply it.",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
RECONCILE_ERRORS = Counter(
    "headframe_operator_reconcile_errors_total", "Reconciliations that failed and are tried again."
)
POLLS = Counter("headframe_operator_worker_polls_total", "Workers asked for their progress, by result.", ["result"])
CHILDREN_CREATED = Counter("headframe_operator_jobs_created_total", "Jobs created, by stage.", ["stage"])
WATCH_LAG_SECONDS = Histogram(
    "headframe_operator_audit_lag_seconds",
    "How far the watches were behind when they were compared with the API server.",
    buckets=(0, 1, 5, 15, 30, 60, 300),
)


class JobsCollector(Collector):
    """Gauges of the ExtractionJobs that exist now: none outlives its ExtractionJob."""

    def __init__(
        self, extractions: Callable[[], Iterable[ExtractionView]], jobs: Callable[[], Iterable[JobView]]
    ) -> None:
        self._extractions = extractions
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """The gauges at this moment."""
        found = list(self._extractions())
        tally = Tally(x.status.phase or "Pending" for x in found)
        by_phase = GaugeMetricFamily("headframe_jobs", "ExtractionJobs by phase.", labels=["phase"])
        for phase in get_args(Phase):
            by_phase.add_metric([phase], tally[phase])
        yield by_phase
        yield from _standing(found)
        yield from _work(found)
        yield from _progress([x for x in found if x.status.phase not in TERMINAL_PHASES])
        yield self._failed_pods(found)

    def _failed_pods(self, found: Iterable[ExtractionView]) -> Metric:
        family = GaugeMetricFamily(
            "headframe_job_failed_pods",
            "Pods that failed and were not merely disrupted, by stage.",
            labels=[*_WHERE, "stage"],
        )
        names = {x.uid: [x.namespace, x.name] for x in found}
        for job in self._jobs():
            if job.owner_uid in names:
                family.add_metric([*names[job.owner_uid], job.stage], job.failed_pods)
        return family


def _standing(found: Iterable[ExtractionView]) -> Iterator[Metric]:
    """The phase of each, and what stands in the way of those that do not go on though they should."""
    phases = GaugeMetricFamily("headframe_job_phase", "1 for the phase it is in.", labels=[*_WHERE, "phase"])
    blocked = GaugeMetricFamily(
        "headframe_job_blocked", "1 while something stands in the way, by reason.", labels=[*_WHERE, "reason"]
    )
    for x in found:
        phase = x.status.phase or "Pending"
        phases.add_metric([x.namespace, x.name, phase], 1)
        progressing = next((c for c in x.status.conditions if c.type == "Progressing"), None)
        if progressing is not None and progressing.status == "False" and phase not in (*TERMINAL_PHASES, "Suspended"):
            blocked.add_metric([x.namespace, x.name, progressing.reason], 1)
    yield from (phases, blocked)


def _work(found: Iterable[ExtractionView]) -> Iterator[Metric]:
    """Shards, GPUs and refused samples: whatever the phase."""
    shards = GaugeMetricFamily("headframe_job_shards", "Shards by state.", labels=[*_WHERE, "state"])
    gpus = GaugeMetricFamily("headframe_job_gpus", "GPUs that its active shards ask for.", labels=_WHERE)
    refused = GaugeMetricFamily("headframe_job_quarantined_samples", "Samples in quarantine.", labels=_WHERE)
    for x in found:
        where, counts = [x.namespace, x.name], x.status.shards
        if counts is not None:
            for state in ("total", "active", "succeeded", "failed"):
                shards.add_metric([*where, state], getattr(counts, state))
            gpus.add_metric(where, counts.active * (x.spec.model.gpus if x.spec is not None else 0))
        if x.status.quarantined is not None:
            refused.add_metric(where, x.status.quarantined)
    yield from (shards, gpus, refused)


def _progress(found: Iterable[ExtractionView]) -> Iterator[Metric]:
    ratio = GaugeMetricFamily("headframe_job_progress_ratio", "Tokens done, of all.", labels=_WHERE)
    rate = GaugeMetricFamily("headframe_job_tokens_per_second", "Tokens per second of all workers.", labels=_WHERE)
    left = GaugeMetricFamily("headframe_job_eta_seconds", "Seconds left at this rate.", labels=_WHERE)
    now = datetime.now(UTC)
    for x in found:
        progress, where = x.status.progress, [x.namespace, x.name]
        if progress is None:
            continue
        ratio.add_metric(where, progress.percent / 100)
        rate.add_metric(where, progress.tokens_per_second)
        end = from_text(progress.estimated_completion_time)
        if end is not None:
            left.add_metric(where, max(0.0, (end - now).total_seconds()))
    yield from (ratio, rate, left)
