"""What the operator keeps of each Kubernetes object: a few fields in a frozen dataclass, so that thousands fit in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from sys import intern
from typing import Any

from pydantic import ValidationError

from headframe_api.errors import ConfigError
from headframe_api.names import JOB_LABEL, QUEUE_LABEL, STAGE_LABEL
from headframe_api.parse import parse_job
from headframe_api.progress import TerminationMessage
from headframe_api.spec import ExtractionJobSpec
from headframe_api.status import ExtractionJobStatus
from headframe_operator.times import from_text

Json = Mapping[str, Any]

SPEC_DIGEST_ANNOTATION = "headframe.dev/spec-digest"
"""On a Job: digest of the part of the spec that its pods were made from and that may change."""
WORKERS_ANNOTATION = "headframe.dev/workers"
"""On a Job that Kueue manages: the parallelism that was last asked for, for Kueue may have granted less."""
COMPLETION_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
_MESSAGE_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class ExtractionView:
    """One ExtractionJob. ``fault`` says what is wrong with a document that is no valid one; then ``spec`` is None."""

    name: str
    namespace: str
    uid: str
    generation: int
    created: datetime
    deleting: bool
    labels: Mapping[str, str]
    kueue_annotations: Mapping[str, str]
    spec: ExtractionJobSpec | None
    document: Json
    """What the stages get to read: the manifest without status and server's fields."""
    fault: str | None
    status: ExtractionJobStatus
    version: int = 0
    """resourceVersion: which of two views is newer."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A batch/v1 Job of one stage."""

    name: str
    namespace: str
    uid: str
    owner_uid: str
    job_label: str
    stage: str
    created: datetime
    deleting: bool
    suspended: bool
    parallelism: int
    completions: int
    active: int
    ready: int
    succeeded: int
    failed_indexes: str
    completed_indexes: str
    failed_pods: int
    """Failures that count: those that podFailurePolicy ignores are not among them."""
    finished: str | None
    """`Complete` or `Failed`, once it is decided: also while the last pods still end."""
    finish_reason: str
    finish_message: str
    queued: bool
    """Whether Kueue manages it."""
    spec_digest: str
    asked_workers: int | None
    version: int = 0
    """resourceVersion: which of two views is newer."""


@dataclass(frozen=True, slots=True)
class Report:
    """A pod's termination message; ``reason`` is empty where the message is not ours but the end of its log."""

    reason: str
    message: str
    samples: int = 0
    tokens: int = 0
    quarantined: int = 0
    details: TerminationMessage | None = None
    """The whole message, of prepare and finalize, which carry the plan and the output."""


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod of one stage."""

    name: str
    namespace: str
    uid: str
    job_uid: str
    job_label: str
    stage: str
    index: int | None
    phase: str
    address: str
    node: str
    created: datetime
    deletion_due: datetime | None
    """When the pod should be gone: the deletion's time with its grace period."""
    unschedulable: str
    """The scheduler's own words, where it found no node."""
    ready: bool
    container_ready: bool
    waiting_reason: str
    waiting_message: str
    running: bool
    exit_code: int | None
    terminated_reason: str
    disruption: str
    """Why Kubernetes took the pod away: the reason of its condition DisruptionTarget."""
    failure: str
    """The pod's own reason and message where it has one, such as Evicted."""
    report: Report | None


@dataclass(frozen=True, slots=True)
class WarningView:
    """A Kubernetes Event of type Warning."""

    about_uid: str
    reason: str
    message: str
    seen: datetime


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """Kueue's Workload of the extract Job."""

    path: str
    """Where the API server has it: Kueue's versions differ in what they let a patch do."""
    active: bool
    admitted: bool
    reason: str
    message: str
    evicted: str


def key_of(raw: Json) -> tuple[str, str]:
    """Namespace and job label: what ties an ExtractionJob and its children together."""
    metadata = raw["metadata"]
    return str(metadata["namespace"]), str(metadata.get("labels", {}).get(JOB_LABEL, ""))


def extraction_view(raw: Json) -> ExtractionView:
    """The view of an ExtractionJob as the API server has it."""
    metadata = raw["metadata"]
    spec, document, fault = None, {}, None
    try:
        job = parse_job(dict(raw), where=f"ExtractionJob {metadata['name']}")
        spec, document = job.spec, job.without_server_fields()
    except ConfigError as error:
        fault = error.message
    try:
        status = ExtractionJobStatus.model_validate(raw.get("status") or {})
    except ValidationError:
        status = ExtractionJobStatus()  # written by something else: it is rebuilt from what is observed
    return ExtractionView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        created=_moment(metadata["creationTimestamp"]),
        deleting="deletionTimestamp" in metadata,
        labels=dict(metadata.get("labels", {})),
        kueue_annotations={
            name: value for name, value in metadata.get("annotations", {}).items() if name.startswith("kueue.x-k8s.io/")
        },
        spec=spec,
        document=document,
        fault=fault,
        status=status,
        version=_version(metadata),
    )


def job_view(raw: Json) -> JobView:
    """The view of a Job as the API server has it."""
    metadata, spec, status = raw["metadata"], raw["spec"], raw.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", ()) if c["status"] == "True"}
    # The early conditions stand before the last pods have ended; they are as final as the late ones.
    end = next((conditions[kind] for kind in ("Complete", "Failed", "FailureTarget") if kind in conditions), None)
    annotations = metadata.get("annotations", {})
    asked = annotations.get(WORKERS_ANNOTATION)
    return JobView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        owner_uid=_controller_uid(metadata),
        job_label=metadata.get("labels", {}).get(JOB_LABEL, ""),
        stage=metadata.get("labels", {}).get(STAGE_LABEL, ""),
        created=_moment(metadata["creationTimestamp"]),
        deleting="deletionTimestamp" in metadata,
        suspended=bool(spec.get("suspend", False)),
        parallelism=spec.get("parallelism", 1),
        completions=spec.get("completions", 1),
        active=status.get("active", 0),
        ready=status.get("ready", 0),
        succeeded=status.get("succeeded", 0),
        failed_indexes=status.get("failedIndexes", ""),
        completed_indexes=status.get("completedIndexes", ""),
        failed_pods=status.get("failed", 0),
        finished=None if end is None else ("Complete" if end["type"] == "Complete" else "Failed"),
        finish_reason="" if end is None else end.get("reason", ""),
        finish_message="" if end is None else end.get("message", ""),
        queued=QUEUE_LABEL in metadata.get("labels", {}),
        spec_digest=annotations.get(SPEC_DIGEST_ANNOTATION, ""),
        asked_workers=int(asked) if asked is not None and asked.isdigit() else None,
        version=_version(metadata),
    )


def pod_view(raw: Json) -> PodView:
    """The view of a pod as the API server has it. A terminal pod may have no container status at all.

    Strings that thousands of pods share are kept once.
    """
    metadata, status = raw["metadata"], raw.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    scheduled, disrupted = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    container: Json = next(iter(status.get("containerStatuses", ())), {})
    state = container.get("state", {})
    waiting, terminated = state.get("waiting", {}), state.get("terminated")
    index = metadata.get("annotations", {}).get(COMPLETION_INDEX_ANNOTATION)
    stage = metadata.get("labels", {}).get(STAGE_LABEL, "")
    return PodView(
        name=metadata["name"],
        namespace=intern(metadata["namespace"]),
        uid=metadata["uid"],
        job_uid=intern(_controller_uid(metadata)),
        job_label=intern(metadata.get("labels", {}).get(JOB_LABEL, "")),
        stage=intern(stage),
        index=None if index is None else int(index),
        phase=status.get("phase", "Pending"),
        address=status.get("podIP", ""),
        node=intern(raw.get("spec", {}).get("nodeName", "")),
        created=_moment(metadata["creationTimestamp"]),
        deletion_due=from_text(metadata.get("deletionTimestamp")),
        unschedulable=scheduled.get("message", "") if scheduled.get("status") == "False" else "",
        ready=conditions.get("Ready", {}).get("status") == "True",
        container_ready=bool(container.get("ready", False)),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", "")[:_MESSAGE_LIMIT],
        running="running" in state,
        exit_code=None if terminated is None else terminated.get("exitCode"),
        terminated_reason="" if terminated is None else terminated.get("reason", ""),
        disruption=disrupted.get("reason", "") if disrupted.get("status") == "True" else "",
        failure=": ".join(status[part] for part in ("reason", "message") if status.get(part)),
        report=None if terminated is None else _report(terminated.get("message", ""), stage),
    )


def warning_view(raw: Json) -> WarningView:
    """The view of a core/v1 Event."""
    seen = raw.get("lastTimestamp") or raw.get("eventTime") or raw["metadata"]["creationTimestamp"]
    return WarningView(
        about_uid=raw["involvedObject"].get("uid", ""),
        reason=raw.get("reason", ""),
        message=(raw.get("message") or "")[:_MESSAGE_LIMIT],
        seen=_moment(seen),
    )


def workload_view(raw: Json, collection: str) -> WorkloadView:
    """The view of a kueue.x-k8s.io Workload, from the collection at a path."""
    conditions = {c["type"]: c for c in raw.get("status", {}).get("conditions", ())}
    admitted = conditions.get("Admitted", {}).get("status") == "True"
    evicted = conditions.get("Evicted", {})
    if evicted.get("reason") == "Deactivated":
        evicted = {}  # by us, at the user's word
    waits = conditions.get("QuotaReserved", {})
    return WorkloadView(
        path=f"{collection}/{raw['metadata']['name']}",
        active=raw.get("spec", {}).get("active", True),
        admitted=admitted,
        reason=waits.get("reason", "") if not admitted else "",
        message=waits.get("message", "") if not admitted else "",
        evicted=f"{evicted.get('reason', '')}: {evicted.get('message', '')}" if evicted.get("status") == "True" else "",
    )


def _report(text: str, stage: str) -> Report | None:
    """Our own JSON, or the end of the log, which Kubernetes gives where a container failed without a message."""
    if not text.strip():
        return None
    try:
        message = TerminationMessage.model_validate_json(text)
    except ValidationError:
        return Report(reason="", message=text.strip()[-_MESSAGE_LIMIT:])
    return Report(
        reason=message.reason,
        message=message.message,
        samples=message.samples,
        tokens=message.tokens,
        quarantined=message.quarantined,
        details=message if stage != "extract" else None,
    )


def _controller_uid(metadata: Json) -> str:
    return next((owner["uid"] for owner in metadata.get("ownerReferences", ()) if owner.get("controller")), "")


def _version(metadata: Json) -> int:
    return int(metadata.get("resourceVersion", 0))


def _moment(text: str) -> datetime:
    moment = from_text(text)
    if moment is None:
        raise ValueError("an object without a creation time")
    return moment
