"""Kubernetes objects as the API server would give them, for tests of the decision."""

import json
from datetime import UTC, datetime
from typing import Any

from headframe_operator.child_names import child_name, job_label
from headframe_operator.children.job import spec_digest
from headframe_operator.settings import Settings
from headframe_operator.snapshot import Snapshot
from headframe_operator.views import extraction_view, job_view, pod_view, warning_view, workload_view

Json = dict[str, Any]
NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
EARLIER = "2026-11-30T11:50:00Z"
SETTINGS = Settings(worker_image="worker:test")
UID = "x-uid"
SPEC: Json = {
    "model": {"source": "Qwen/Qwen3-8B"},
    "dataset": {"source": "s3://corpora/chats.jsonl"},
    "output": {"uri": "s3://states/out"},
    "workers": 2,
}
PLAN: Json = {
    "samples": 80,
    "tokens": 8000,
    "shards": 4,
    "bytes": 1000,
    "layers": [1, 2],
    "hiddenSize": 8,
    "modelRevision": "r",
}


def merge(target: Json, patch: Json) -> Json:
    """JSON merge patch, as in the tables."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key) or {}, value) if isinstance(value, dict) else value
    return result


def extraction(spec: Json | None = None, status: Json | None = None, metadata: Json | None = None) -> Json:
    """An ExtractionJob."""
    return {
        "apiVersion": "headframe.dev/v1alpha1",
        "kind": "ExtractionJob",
        "metadata": {
            "name": "job",
            "namespace": "ns",
            "uid": UID,
            "generation": 1,
            "creationTimestamp": EARLIER,
            "resourceVersion": "1",
            **(metadata or {}),
        },
        "spec": merge(SPEC, spec or {}),
        "status": status or {},
    }


def job(x: Json, stage: str, **changes: Any) -> Json:
    """The Job of a stage, of the spec of ``x``; ``changes`` are its spec, status, and parts of its metadata."""
    view = extraction_view(x)
    digest = spec_digest(view.spec) if view.spec is not None else ""
    shards = 4 if stage == "extract" else 1
    metadata = {
        "name": child_name("job", stage),
        "namespace": "ns",
        "uid": f"{stage}-uid",
        "creationTimestamp": EARLIER,
        "resourceVersion": "1",
        "labels": {"headframe.dev/job": job_label("job"), "headframe.dev/stage": stage, **changes.get("labels", {})},
        "annotations": {"headframe.dev/spec-digest": digest, **changes.get("annotations", {})},
        "ownerReferences": [{"uid": changes.get("owner", UID), "controller": True}],
        **({"deletionTimestamp": EARLIER} if changes.get("deleting") else {}),
    }
    spec = {"completions": shards, "parallelism": min(2, shards), **changes.get("spec", {})}
    status = dict(changes.get("status", {}))
    if "ended" in changes:
        kind, reason = changes["ended"]
        status["conditions"] = [{"type": kind, "status": "True", "reason": reason, "message": reason}]
    return {"metadata": metadata, "spec": spec, "status": status}


def pod(stage: str, index: int | None = None, **changes: Any) -> Json:
    """A pod of a stage. ``run``, ``wait``, ``exit``, ``unschedulable`` say how it stands."""
    name = f"job-{stage}" + ("" if index is None else f"-{index}")
    conditions: list[Json] = []
    state: Json = {}
    phase, ready = "Pending", False
    if "unschedulable" in changes:
        conditions.append({"type": "PodScheduled", "status": "False", "message": changes["unschedulable"]})
    if "wait" in changes:
        reason, message = changes["wait"]
        state = {"waiting": {"reason": reason, "message": message}}
    if changes.get("run"):
        phase, ready, state = "Running", changes.get("probed", True), {"running": {"startedAt": EARLIER}}
        conditions.append({"type": "Ready", "status": str(changes.get("ready", True))})
    if "exit" in changes:
        code = changes["exit"]
        phase = "Failed" if code else "Succeeded"
        said = changes.get("said", {})
        text = (
            said
            if isinstance(said, str)
            else json.dumps({"stage": stage, "exitCode": code, "reason": "Completed", **said})
        )
        state = {"terminated": {"exitCode": code, "reason": changes.get("why", "Error"), "message": text}}
    if "disrupted" in changes:
        conditions.append({"type": "DisruptionTarget", "status": "True", "reason": changes["disrupted"]})
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": changes.get("uid", f"{name}-uid"),
            "creationTimestamp": changes.get("created", EARLIER),
            "labels": {"headframe.dev/job": job_label("job"), "headframe.dev/stage": stage},
            "annotations": {} if index is None else {"batch.kubernetes.io/job-completion-index": str(index)},
            "ownerReferences": [{"uid": changes.get("owner", f"{stage}-uid"), "controller": True}],
            **({"deletionTimestamp": changes["deleted"]} if "deleted" in changes else {}),
        },
        "spec": {"nodeName": "" if "unschedulable" in changes else "node-1"},
        "status": {
            "phase": phase,
            "podIP": "10.0.0.1",
            "conditions": conditions,
            "containerStatuses": [{"name": "worker", "ready": ready, "state": state}],
        },
    }


def event(about: str, reason: str, message: str) -> Json:
    """A Warning Event about an object."""
    return {
        "metadata": {"creationTimestamp": EARLIER},
        "involvedObject": {"uid": about},
        "reason": reason,
        "message": message,
        "lastTimestamp": EARLIER,
    }


def snapshot(x: Json, jobs: list[Json] | None = None, pods: list[Json] | None = None, **more: Any) -> Snapshot:
    """What the operator would know, from the objects as the API server has them."""
    views = [job_view(raw) for raw in jobs or []]
    return Snapshot(
        extraction=extraction_view(x),
        jobs={view.stage: view for view in views if view.owner_uid == x["metadata"]["uid"]},
        taken={view.stage: "taken" for view in views if view.owner_uid != x["metadata"]["uid"]},
        pods=tuple(pod_view(raw) for raw in pods or []),
        warnings=tuple(warning_view(raw) for raw in more.get("events", ())),
        workload=workload_view(more["workload"], "/workloads") if more.get("workload") else None,
        polls=more.get("polls", {}),
        refusals=more.get("refusals", {}),
    )
