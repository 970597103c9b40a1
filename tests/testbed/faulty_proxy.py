"""An HTTP proxy before a real S3 server that misbehaves as servers do: loses answers, refuses, cuts bodies, knows fewer headers."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from testbed.s3 import S3Server


@dataclass(frozen=True)
class Request:
    """What a fault decides on."""

    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """Names in lower case."""

    @property
    def operation(self) -> str:
        """S3's name of the few operations that tests strike."""
        query = self.path.partition("?")[2]
        if "uploadId=" in query:
            return {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}[
                self.method
            ]
        if "uploads" in query:
            return {"POST": "CreateMultipartUpload", "GET": "ListMultipartUploads"}[self.method]
        if "list-type=2" in query:
            return "ListObjectsV2"
        names = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
        return names.get(self.method, "DeleteObjects")


@dataclass
class Fault:
    """What happens to the next `times` requests for which `when` holds."""

    when: Callable[[Request], bool]
    times: int = 1
    answer: tuple[int, str] | None = None
    """(status, code): the server is not asked at all."""
    lose_answer: bool = False
    """The server does what it is asked, and the connection closes before it says so."""
    truncate_bytes: int | None = None
    """Only so much of the body arrives, then the connection closes."""
    flip_byte: bool = False
    """One byte of the body is another one."""
    before: Callable[[], object] | None = None
    """Called first; other requests go on meanwhile."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of `answer`."""
    text: str | None = None
    """Body of `answer`, such as a gateway's page, instead of S3's XML."""


def operation(*names: str) -> Callable[[Request], bool]:
    """True for these operations of S3."""
    return lambda request: request.operation in names


class FaultyProxy:
    """A context manager; `endpoint` stands before `server`. `requests` counts operations that came in."""

    def __init__(self, server: S3Server, *, without_headers: tuple[str, ...] = ()) -> None:
        self.server = server
        self.without_headers = without_headers
        """Headers that this server does not know: they are taken off, and the request is signed anew."""
        self.requests: Counter[str] = Counter()
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """The address, as `spec.s3.endpoint` takes it."""
        return f"http://127.0.0.1:{self._http.server_port}"

    def inject(self, when: Callable[[Request], bool], *, times: int = 1, **fault: object) -> Fault:
        """Add a fault; it strikes `times` requests."""
        made = Fault(when, times, **fault)  # type: ignore[arg-type]
        with self._lock:
            self._faults.append(made)
        return made

    def next_fault(self, request: Request) -> Fault | None:
        """The fault that strikes this request."""
        with self._lock:
            self.requests[request.operation] += 1
            for fault in self._faults:
                if fault.times > 0 and fault.when(request):
                    fault.times -= 1
                    return fault
        return None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()


def _handler(proxy: FaultyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # an answer is two writes, and the second must not wait

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
            fault = proxy.next_fault(request)
            if fault and fault.before:
                fault.before()
            if fault and fault.answer:
                self._answer(*fault.answer, fault.headers, fault.text)
                return
            upstream = http.client.HTTPConnection(proxy.server.host, proxy.server.port, timeout=60)
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self._forwarded(request).items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            content = answer.read()
            upstream.close()
            if fault and fault.lose_answer:
                self.close_connection = True
                return
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", *proxy.without_headers):
                    self.send_header(name, value)
            self.end_headers()
            if fault and fault.flip_byte:
                content = bytes([content[0] ^ 1]) + content[1:]
            if fault and fault.truncate_bytes is not None:
                content = content[: fault.truncate_bytes]
                self.close_connection = True
            if self.command != "HEAD":
                self.wfile.write(content)

        def _forwarded(self, request: Request) -> dict[str, str]:
            headers = {name: value for name, value in request.headers.items() if name != "expect"}
            if not set(headers) & set(proxy.without_headers):
                return headers
            skipped = {*proxy.without_headers, "authorization", "x-amz-date", "x-amz-content-sha256"}
            signed = AWSRequest(
                self.command,
                f"http://{headers['host']}{self.path}",
                {name: value for name, value in headers.items() if name not in skipped},
            )
            credentials = Credentials(proxy.server.access_key, proxy.server.secret_key)
            _UnsignedPayload(credentials, "s3", proxy.server.region).add_auth(signed)
            return dict(signed.headers.items())

        def _answer(self, status: int, code: str, headers: dict[str, str], page: str | None) -> None:
            text = (page or f"<Error><Code>{code}</Code><Message>made by a test</Message></Error>").encode()
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(text)), "Connection": "close", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)
            self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class _UnsignedPayload(S3SigV4Auth):
    def _should_sha256_sign_payload(self, _: AWSRequest) -> bool:
        return False
