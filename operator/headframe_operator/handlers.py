"""kopf's part: it watches, keeps the indexes, and wakes the work queue. Nothing is decided here."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import kopf

from headframe_api.names import GROUP, JOB_LABEL, PLURAL, VERSION
from headframe_operator.mirror import Key, Mirror, key_of_extraction
from headframe_operator.views import ExtractionView, JobView, PodView, extraction_view, job_view, key_of, pod_view

View = TypeVar("View")
_EXTRACTIONS, _JOBS, _PODS = (GROUP, VERSION, PLURAL), ("batch", "v1", "jobs"), ("", "v1", "pods")


class _NothingToCompare(kopf.DiffBaseStorage):
    """Event handlers ask for no differences: without this, kopf copies every object whole at every event to find them."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:  # noqa: ARG002
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:  # noqa: ARG002
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


class _Backoffs:
    """Seconds between attempts to reach the API server: without an end, and never so long that its return is missed."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1, 2), itertools.repeat(4))


def _relieved(view: View, body: kopf.Body) -> View:
    """The view, after the object itself was emptied of what nobody reads any more.

    When it starts, kopf keeps every object until all are listed; thousands of whole pods would be the operator's largest
    memory by far.
    """
    raw: dict[str, Any] = dict(body)
    raw["metadata"].pop("managedFields", None)
    raw["spec"].clear()
    raw.get("status", {}).clear()
    return view


def register(
    registry: kopf.OperatorRegistry,
    *,
    watch_silence_seconds: float,
    started: Callable[[Mirror], None],
    stopped: Callable[[], Awaitable[None]],
    wake: Callable[[Key], None],
    forget: Callable[[str], None],
) -> None:
    """Register the watches. ``started`` gets the mirror before anything is told, ``stopped`` is awaited at the end;
    every event wakes its key, and the uid of what was deleted is forgotten. The handlers are coroutines though they
    wait for nothing: kopf would run plain functions in threads, which costs more than they do."""

    @kopf.on.startup(registry=registry)  # type: ignore[arg-type]  # kopf passes indexes by name
    async def start(*, settings: kopf.OperatorSettings, extractions: Any, jobs: Any, pods: Any, **_: Any) -> None:
        settings.posting.enabled = False  # our own Events say more
        settings.scanning.disabled = True  # no need to list CRDs and namespaces
        settings.persistence.diffbase_storage = _NothingToCompare()
        settings.watching.connect_timeout = 10
        settings.watching.server_timeout = 300
        settings.watching.inactivity_timeout = watch_silence_seconds
        settings.watching.chunk_size = 250
        settings.networking.request_timeout = 60
        settings.networking.error_backoffs = _Backoffs()
        settings.watching.label_selectors["batch", "v1", "jobs"] = JOB_LABEL
        settings.watching.label_selectors["", "v1", "pods"] = JOB_LABEL
        started(Mirror(extractions, jobs, pods))

    @kopf.on.cleanup(registry=registry)  # kopf waits for tasks that are left, as if they hung
    async def stop(**_: Any) -> None:
        await stopped()

    @kopf.index(*_EXTRACTIONS, id="extractions", registry=registry)
    async def extractions(body: kopf.Body, **_: Any) -> dict[Key, ExtractionView]:
        view = extraction_view(dict(body))
        return {key_of_extraction(view.namespace, view.name): view}

    @kopf.index(*_JOBS, id="jobs", registry=registry)
    async def jobs(body: kopf.Body, **_: Any) -> dict[Key, JobView]:
        return {key_of(body): _relieved(job_view(body), body)}

    @kopf.index(*_PODS, id="pods", registry=registry)
    async def pods(body: kopf.Body, **_: Any) -> dict[Key, PodView]:
        return {key_of(body): _relieved(pod_view(body), body)}

    @kopf.on.event(*_EXTRACTIONS, registry=registry)
    async def extraction_changed(body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002  (kopf's word)
        if type == "DELETED":
            forget(body["metadata"]["uid"])
        wake(key_of_extraction(body["metadata"]["namespace"], body["metadata"]["name"]))

    @kopf.on.event(*_JOBS, registry=registry)
    @kopf.on.event(*_PODS, registry=registry)
    async def child_changed(body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002  (kopf's word)
        if type == "DELETED":
            forget(body["metadata"]["uid"])
        wake(key_of(body))
