"""The worker's HTTP port: /metrics, /progress, /healthz and /readyz over the meters of one or several worker processes."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from headframe_api.errors import ConfigError
from headframe_api.progress import Progress
from headframe_worker.serve.gpus import GpuCollector
from headframe_worker.serve.health import STALLED_AFTER_SECONDS, is_ready, is_stalled
from headframe_worker.serve.metrics import MeterCollector, Meters
from headframe_worker.serve.together import together

_CLIENT_TIMEOUT_SECONDS = 10.0


class MeterServer:
    """Serves what meters count, from a thread of its own; a context manager.

    `meters` is called for each request. `progress` replaces the sum of the meters where the caller knows more than they.
    """

    def __init__(
        self,
        meters: Meters,
        *,
        port: int,
        progress: Callable[[], Progress] | None = None,
        stalled_after_seconds: float = STALLED_AFTER_SECONDS,
    ) -> None:
        self._meters = meters
        self._progress = progress or self._sum
        self._stalled_after_seconds = stalled_after_seconds
        self._registry = CollectorRegistry()
        self._registry.register(MeterCollector(meters, stalled_after_seconds=stalled_after_seconds))
        self._registry.register(GpuCollector())
        ProcessCollector(registry=self._registry)
        self._http = _listen(port, _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on, where 0 was asked for."""
        return self._http.server_port

    def answer(self, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        """(status, content type, body) of a GET."""
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return HTTPStatus.OK, content_type, encode(self._registry)
        if path == "/progress":
            return HTTPStatus.OK, "application/json", self._progress().model_dump_json(by_alias=True).encode()
        if path == "/healthz":
            stalled = is_stalled(self._meters().values(), stalled_after_seconds=self._stalled_after_seconds)
            return _verdict(good=not stalled, otherwise=f"nothing has moved for {self._stalled_after_seconds:.0f} s")
        if path == "/readyz":
            return _verdict(good=is_ready(self._meters().values()), otherwise="the model is not ready yet")
        return HTTPStatus.NOT_FOUND, "text/plain", b"there are /metrics, /progress, /healthz and /readyz\n"

    def close(self) -> None:
        """Close the port."""
        self._http.shutdown()
        self._http.server_close()

    def _sum(self) -> Progress:
        meters = self._meters().values()
        return together([meter.progress(stalled_after_seconds=self._stalled_after_seconds) for meter in meters])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _verdict(*, good: bool, otherwise: str) -> tuple[HTTPStatus, str, bytes]:
    status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
    return status, "text/plain", b"ok\n" if good else f"{otherwise}\n".encode()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "headframe", self.server_address[1]  # no look-up of our own name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up before it has its answer, because its time is over, is not news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _listen(port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    try:
        return _Listener(("", port), handler)
    except OSError as error:
        raise ConfigError(
            f"port {port}: cannot listen: {error.strerror}; choose another port, or end what uses it",
            reason="PortInUse",
        ) from error


def _handler(server: MeterServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_SECONDS
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, content_type, body = server.answer(self.path.partition("?")[0], self.headers.get("Accept", ""))
            self.send_response_only(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Probes and scrapes are not news."""

    return Handler
