"""An HTTPS proxy before the API server, for what a TCP proxy cannot do: refuse some requests, and let watches die in silence."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web

from testbed.control_plane import ControlPlane
from testbed.loop_thread import LoopThread
from testbed.process import free_port

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "host", "content-encoding", "accept-encoding"}
_REASONS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


class ApiProxy:
    """A context manager; `url` stands before the API server of `cluster`.

    `refuse` says with which status code a request, given by method and path, is refused instead of forwarded; None
    forwards it. `refused` counts refusals by status code.
    """

    def __init__(self, cluster: ControlPlane) -> None:
        port = free_port()
        self.url = f"https://127.0.0.1:{port}"
        self.refuse: Callable[[str, str], int | None] = lambda method, path: None
        self.refused: Counter[int] = Counter()
        self._port = port
        self._upstream = cluster.url
        self._trust = ssl.create_default_context(cafile=str(cluster.authority_file))
        pair = cluster.authority.issue("api-proxy", addresses=("127.0.0.1",))
        self._identity = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._identity.load_cert_chain(pair.certificate, pair.key)
        self._frozen = False
        self._thread = LoopThread("api-proxy")

    def freeze_watches(self) -> None:
        """From now on no watch tells anything, neither those that are open nor new ones; all connections stay open."""
        self._frozen = True

    def thaw_watches(self) -> None:
        """New watches tell again. Those that were frozen have lost what they did not tell."""
        self._frozen = False

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._close())
        self._thread.stop()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self._thread.do(work, 30)

    async def _open(self) -> None:
        self._closing = asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._trust, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._identity).start()

    async def _close(self) -> None:
        self._closing.set()
        await self._session.close()
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        code = self.refuse(request.method, request.path)
        if code is not None:
            self.refused[code] += 1
            reason = _REASONS[code]
            status = {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": "made by a test"}
            return web.json_response(status, status=code, headers={"Retry-After": "1"})
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url, body = f"{self._upstream}{request.rel_url}", await request.read()
        async with self._session.request(request.method, url, headers=headers, data=body or None) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            watches, dead = "watch" in request.query, False
            async for chunk in answer.content.iter_any():
                dead = dead or (watches and self._frozen)
                if not dead:
                    with suppress(aiohttp.ClientConnectionResetError):
                        await response.write(chunk)
            if dead:
                await self._closing.wait()  # the other end has gone, and nobody says so
            return response
