"""The alerts. docs/operations.md has a section for each, of the same name; tests/data/alerts.yaml makes each fire and not fire."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Alert:
    """When something needs a person, and what the person reads first."""

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str
    description: str


_EACH = "by (namespace, job)"
_WAITING = f"sum {_EACH} (rate(headframe_waiting_seconds_total[10m]))"
_COMPUTING = f'sum {_EACH} (rate(headframe_stage_seconds_total{{stage="forward"}}[10m]))'
_REFUSED = f"sum {_EACH} (increase(headframe_quarantined_samples_total[15m]))"
_DONE = f"sum {_EACH} (increase(headframe_samples_total[15m]))"
_LAG = "headframe_operator_audit_lag_seconds"

ALERTS = (
    Alert(
        "HeadframeJobFailed",
        f'max {_EACH} (headframe_job_phase{{phase="Failed"}}) == 1 '
        f'unless max {_EACH} (headframe_job_phase{{phase="Failed"}} offset 1d) == 1',
        "1m",
        "warning",
        "ExtractionJob {{ $labels.namespace }}/{{ $labels.job }} failed",
        "It failed within the last day. Its condition Failed says why; what it wrote is kept.",
    ),
    Alert(
        "HeadframeJobBlocked",
        "max by (namespace, job, reason) (headframe_job_blocked) == 1",
        "30m",
        "warning",
        "ExtractionJob {{ $labels.namespace }}/{{ $labels.job }} does not go on: {{ $labels.reason }}",
        "It should run and does not, for half an hour. Its condition Progressing says what stands in the way.",
    ),
    Alert(
        "HeadframeWorkerStalled",
        "max by (namespace, job, shard) (headframe_stalled) == 1",
        "2m",
        "warning",
        "A worker of {{ $labels.namespace }}/{{ $labels.job }} (shard {{ $labels.shard }}) is stuck",
        "No batch and no upload for 15 minutes, though it waits for nothing outside. Kubernetes restarts it by its liveness probe.",
    ),
    Alert(
        "HeadframeShardsRetried",
        "max by (namespace, job, stage) (max_over_time(headframe_job_failed_pods[30m]) - min_over_time(headframe_job_failed_pods[30m]))"
        " >= 3",
        "0m",
        "warning",
        "Pods of {{ $labels.namespace }}/{{ $labels.job }} ({{ $labels.stage }}) fail again and again",
        "{{ $value }} pods failed in half an hour, disruptions not counted. The job fails when a shard has no retries left.",
    ),
    Alert(
        "HeadframeShardsFailed",
        f'max {_EACH} (headframe_job_shards{{state="failed"}}) > 0 and max {_EACH} (headframe_job_phase{{phase="Extracting"}}) == 1',
        "1m",
        "warning",
        "{{ $value }} shards of {{ $labels.namespace }}/{{ $labels.job }} are given up",
        "Their samples will be missing from the output. status.shards.failedIndexes names them.",
    ),
    Alert(
        "HeadframeQuarantineRising",
        f"{_REFUSED} / ({_REFUSED} + {_DONE}) > 0.005",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the samples of {{ $labels.namespace }}/{{ $labels.job }} are refused",
        "More than one in 200 ends in quarantine. failurePolicy.maxQuarantinedFraction ends the job at its limit.",
    ),
    Alert(
        "HeadframeGpuWaits",
        f"{_WAITING} / ({_WAITING} + {_COMPUTING}) > 0.3",
        "15m",
        "info",
        "The GPUs of {{ $labels.namespace }}/{{ $labels.job }} stand still {{ $value | humanizePercentage }} of the time",
        "They wait for data or for writes. The dashboard Workers shows for which.",
    ),
    Alert(
        "HeadframeStoreUnavailable",
        f'max {_EACH} (headframe_state{{state="waiting"}}) == 1',
        "10m",
        "warning",
        "Workers of {{ $labels.namespace }}/{{ $labels.job }} wait for the object store",
        "They go on by themselves when it answers; after 25 minutes they give up and are retried.",
    ),
    Alert(
        "HeadframeSlowKernels",
        f"max {_EACH} (headframe_slow_path) > 0",
        "5m",
        "warning",
        "{{ $labels.namespace }}/{{ $labels.job }} runs on a slow reference path",
        "{{ $value }} mixers of the model lack their kernels: the states are right, but many times slower than need be.",
    ),
    Alert(
        "HeadframeOperatorDown",
        'absent(up{headframe="operator"} == 1)',
        "5m",
        "critical",
        "The Headframe operator does not answer",
        "Running workers go on. Nothing new starts, no status is written, and no failure is seen until it is back.",
    ),
    Alert(
        "HeadframeWatchDead",
        f'sum(increase({_LAG}_count[30m])) - sum(increase({_LAG}_bucket{{le="30.0"}}[30m])) > 0'
        ' or max(changes(process_start_time_seconds{headframe="operator"}[30m])) > 2',
        "0m",
        "warning",
        "The Headframe operator's watch of the API server falls behind or breaks",
        "The operator compares its watches with the API server and restarts when one is dead. It did so, or was late, repeatedly.",
    ),
    Alert(
        "HeadframeReconcileErrors",
        "sum(rate(headframe_operator_reconcile_errors_total[10m])) > 0.05",
        "15m",
        "warning",
        "The Headframe operator fails to reconcile",
        "{{ $value | humanize }} errors a second for a quarter of an hour. Its log names the ExtractionJobs.",
    ),
)


def alert_groups() -> dict[str, Any]:
    """The alerts as Prometheus' rules. The chart puts the page of the runbooks in the place of RUNBOOKS."""
    return {"groups": [{"name": "headframe", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    annotations = {
        "summary": alert.summary,
        "description": alert.description,
        "runbook_url": f"RUNBOOKS#{alert.name.lower()}",
    }
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": annotations,
    }
