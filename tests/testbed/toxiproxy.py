"""A real TCP proxy that fails on command (toxiproxy): cut, late and slow links to what Headframe talks to."""

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from testbed.process import Process, free_port, listens
from testbed.tools import go_tool


@dataclass(frozen=True)
class Proxy:
    """One listener of a Toxiproxy, at `address` (`host:port`), before `upstream`."""

    server: "Toxiproxy"
    name: str
    address: str
    upstream: str

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        self.server.request("POST", f"/proxies/{self.name}", {"enabled": False})

    def mend(self) -> None:
        """Accept connections again."""
        self.server.request("POST", f"/proxies/{self.name}", {"enabled": True})

    def add(self, kind: str, *, stream: str = "downstream", toxicity: float = 1.0, **attributes: int) -> str:
        """Add a toxic (`latency`, `bandwidth`, `timeout`, `reset_peer`, `limit_data`, ...); return its name.

        `downstream` is from the server to the client. `toxicity` is the share of connections it strikes.
        """
        body = {"type": kind, "stream": stream, "toxicity": toxicity, "attributes": attributes}
        return str(self.server.request("POST", f"/proxies/{self.name}/toxics", body)["name"])

    def remove(self, toxic: str) -> None:
        """Remove one toxic."""
        self.server.request("DELETE", f"/proxies/{self.name}/toxics/{toxic}")

    def delete(self) -> None:
        """Close the listener for good."""
        self.server.request("DELETE", f"/proxies/{self.name}")


class Toxiproxy:
    """A toxiproxy server; a context manager."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = free_port(host)
        self._process = Process(
            [go_tool("toxiproxy"), "-host", host, "-port", str(self.port)],
            folder / "toxiproxy.log",
            ready=lambda: listens(host, self.port),
        )

    def proxy(self, upstream: str) -> Proxy:
        """A new proxy before `upstream` (`host:port`), on a free port of this server's address."""
        name = f"to-{upstream.replace(':', '-')}-{free_port(self.host)}"
        made = self.request("POST", "/proxies", {"name": name, "listen": f"{self.host}:0", "upstream": upstream})
        return Proxy(self, name, str(made["listen"]), upstream)

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One call of toxiproxy's HTTP API; raises HTTPError for a refusal."""
        call = urllib.request.Request(
            f"http://{self.host}:{self.port}{path}",
            data=json.dumps(body).encode() if body is not None else None,
            method=method,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(call, timeout=10) as answer:
            text = answer.read()
        return dict(json.loads(text)) if text else {}

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stop()
