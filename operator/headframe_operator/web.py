"""What the operator serves: /metrics for Prometheus, /healthz and /readyz for the kubelet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import REGISTRY
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest


@asynccontextmanager
async def serve(port: int, ill: Callable[[], str | None], unready: Callable[[], str | None]) -> AsyncIterator[None]:
    """Serve while the context lasts. ``ill`` and ``unready`` say what is wrong, or None."""

    def probe(fault_of: Callable[[], str | None]) -> Callable[[web.Request], object]:
        async def answer(_: web.Request) -> web.Response:
            fault = fault_of()
            return web.Response(text=f"{fault or 'ok'}\n", status=200 if fault is None else 503)

        return answer

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", probe(ill))  # type: ignore[arg-type]
    app.router.add_get("/readyz", probe(unready))  # type: ignore[arg-type]
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()
