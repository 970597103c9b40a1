"""Entry point `headframe-operator`: puts the parts together and keeps kopf running."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys

import aiohttp
import kopf
from prometheus_client import REGISTRY

from headframe_api.errors import HeadframeError
from headframe_api.names import GROUP, PLURAL, VERSION
from headframe_operator.api_server import ApiError, ApiServer, connect
from headframe_operator.audit import Audit
from headframe_operator.handlers import register
from headframe_operator.kopf_start import start_in_linear_time
from headframe_operator.logs import configure_logs
from headframe_operator.metrics import JobsCollector
from headframe_operator.mirror import Key, Mirror
from headframe_operator.poller import Poller, session_for_workers
from headframe_operator.polling import poll_forever
from headframe_operator.reconcile import Reconciler
from headframe_operator.settings import Settings, read_settings
from headframe_operator.web import serve
from headframe_operator.work_queue import WorkQueue

_log = logging.getLogger(__name__)
_WAIT_FOR_CRD_SECONDS = 2.0


class Operator:
    """One run of the watches, from the first list to the end; a new one starts where the CRD went away and came back."""

    def __init__(self, api: ApiServer, session: aiohttp.ClientSession, settings: Settings) -> None:
        self._api = api
        self._session = session
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []
        self._mirror: Mirror | None = None
        self._audit: Audit | None = None
        self._queue: WorkQueue | None = None
        self._collector: JobsCollector | None = None
        self._woken = False

    async def run(self) -> None:
        """Watch and act until SIGTERM or SIGINT, which kopf takes while it runs, or until the watches fail."""
        start_in_linear_time()
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(kopf.login_via_client)
        register(
            registry,
            watch_silence_seconds=self._settings.watch_silence_seconds,
            started=self._start,
            stopped=self._stop,
            wake=self._wake,
            forget=self._forget,
        )
        try:
            await kopf.operator(
                registry=registry,
                standalone=True,
                clusterwide=not self._settings.namespaces,
                namespaces=self._settings.namespaces,
            )
        finally:
            await self._stop()
            if self._collector is not None:
                REGISTRY.unregister(self._collector)

    def ill(self) -> str | None:
        """Why the process should be restarted."""
        return self._audit.dead_watch if self._audit is not None else None

    def unready(self) -> str | None:
        """Why it does not serve yet, or not now."""
        if self._audit is None:
            return "the watches have not started"
        if not self._audit.passed:
            return "the API server has not answered lately"
        # kopf tells of nothing before it has listed everything.
        return "not all that exists is listed yet" if self._audit.objects and not self._woken else None

    def _start(self, mirror: Mirror) -> None:
        poller = Poller(self._session, self._settings)
        reconciler = Reconciler(self._api, mirror, poller, self._settings)
        queue = WorkQueue(reconciler.reconcile, self._settings.reconcile_concurrency, mirror.rest_seconds)
        self._mirror, self._queue = mirror, queue
        self._audit = Audit(self._api, mirror, queue, self._settings)
        self._collector = JobsCollector(mirror.extractions, mirror.jobs)
        REGISTRY.register(self._collector)
        interval = self._settings.poll_interval_seconds
        self._tasks = [
            asyncio.create_task(poll_forever(mirror, reconciler, queue, interval), name="polling"),
            asyncio.create_task(self._audit.run(), name="audit"),
        ]

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._queue is not None:
            await self._queue.stop()

    def _wake(self, key: Key) -> None:
        self._woken = True
        if self._queue is not None:
            self._queue.add(key)

    def _forget(self, uid: str) -> None:
        if self._mirror is not None:
            self._mirror.forget(uid)


async def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. While the CRD is missing it waits; when it comes, the watches start anew."""
    current: list[Operator] = []
    async with (
        connect() as api,
        session_for_workers() as session,
        serve(
            settings.port,
            ill=lambda: current[-1].ill() if current else None,
            unready=lambda: current[-1].unready() if current else "waits for the CRD or the API server",
        ),
    ):
        while await _crd_comes(api, settings):
            _log.info("watches %s", ", ".join(settings.namespaces) or "all namespaces")
            current.append(Operator(api, session, settings))
            try:
                await current[-1].run()
            except Exception:
                lacking = await _lacking(api, settings)
                if lacking is None:
                    raise
                _log.warning("the watches ended for want of %s", lacking)
            else:
                return
            finally:
                current.clear()


async def _crd_comes(api: ApiServer, settings: Settings) -> bool:
    """Wait until the CRD is served; false where the process is told to stop meanwhile."""
    stop, told = asyncio.Event(), ""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    while not stop.is_set():
        lacking = await _lacking(api, settings)
        if lacking is None:
            return True
        if lacking != told:
            _log.warning("waits for %s", lacking)
            told = lacking
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _WAIT_FOR_CRD_SECONDS)
    return False


async def _lacking(api: ApiServer, settings: Settings) -> str | None:
    """What is needed before anything can be watched; None where all is there."""
    scope = f"/namespaces/{settings.namespaces[0]}" if settings.namespaces else ""
    try:
        await api.list(f"/apis/{GROUP}/{VERSION}{scope}/{PLURAL}", metadata_only=True)
    except ApiError as error:
        if error.status == 404:
            return f"the CRD {PLURAL}.{GROUP}: install crds/ or the chart"
        if error.temporary:
            return f"the API server: {error}"
        raise
    return None


def main() -> None:
    """Read the settings and run; a fault of the settings is one message, not a traceback."""
    try:
        settings = read_settings()
        configure_logs(settings)
        asyncio.run(run(settings))
    except HeadframeError as error:
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except ApiError as error:
        print(f"error: the API server refuses the operator's first request: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


if __name__ == "__main__":
    main()
