"""The prepare and finalize Jobs: one CPU pod each, before the shards and after them."""

from __future__ import annotations

from typing import Any

from headframe_api.spec import ExtractionJobSpec
from headframe_operator.children.job import failure_policy, job
from headframe_operator.children.pod import pod_template
from headframe_operator.settings import Settings
from headframe_operator.views import ExtractionView


def cpu_stage_job(x: ExtractionView, spec: ExtractionJobSpec, stage: str, settings: Settings) -> dict[str, Any]:
    """The manifest of the Job of `prepare` or `finalize`."""
    return job(
        x,
        spec,
        stage,
        {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": spec.failure_policy.retries_per_shard,
            "podFailurePolicy": failure_policy(per_shard=False),
            "podReplacementPolicy": "Failed",
            "suspend": False,
            "template": pod_template(x, spec, stage, settings),
        },
    )
