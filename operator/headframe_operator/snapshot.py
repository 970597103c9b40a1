"""All that is known about one ExtractionJob at one moment: the input of the decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from headframe_api.progress import Progress
from headframe_operator.views import ExtractionView, JobView, PodView, WarningView, WorkloadView

STAGES = ("prepare", "extract", "finalize")


@dataclass(frozen=True, slots=True)
class Poll:
    """A worker's last answer to GET /progress; ``error`` where it gave none."""

    at: datetime
    progress: Progress | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Rates:
    """Throughput of all workers together, over the last minute."""

    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server refused a child: its own words."""

    reason: str
    message: str


@dataclass(frozen=True)
class Snapshot:
    """One ExtractionJob, its children, and what was asked for on demand."""

    extraction: ExtractionView
    jobs: Mapping[str, JobView] = field(default_factory=dict)
    """This ExtractionJob's own Jobs, by stage."""
    taken: Mapping[str, str] = field(default_factory=dict)
    """Stages whose Job name belongs to something else now, and to what: mostly an ExtractionJob of the same name before."""
    pods: tuple[PodView, ...] = ()
    warnings: tuple[WarningView, ...] = ()
    workload: WorkloadView | None = None
    polls: Mapping[str, Poll] = field(default_factory=dict)
    """By pod uid."""
    rates: Rates = Rates()
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """By stage."""

    def pods_of(self, stage: str) -> tuple[PodView, ...]:
        """The pods of this ExtractionJob's current Job of a stage."""
        job = self.jobs.get(stage)
        return () if job is None else self._pods_by_job.get(job.uid, ())

    @cached_property
    def _pods_by_job(self) -> dict[str, tuple[PodView, ...]]:
        """Sorted once: a decision asks a dozen times, and a large job has tens of thousands of pods."""
        found: dict[str, list[PodView]] = {}
        for pod in self.pods:
            found.setdefault(pod.job_uid, []).append(pod)
        return {uid: tuple(pods) for uid, pods in found.items()}
