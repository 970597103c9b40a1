"""Runs a real component as a child process: its output to a file, ready when it says so, ended with the tests."""

import ctypes
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Process:
    """A child process that is started and stopped as often as a test likes, always with the same command.

    Its output is appended to `log`. It is killed when the thread that started it ends, so that no server outlives an
    aborted test run; start it from the main thread.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        *,
        ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 60,
    ) -> None:
        self.name = Path(command[0]).name
        self.log = log
        self._command = [str(word) for word in command]
        self._ready = ready
        self._environment = environment
        self._timeout_seconds = timeout_seconds
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; an error when it is not running."""
        if self._child is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._child is not None and self._child.poll() is None

    def launch(self) -> None:
        """Start the process and return at once, so that components which need each other start together."""
        if self._child is not None:
            raise RuntimeError(f"{self.name} is already running")
        with self.log.open("ab") as output:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  (prctl is all it does)
            )

    def wait_ready(self) -> None:
        """Return when the component is ready; raise RuntimeError with the end of its log where it died or is late."""
        try:
            wait_until(lambda: not self.running or self._ready(), self._timeout_seconds)
        except TimeoutError:
            raise RuntimeError(f"{self.name} was not ready in {self._timeout_seconds} s\n{self.tail()}") from None
        if not self.running:
            raise RuntimeError(f"{self.name} ended while it started\n{self.tail()}")

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        self.launch()
        self.wait_ready()

    def stop(self, *, kill: bool = False, grace_seconds: float = 10) -> None:
        """End the process: SIGTERM, then SIGKILL after the grace period, or SIGKILL at once."""
        child, self._child = self._child, None
        if child is None:
            return
        child.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            child.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def tail(self, lines: int = 40) -> str:
        """The end of the log, for error messages."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def wait_until(condition: Callable[[], object], timeout_seconds: float = 30, poll_seconds: float = 0.05) -> None:
    """Return when `condition` is true; raise TimeoutError when it stays false."""
    deadline = time.monotonic() + timeout_seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true within {timeout_seconds} s: {condition}")
        pause.wait(poll_seconds)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def listens(host: str, port: int) -> bool:
    """Whether a TCP connection to the port succeeds."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0
