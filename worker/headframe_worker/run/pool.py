"""The worker processes of a local run: hands out shards, takes the loss of a process as Kubernetes would, counts attempts."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from headframe_api.errors import ConfigError, StoppedError, TemporaryError
from headframe_api.exit_codes import ExitCode
from headframe_api.job import ExtractionJob
from headframe_api.plan import Plan
from headframe_worker.meter import Meter
from headframe_worker.run.devices import worker_cpus
from headframe_worker.run.worker import Message, Ready, ShardDone, WorkerFailed, work

GRACE_SECONDS = 60.0
_POLL_SECONDS = 0.2
_RETRY_PAUSE_SECONDS = 1.0
_SPAWN = multiprocessing.get_context("spawn")


@dataclass
class Worker:
    """One place for a process; the process in it may be replaced."""

    index: int
    gpus: Sequence[str]
    cpus: frozenset[int]
    """Where its process runs; empty leaves it to the kernel."""
    process: BaseProcess | None = None
    connection: Connection | None = None
    shard: int | None = None
    ready: bool = False
    not_before: float = 0.0
    failure: WorkerFailed | None = None
    meter: Meter = field(default_factory=lambda: Meter("extract"))


@dataclass
class PoolResult:
    """What became of the shards."""

    done: dict[int, ShardDone] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    """Shards that were given up, with the last message."""


class WorkerPool:
    """Runs shards over worker processes until each is done or given up."""

    def __init__(
        self, job: ExtractionJob, plan: Plan, devices: Sequence[Sequence[str]], *, scratch: Path, stop: threading.Event
    ) -> None:
        cpus = worker_cpus(devices)
        self.workers = [Worker(index, gpus, cpus[index]) for index, gpus in enumerate(devices)]
        self.result = PoolResult()
        self._job, self._plan, self._scratch, self._stop = job, plan, scratch, stop
        self._attempts: Counter[int | None] = Counter()
        self._queue: deque[int] = deque()
        self._threads = None if job.spec.model.gpus else max(1, (os.cpu_count() or 1) // len(devices))

    def run(self, shards: Sequence[int], on_update: Callable[[], None]) -> PoolResult:
        """Work on all shards; on_update is called a few times a second.

        Raises ConfigError where no shard can succeed, StoppedError after the stop event, TemporaryError where workers
        cannot even start.
        """
        self._queue.extend(shards)
        try:
            while self._queue or any(worker.shard is not None for worker in self.workers):
                if self._stop.is_set():
                    raise StoppedError("stopped before all shards were done")
                self._fill_places()
                self._listen()
                on_update()
        except KeyboardInterrupt:
            for worker in self.workers:
                if worker.process is not None:
                    worker.process.kill()
            raise
        finally:
            self._end_all()
        return self.result

    def meters(self) -> dict[str, Meter]:
        """What each worker counted last, by its number."""
        return {str(worker.index): worker.meter for worker in self.workers}

    def _fill_places(self) -> None:
        for worker in self.workers:
            if worker.process is None and self._queue and time.monotonic() >= worker.not_before:
                self._start(worker)
            if worker.ready and worker.shard is None and self._queue and worker.connection is not None:
                worker.shard = self._queue.popleft()
                worker.connection.send(worker.shard)

    def _start(self, worker: Worker) -> None:
        worker.connection, theirs = _SPAWN.Pipe()
        scratch = self._scratch / f"worker-{worker.index}"
        scratch.mkdir(parents=True, exist_ok=True)
        worker.process = _SPAWN.Process(
            target=work,
            args=(theirs, self._job, self._plan, scratch, self._threads, worker.cpus),
            name=f"headframe-{worker.index}",
        )
        with _environment(CUDA_VISIBLE_DEVICES=",".join(worker.gpus)):
            worker.process.start()
        theirs.close()
        worker.ready, worker.failure = False, None

    def _listen(self) -> None:
        by_connection = {worker.connection: worker for worker in self.workers if worker.connection is not None}
        if not by_connection:
            self._stop.wait(_POLL_SECONDS)
            return
        for connection in wait(list(by_connection), timeout=_POLL_SECONDS):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                self._receive(worker, worker.connection.recv())  # type: ignore[union-attr]
            except (EOFError, OSError):
                self._ended(worker)

    def _receive(self, worker: Worker, message: Message) -> None:
        if isinstance(message, Meter):
            worker.meter = message
        elif isinstance(message, Ready):
            worker.ready = True
        elif isinstance(message, ShardDone):
            self.result.done[message.shard] = message
            worker.shard = None
        else:
            worker.failure = message

    def _ended(self, worker: Worker) -> None:
        """A process is gone: by its own word, or killed."""
        process, shard, failure = worker.process, worker.shard, worker.failure
        assert process is not None  # noqa: S101
        process.join()
        if failure is None:
            failure = WorkerFailed(
                process.exitcode or 1, "Killed", f"worker process ended with code {process.exitcode}"
            )
        if worker.connection is not None:
            worker.connection.close()
        worker.process = worker.connection = worker.shard = None
        worker.ready = False
        worker.not_before = time.monotonic() + _RETRY_PAUSE_SECONDS
        if failure.exit_code == ExitCode.CONFIG:
            raise ConfigError(failure.message, reason=failure.reason)
        if failure.exit_code == ExitCode.TERMINATED and self._stop.is_set():
            if shard is not None:
                self._queue.appendleft(shard)
            return
        self._attempts[shard] += 1
        spent = self._attempts[shard] > self._job.spec.failure_policy.retries_per_shard
        if shard is None:
            if spent:
                raise TemporaryError(f"workers cannot start: {failure.message}", reason=failure.reason)
        elif failure.exit_code == ExitCode.DATA or spent:
            self.result.failed[shard] = failure.message
            allowed = self._job.spec.failure_policy.max_failed_shards
            if len(self.result.failed) > allowed:
                # Not worth going on: the job is lost whatever the others do. What is committed stays.
                self._queue.clear()
                self._stop_processes()
        else:
            self._queue.append(shard)

    def _stop_processes(self) -> None:
        for worker in self.workers:
            if worker.process is not None and worker.process.is_alive():
                worker.process.terminate()
            worker.shard = None

    def _end_all(self) -> None:
        """Idle processes are told to end; busy ones get the grace period to finish or abandon their part.

        One that still loads its model has nothing to lose, and nobody waits for it.
        """
        for worker in self.workers:
            if worker.process is not None and not worker.ready:
                worker.process.kill()
            elif worker.connection is not None and worker.shard is None:
                with suppress(EOFError, OSError):
                    worker.connection.send(None)
        for worker in self.workers:
            if worker.process is not None and worker.shard is not None:
                worker.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self.workers:
            if worker.process is None:
                continue
            while worker.process.is_alive() and time.monotonic() < deadline:
                _drain(worker)
                worker.process.join(_POLL_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _drain(worker: Worker) -> None:
    """A process that reports to a full pipe would never end."""
    with suppress(EOFError, OSError):
        while worker.connection is not None and worker.connection.poll():
            message = worker.connection.recv()
            if isinstance(message, Meter):
                worker.meter = message


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Children inherit the environment at their start: set it around that."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
