"""The extract Job: one completion index a shard, so that Kubernetes itself is the work queue."""

from __future__ import annotations

from typing import Any

from headframe_api.names import QUEUE_LABEL
from headframe_api.spec import ExtractionJobSpec
from headframe_operator.children.job import failure_policy, job
from headframe_operator.children.pod import pod_template
from headframe_operator.settings import Settings
from headframe_operator.views import WORKERS_ANNOTATION, ExtractionView

_COPIED_LABELS = (QUEUE_LABEL, "kueue.x-k8s.io/priority-class")
_COPIED_ANNOTATIONS = ("kueue.x-k8s.io/job-min-parallelism",)
"""Kueue's partial admission: with how few workers it may start."""


def extract_job(x: ExtractionView, spec: ExtractionJobSpec, shards: int, settings: Settings) -> dict[str, Any]:
    """The manifest of the extract Job for a plan of so many shards. In a Kueue queue it starts suspended."""
    wanted = parallelism(spec, shards)
    manifest = job(
        x,
        spec,
        "extract",
        {
            "completionMode": "Indexed",
            "completions": shards,
            "parallelism": wanted,
            "backoffLimitPerIndex": spec.failure_policy.retries_per_shard,
            "maxFailedIndexes": min(spec.failure_policy.max_failed_shards, shards),
            "podFailurePolicy": failure_policy(per_shard=True),
            "podReplacementPolicy": "Failed",
            "suspend": QUEUE_LABEL in x.labels,
            "template": pod_template(x, spec, "extract", settings),
        },
    )
    if QUEUE_LABEL in x.labels:
        manifest["metadata"]["labels"] |= {label: x.labels[label] for label in _COPIED_LABELS if label in x.labels}
        manifest["metadata"]["annotations"] |= {
            WORKERS_ANNOTATION: str(wanted),
            **{name: x.kueue_annotations[name] for name in _COPIED_ANNOTATIONS if name in x.kueue_annotations},
        }
    return manifest


def parallelism(spec: ExtractionJobSpec, shards: int) -> int:
    """How many shards are worked on at the same time."""
    return min(spec.workers, shards)
