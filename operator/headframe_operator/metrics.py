"""What the operator counts. Counters live here; what is true of jobs now is read from the mirror when Prometheus asks."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import get_args

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headframe_api.status import Phase
from headframe_operator.times import from_text
from headframe_operator.views import ExtractionView

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

    def __init__(self, extractions: Callable[[], Iterable[ExtractionView]]) -> None:
        self._extractions = extractions

    def collect(self) -> Iterator[Metric]:
        """The gauges at this moment."""
        labels = ["namespace", "job"]
        by_phase = GaugeMetricFamily("headframe_jobs", "ExtractionJobs by phase.", labels=["phase"])
        ratio = GaugeMetricFamily("headframe_job_progress_ratio", "Tokens done, of all.", labels=labels)
        rate = GaugeMetricFamily("headframe_job_tokens_per_second", "Tokens per second of all workers.", labels=labels)
        left = GaugeMetricFamily("headframe_job_eta_seconds", "Seconds left at this rate.", labels=labels)
        now = datetime.now(UTC)
        tally: Tally[str] = Tally()
        for x in self._extractions():
            tally[x.status.phase or "Pending"] += 1
            progress, where = x.status.progress, [x.namespace, x.name]
            if progress is None or x.status.phase in ("Succeeded", "Failed"):
                continue
            ratio.add_metric(where, progress.percent / 100)
            rate.add_metric(where, progress.tokens_per_second)
            end = from_text(progress.estimated_completion_time)
            if end is not None:
                left.add_metric(where, max(0.0, (end - now).total_seconds()))
        for phase in get_args(Phase):
            by_phase.add_metric([phase], tally[phase])
        yield from (by_phase, ratio, rate, left)
