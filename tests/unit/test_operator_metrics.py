"""What Prometheus reads about each ExtractionJob is what its status says, and goes with the ExtractionJob."""

from typing import Any

from prometheus_client.core import CollectorRegistry

from headframe_operator.metrics import JobsCollector
from headframe_operator.views import ExtractionView, JobView, extraction_view, job_view

SPEC = {"model": {"source": "org/model", "gpus": 4}, "dataset": {"source": "org/data"}, "output": {"uri": "s3://b/p"}}
NOW = "2026-01-01T00:00:00Z"


def extraction(name: str, **status: Any) -> ExtractionView:
    metadata = {"name": name, "namespace": "drafters", "uid": f"uid-{name}", "creationTimestamp": NOW}
    document = {"apiVersion": "headframe.dev/v1alpha1", "kind": "ExtractionJob", "metadata": metadata, "spec": SPEC}
    return extraction_view(document | {"status": status})


def extract_job(owner: str, failed: int) -> JobView:
    metadata = {
        "name": f"{owner}-extract",
        "namespace": "drafters",
        "uid": f"uid-{owner}-extract",
        "creationTimestamp": NOW,
        "labels": {"headframe.dev/job": owner, "headframe.dev/stage": "extract"},
        "ownerReferences": [{"uid": f"uid-{owner}", "controller": True}],
    }
    return job_view({"metadata": metadata, "spec": {}, "status": {"failed": failed}})


def progressing(status: str, reason: str) -> dict[str, Any]:
    return {"type": "Progressing", "status": status, "reason": reason, "lastTransitionTime": NOW}


def registry(*extractions: ExtractionView, jobs: tuple[JobView, ...] = ()) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(JobsCollector(lambda: extractions, lambda: jobs))
    return made


def test_a_running_job() -> None:
    shards = {"total": 8, "active": 2, "succeeded": 5, "failed": 1}
    progress = {"percent": 62.5, "tokensPerSecond": 1000.0}
    status = {"phase": "Extracting", "shards": shards, "progress": progress, "quarantined": 7}
    metrics = registry(extraction("a", **status), jobs=(extract_job("a", 3), extract_job("gone", 9)))
    where = {"namespace": "drafters", "job": "a"}
    assert metrics.get_sample_value("headframe_jobs", {"phase": "Extracting"}) == 1
    assert metrics.get_sample_value("headframe_jobs", {"phase": "Failed"}) == 0
    assert metrics.get_sample_value("headframe_job_phase", {**where, "phase": "Extracting"}) == 1
    assert metrics.get_sample_value("headframe_job_shards", {**where, "state": "succeeded"}) == 5
    assert metrics.get_sample_value("headframe_job_gpus", where) == 8, "two active shards of four GPUs"
    assert metrics.get_sample_value("headframe_job_quarantined_samples", where) == 7
    assert metrics.get_sample_value("headframe_job_progress_ratio", where) == 0.625
    assert metrics.get_sample_value("headframe_job_tokens_per_second", where) == 1000
    assert metrics.get_sample_value("headframe_job_failed_pods", {**where, "stage": "extract"}) == 3
    assert metrics.get_sample_value("headframe_job_failed_pods", {**where, "job": "gone", "stage": "extract"}) is None


def test_only_a_job_that_should_run_and_does_not_is_blocked() -> None:
    conditions = [progressing("False", "QuotaExceeded")]
    ended = [progressing("False", "Failed")]
    runs = [progressing("True", "Extracting")]
    metrics = registry(
        extraction("waits", phase="Extracting", conditions=conditions),
        extraction("suspended", phase="Suspended", conditions=[progressing("False", "SuspendedByUser")]),
        extraction("failed", phase="Failed", conditions=ended, progress={"percent": 10.0}),
        extraction("runs", phase="Extracting", conditions=runs),
    )
    blocked = [sample for family in metrics.collect() for sample in family.samples if "blocked" in sample.name]
    assert [(sample.labels["job"], sample.labels["reason"]) for sample in blocked] == [("waits", "QuotaExceeded")]
    assert metrics.get_sample_value("headframe_job_progress_ratio", {"namespace": "drafters", "job": "failed"}) is None
