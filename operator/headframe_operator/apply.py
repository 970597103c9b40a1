"""Carries out a decision: creates, changes and deletes children, writes the status, posts the notes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Mapping
from datetime import UTC, datetime
from typing import Any

from headframe_api.names import API_VERSION, GROUP, KIND, PLURAL, VERSION
from headframe_api.status import ExtractionJobStatus
from headframe_operator.api_server import ApiError, ApiServer
from headframe_operator.decision import Decision, Deletion, Note, Update
from headframe_operator.metrics import CHILDREN_CREATED
from headframe_operator.mirror import Mirror
from headframe_operator.snapshot import Refusal
from headframe_operator.times import to_text
from headframe_operator.views import WORKERS_ANNOTATION, ExtractionView, WorkloadView

_log = logging.getLogger(__name__)
_REFUSED = (400, 403, 422)
_ANOTHER_OWNER = "Only one reference can have Controller set to true"
"""What the API server says where the Job to apply exists and another ExtractionJob owns it."""


def extraction_path(x: ExtractionView) -> str:
    """The path of an ExtractionJob on the API server."""
    return f"/apis/{GROUP}/{VERSION}/namespaces/{x.namespace}/{PLURAL}/{x.name}"


def jobs_path(namespace: str) -> str:
    """The path of a namespace's Jobs."""
    return f"/apis/batch/v1/namespaces/{namespace}/jobs"


class Applier:
    """Writes to the API server. It decides nothing."""

    def __init__(self, api: ApiServer, mirror: Mirror) -> None:
        self._api = api
        self._mirror = mirror

    async def children(self, x: ExtractionView, decision: Decision) -> dict[str, Refusal]:
        """Create, change and delete Jobs. Returns what the API server refused for good, by stage."""
        refusals = {}
        for stage, manifest in decision.create.items():
            refusal = await self._create(x, stage, manifest)
            if refusal is not None:
                refusals[stage] = refusal
        for update in decision.update:
            await self._update(x, update)
        for deletion in decision.delete:
            await self._delete(x, deletion)
        return refusals

    async def workload(self, workload: WorkloadView, active: bool) -> None:
        """Tell Kueue to hold a job back, or to take it up again."""
        await self._api.patch(workload.path, {"spec": {"active": active}})

    async def status(self, x: ExtractionView, status: ExtractionJobStatus) -> int | None:
        """Write the whole status; returns the version that has it. Where the ExtractionJob is gone, or another has its name, there is nobody to tell."""
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": x.name, "namespace": x.namespace, "uid": x.uid},
            "status": status.to_dict(),
        }
        try:
            answer = await self._api.apply(f"{extraction_path(x)}/status", body)
        except ApiError as error:
            if not error.gone:
                raise
            self._mirror.forget(x.uid)
            return None
        return int(answer["metadata"]["resourceVersion"])

    async def extraction(self, x: ExtractionView) -> None:
        """Delete an ExtractionJob whose time to live is over."""
        try:
            await self._api.delete(extraction_path(x), x.uid)
        except ApiError as error:
            if not error.gone:
                raise
        _log.info("deleted: its ttlSecondsAfterFinished is over", extra=_about(x))

    async def note(self, x: ExtractionView, note: Note) -> None:
        """Post an Event. Its name follows from what it says, so that it is posted once, whoever repeats it."""
        now = to_text(datetime.now(UTC))
        told = f"{x.uid}/{note.reason}/{note.message}/{x.generation}"
        digest = hashlib.sha256(told.encode()).hexdigest()[:16]
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{x.name[:200]}.{digest}", "namespace": x.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": x.name,
                "namespace": x.namespace,
                "uid": x.uid,
            },
            "type": note.type,
            "reason": note.reason,
            "message": note.message[:1024],
            "source": {"component": "headframe-operator"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        level = logging.INFO if note.type == "Normal" else logging.WARNING
        _log.log(level, "%s: %s", note.reason, note.message, extra=_about(x))
        try:
            await self._api.create(f"/api/v1/namespaces/{x.namespace}/events", body)
        except ApiError as error:
            if error.status != 409:
                _log.warning("an Event could not be posted: %s", error, extra=_about(x))

    async def _create(self, x: ExtractionView, stage: str, manifest: Mapping[str, Any]) -> Refusal | None:
        try:
            answer = await self._api.apply(f"{jobs_path(x.namespace)}/{manifest['metadata']['name']}", manifest)
        except ApiError as error:
            if _ANOTHER_OWNER in error.message:
                return None  # a namesake's, still being deleted: the watch will tell
            if error.status in _REFUSED or error.status == 404:
                return Refusal(error.reason or "Refused", error.message)
            raise
        self._mirror.wrote_job(answer)
        CHILDREN_CREATED.labels(stage).inc()
        _log.info("created Job %s", answer["metadata"]["name"], extra=_about(x))
        return None

    async def _update(self, x: ExtractionView, update: Update) -> None:
        spec: dict[str, Any] = {}
        metadata: dict[str, Any] = {"name": update.name, "namespace": x.namespace, "uid": update.uid}
        if update.suspend is not None:
            spec["suspend"] = update.suspend
        if update.parallelism is not None:
            spec["parallelism"] = update.parallelism
            metadata["annotations"] = {WORKERS_ANNOTATION: str(update.parallelism)}
        body = {"metadata": metadata, "spec": spec}
        answer = await self._unless_gone(self._api.patch(f"{jobs_path(x.namespace)}/{update.name}", body), update.uid)
        if answer:
            self._mirror.wrote_job(answer)
        _log.info("changed Job %s: %s", update.name, spec, extra=_about(x))

    async def _delete(self, x: ExtractionView, deletion: Deletion) -> None:
        path = f"{jobs_path(x.namespace)}/{deletion.name}"
        await self._unless_gone(self._api.delete(path, deletion.uid), deletion.uid)
        _log.info("deleted Job %s", deletion.name, extra=_about(x))

    async def _unless_gone(self, request: Awaitable[Any], uid: str) -> Any:
        try:
            return await request
        except ApiError as error:
            if not error.gone:
                raise
            self._mirror.forget(uid)
            return None


def _about(x: ExtractionView) -> dict[str, str]:
    return {"namespace": x.namespace, "job": x.name}
