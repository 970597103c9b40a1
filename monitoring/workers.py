"""The dashboard "Workers": the workers of a job, as each tells of itself."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.panels import SELECTED, Panel, Query, Row, build

_WHO = "{{job}} shard {{shard}}"


def workers_dashboard() -> Dashboard:
    """The dashboard, ready to be written."""
    return build(
        uid="headframe-workers",
        title="Headframe / Workers",
        description="The workers of a job: speed, where each GPU's second goes, uploads, and what went wrong.",
        rows=_ROWS,
        variables="headframe_samples_total",
    )


def _rate(metric: str, by: str = "namespace, job, shard") -> str:
    return f"sum by ({by}) (rate({metric}{{{SELECTED}}}[$__rate_interval]))"


def _quantile(share: float, metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', labels)})"


def _gauge(metric: str, by: str = "namespace, job, shard", *matchers: str) -> str:
    return f"max by ({by}) ({metric}{{{', '.join([SELECTED, *matchers])}}})"


_ROWS = (
    Row(
        "Speed",
        (
            Panel("Tokens per second", "Tokens that went through the model, without padding.",
                  (Query(_rate("headframe_tokens_total"), _WHO),), "short"),
            Panel("Samples per second", "Samples that went through the model.",
                  (Query(_rate("headframe_samples_total"), _WHO),), "short"),
            Panel("Padding waste", "Share of the computed tokens that were padding.",
                  (Query(f"1 - {_rate('headframe_tokens_total', 'namespace, job')} / "
                         f"({_rate('headframe_padded_tokens_total', 'namespace, job')} > 0)", "{{job}}"),),
                  "percentunit", maximum=1, empty="nothing is computed"),
            Panel("Tokens in a batch", "Padded tokens of a batch: half of all, and the largest in twenty.",
                  (Query(_quantile(0.5, "headframe_batch_tokens"), "half"), Query(_quantile(0.95, "headframe_batch_tokens"), "95 %")),
                  "short", empty="nothing is computed"),
            Panel("Workers by state", "What the workers do now.",
                  (Query(f"sum by (state) (headframe_state{{{SELECTED}}})", "{{state}}"),), "none", "stacked", empty="no worker runs"),
            Panel("Seconds to load the model", "Per worker.", (Query(_gauge("headframe_model_load_seconds"), _WHO),), "s", "bars",
                  empty="no worker runs"),
        ),
    ),
    Row(
        "Where each second goes",
        (
            Panel("The model's second", "Computing, or standing still and for what. Waiting for data or writes is a GPU that idles.",
                  (Query(f'avg by (job) (rate(headframe_stage_seconds_total{{{SELECTED}, stage="forward"}}[$__rate_interval]))', "{{job}} computes"),
                   Query(f"avg by (job, for) ({_rate('headframe_waiting_seconds_total', 'namespace, job, shard, for')})", "{{job}} waits for {{for}}")),
                  "s", "stacked", empty="nothing is computed"),
            Panel("Busy seconds by stage", "The stages run side by side: each may be busy all the time.",
                  (Query(f"avg by (job, stage) ({_rate('headframe_stage_seconds_total', 'namespace, job, shard, stage')})", "{{job}} {{stage}}"),),
                  "s", empty="nothing is computed"),
        ),
    ),
    Row(
        "GPU",
        (
            Panel("GPU utilisation", "Share of the last second in which the GPU computed.",
                  (Query(_gauge("headframe_gpu_utilization_ratio", "namespace, job, shard, gpu"), _WHO + " GPU {{gpu}}"),),
                  "percentunit", width=8, maximum=1, empty="no GPU"),
            Panel("GPU memory", "Memory of the GPU in use.",
                  (Query(_gauge("headframe_gpu_memory_used_bytes", "namespace, job, shard, gpu"), _WHO + " GPU {{gpu}}"),),
                  "bytes", width=8, empty="no GPU"),
            Panel("GPU power", "Power that the GPU draws.",
                  (Query(_gauge("headframe_gpu_power_watts", "namespace, job, shard, gpu"), _WHO + " GPU {{gpu}}"),),
                  "watt", width=8, empty="no GPU"),
        ),
    ),
    Row(
        "Writing",
        (
            Panel("Bytes written per second", "Objects that the store has confirmed.",
                  (Query(_rate("headframe_written_bytes_total"), _WHO),), "Bps"),
            Panel("Upload backlog", "Bytes computed and not yet written. A backlog that stays high is a store that is too slow.",
                  (Query(_gauge("headframe_upload_backlog_bytes"), _WHO),), "bytes"),
            Panel("Time to write an object", "Half of all, and the slowest in twenty.",
                  (Query(_quantile(0.5, "headframe_upload_seconds"), "half"), Query(_quantile(0.95, "headframe_upload_seconds"), "95 %")),
                  "s", empty="nothing is written"),
            Panel("Requests sent again", "Requests to the object store that were repeated.",
                  (Query(_rate("headframe_upload_retries_total"), _WHO),), "reqps"),
        ),
    ),
    Row(
        "What went wrong",
        (
            Panel("Quarantine", "Samples refused per second, by reason.",
                  (Query(_rate("headframe_quarantined_samples_total", "job, reason"), "{{job}} {{reason}}"),), "short",
                  empty="nothing is refused"),
            Panel("Out of memory and non-finite", "Batches tried again because the GPU's memory was full; samples with NaN or infinity.",
                  (Query(_rate("headframe_out_of_memory_retries_total", "job"), "{{job}} out of memory"),
                   Query(_rate("headframe_non_finite_samples_total", "job"), "{{job}} non-finite")), "short"),
            Panel("Slow path", "Mixers of the model on a slow reference path: kernels are missing.",
                  (Query(_gauge("headframe_slow_path", "namespace, job"), "{{job}}"),), "none"),
            Panel("Stalled", "1: nothing has moved for too long.", (Query(_gauge("headframe_stalled"), _WHO),), "none", maximum=1),
        ),
    ),
)  # fmt: skip
