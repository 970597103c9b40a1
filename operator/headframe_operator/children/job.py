"""What the Jobs of all stages share: name, owner, labels, and the digest of the spec that made them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from headframe_api.exit_codes import ExitCode
from headframe_api.names import API_VERSION, KIND
from headframe_api.spec import ExtractionJobSpec
from headframe_operator.child_names import child_name
from headframe_operator.children.pod import CONTAINER, labels
from headframe_operator.views import SPEC_DIGEST_ANNOTATION, ExtractionView

MUTABLE_FIELDS = ("worker", "s3", "batchTokens", "failurePolicy")
"""What shapes a stage's Job and may change while it runs: a change replaces the Job, for its template is immutable."""


def spec_digest(spec: ExtractionJobSpec) -> str:
    """Digest of the mutable part of the spec. Not of the rendered Job: a new operator must not restart running Jobs."""
    document = spec.to_dict()
    deciding = json.dumps({field: document.get(field) for field in MUTABLE_FIELDS}, sort_keys=True)
    return hashlib.sha256(deciding.encode()).hexdigest()[:16]


def job(x: ExtractionView, spec: ExtractionJobSpec, stage: str, job_spec: dict[str, Any]) -> dict[str, Any]:
    """A Job of a stage around its spec."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": x.name,
        "uid": x.uid,
        "controller": True,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": child_name(x.name, stage),
            "namespace": x.namespace,
            "labels": labels(x, stage),
            "annotations": {SPEC_DIGEST_ANNOTATION: spec_digest(spec)},
            "ownerReferences": [owner],
        },
        "spec": job_spec,
    }


def failure_policy(*, per_shard: bool) -> dict[str, Any]:
    """What a pod's end means: the first rule that matches holds, and any other failure is counted and retried."""
    data = "FailIndex" if per_shard else "FailJob"
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            _on_exit("FailJob", ExitCode.CONFIG),
            _on_exit(data, ExitCode.DATA),
        ]
    }


def _on_exit(action: str, code: ExitCode) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [int(code)]}}
