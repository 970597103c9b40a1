"""The dashboard "ExtractionJobs": the fleet, as the operator sees it."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.panels import SELECTED, Panel, Query, Row, build

_OPERATOR = 'headframe="operator"'


def extraction_jobs_dashboard() -> Dashboard:
    """The dashboard, ready to be written."""
    return build(
        uid="headframe-extractionjobs",
        title="Headframe / ExtractionJobs",
        description="Every ExtractionJob: phase, speed, time left, failures, and the operator's own health.",
        rows=_ROWS,
        variables="headframe_job_phase",
    )


def _each(metric: str, *matchers: str) -> str:
    """One value a job: of two operators that changed places, the one that knows more."""
    return f"max by (namespace, job) ({metric}{{{', '.join([SELECTED, *matchers])}}})"


def _sum(metric: str, *matchers: str) -> str:
    return f"sum({_each(metric, *matchers)})"


_ROWS = (
    Row(
        "Fleet",
        (
            Panel("Running", "Jobs that read, extract or finalize now.",
                  (Query('sum(max by (phase) (headframe_jobs{phase=~"Preparing|Extracting|Finalizing"}))', "running"),),
                  "none", "number", 4, empty="0"),
            Panel("Waiting", "Jobs that have not begun, or are suspended or queued.",
                  (Query('sum(max by (phase) (headframe_jobs{phase=~"Pending|Suspended"}))', "waiting"),),
                  "none", "number", 4, empty="0"),
            Panel("Failed", "Failed jobs that still exist.",
                  (Query('max(headframe_jobs{phase="Failed"})', "failed"),), "none", "number", 4, empty="0"),
            Panel("GPUs in use", "GPUs that active shards ask for; 0 for jobs on the CPU.",
                  (Query(_sum("headframe_job_gpus"), "GPUs"),), "none", "number", 4, empty="0"),
            Panel("Tokens per second", "All workers of the chosen jobs together.",
                  (Query(_sum("headframe_job_tokens_per_second"), "tokens/s"),), "short", "number", 4, empty="nothing runs"),
            Panel("Blocked", "Jobs that should go on and do not.",
                  (Query(f"count({_each('headframe_job_blocked')})", "blocked"),), "none", "number", 4, empty="0"),
            Panel("Jobs by phase", "How many ExtractionJobs are in each phase.",
                  (Query("max by (phase) (headframe_jobs)", "{{phase}}"),), "none", "stacked"),
            Panel("What stands in the way", "Blocked jobs, with the reason of their condition Progressing.",
                  (Query(f"max by (namespace, job, reason) (headframe_job_blocked{{{SELECTED}}})", "{{job}}: {{reason}}"),),
                  "none", "table", empty="nothing is blocked"),
        ),
    ),
    Row(
        "Progress",
        (
            Panel("Progress", "Tokens done, of all.", (Query(_each("headframe_job_progress_ratio"), "{{namespace}}/{{job}}"),),
                  "percentunit", "bars", maximum=1, empty="nothing runs"),
            Panel("Time left", "At the present rate.", (Query(_each("headframe_job_eta_seconds"), "{{namespace}}/{{job}}"),),
                  "s", "bars", empty="no job has a rate yet"),
            Panel("Tokens per second by job", "All workers of a job together.",
                  (Query(_each("headframe_job_tokens_per_second"), "{{namespace}}/{{job}}"),), "short", empty="nothing runs"),
            Panel("GPUs by job", "GPUs that active shards ask for.",
                  (Query(_each("headframe_job_gpus"), "{{namespace}}/{{job}}"),), "none"),
            Panel("Shards", "Shards of the chosen jobs by state.",
                  (Query(f"sum by (state) (max by (namespace, job, state) (headframe_job_shards{{{SELECTED}}}))", "{{state}}"),),
                  "none"),
            Panel("Samples in quarantine", "Refused samples; each stands in the output's quarantine/ with its reason.",
                  (Query(_each("headframe_job_quarantined_samples"), "{{namespace}}/{{job}}"),), "none"),
        ),
    ),
    Row(
        "Failures",
        (
            Panel("Failed pods", "Pods that failed and were not merely disrupted; each is a retry of a shard or a stage.",
                  (Query(f"max by (namespace, job, stage) (headframe_job_failed_pods{{{SELECTED}}})", "{{job}} {{stage}}"),), "none"),
            Panel("Jobs made by the operator", "Kubernetes Jobs that the operator created in five minutes, by stage.",
                  (Query("sum by (stage) (increase(headframe_operator_jobs_created_total[5m]))", "{{stage}}"),), "none"),
        ),
    ),
    Row(
        "Operator",
        (
            Panel("Time to reconcile", "Deciding on one ExtractionJob and applying it: half of all, and the slowest in a hundred.",
                  (Query("histogram_quantile(0.5, sum by (le) (rate(headframe_operator_reconcile_seconds_bucket[$__rate_interval])))", "half"),
                   Query("histogram_quantile(0.99, sum by (le) (rate(headframe_operator_reconcile_seconds_bucket[$__rate_interval])))", "99 %")),
                  "s", empty="nothing to reconcile"),
            Panel("Requests to the API server", "By method and status code.",
                  (Query("sum by (method, code) (rate(headframe_operator_api_requests_total[$__rate_interval]))", "{{method}} {{code}}"),),
                  "reqps"),
            Panel("Errors", "Reconciliations that failed and are tried again.",
                  (Query("sum(rate(headframe_operator_reconcile_errors_total[$__rate_interval]))", "errors"),), "ops"),
            Panel("Workers asked for progress", "Polls of running workers, by result.",
                  (Query("sum by (result) (rate(headframe_operator_worker_polls_total[$__rate_interval]))", "{{result}}"),), "reqps"),
            Panel("Lag of the watches", "How far they were behind the API server, the worst in a hundred.",
                  (Query("histogram_quantile(0.99, sum by (le) (rate(headframe_operator_audit_lag_seconds_bucket[$__rate_interval])))", "99 %"),),
                  "s", empty="never behind"),
            Panel("Memory", "Of the operator's process.",
                  (Query(f"max(process_resident_memory_bytes{{{_OPERATOR}}})", "memory"),), "bytes"),
        ),
    ),
)  # fmt: skip
