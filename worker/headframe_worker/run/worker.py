"""A worker process of `headframe run`: loads the model once, then works on the shards that the parent hands it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tqdm import tqdm

from headframe_api.errors import HeadframeError, StoppedError
from headframe_api.exit_codes import ExitCode
from headframe_api.job import ExtractionJob
from headframe_api.manifests import ShardManifest
from headframe_api.plan import Plan
from headframe_worker.log import set_up_log
from headframe_worker.meter import Meter
from headframe_worker.serve.health import StallWatch
from headframe_worker.signals import SignalEvent

REPORT_EVERY_SECONDS = 0.5
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ready:
    """The model is loaded: hand me a shard."""


@dataclass(frozen=True)
class ShardDone:
    """A shard is committed."""

    shard: int
    samples: int
    tokens: int
    bytes: int
    quarantined: int


@dataclass(frozen=True)
class WorkerFailed:
    """The process ends because of this."""

    exit_code: int
    reason: str
    message: str


Message = Ready | ShardDone | WorkerFailed | Meter


def work(
    connection: Connection,
    job: ExtractionJob,
    plan: Plan,
    scratch: Path,
    threads: int | None,
    cpus: frozenset[int],
) -> None:
    """The process' main: messages go up the connection, shard numbers come down, None means stop."""
    if cpus:
        os.sched_setaffinity(0, cpus)  # before any thread and any buffer is made
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    set_up_log()
    tqdm.set_lock(threading.RLock())  # its own lock is a semaphore of the system, which os._exit would leave behind
    stop = SignalEvent()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    send = _Sender(connection)
    try:
        _work(connection, send, job, plan, scratch, threads, stop)
    except StoppedError as error:
        send(WorkerFailed(ExitCode.TERMINATED, error.reason, error.message))
    except HeadframeError as error:
        send(WorkerFailed(error.exit_code, error.reason, error.message))
    except Exception as error:  # the parent retries; the log says where it came from
        logger.exception("worker failed")
        send(WorkerFailed(1, type(error).__name__, f"{type(error).__name__}: {error}"))
    os._exit(0)  # never wait for a thread that hangs in the network; all that matters is on disk


def _work(
    connection: Connection,
    send: Callable[[Message], None],
    job: ExtractionJob,
    plan: Plan,
    scratch: Path,
    threads: int | None,
    stop: threading.Event,
) -> None:
    import torch  # noqa: PLC0415  (the parent process never loads it)

    from headframe_worker.engine.loading import choose_devices  # noqa: PLC0415
    from headframe_worker.extract.stage import Extractor  # noqa: PLC0415
    from headframe_worker.stores.observer import tell  # noqa: PLC0415
    from headframe_worker.stores.open import open_store  # noqa: PLC0415

    if threads:
        torch.set_num_threads(threads)
    meter = Meter("extract")
    StallWatch(meter).start()
    threading.Thread(target=_report, args=(meter, send), daemon=True).start()
    devices = choose_devices(job.spec.model.gpus)
    output = open_store(job.spec.output.uri, job.spec.s3, observer=tell(meter, stop))
    extractor = Extractor(job, plan, output, devices=devices, scratch=scratch, meter=meter, stop=stop)
    extractor.load()
    send(Ready())
    while (shard := connection.recv()) is not None:
        manifest: ShardManifest = extractor.run(shard)
        send(meter)
        quarantined = sum(len(part.quarantined) for part in manifest.parts)
        send(ShardDone(shard, manifest.samples, manifest.tokens, manifest.bytes, quarantined))


class _Sender:
    """Sends from two threads; a parent that is gone ends the process, so that no orphan goes on with its shard."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, message: Message) -> None:
        with self._lock:
            try:
                self._connection.send(message)
            except OSError:
                os._exit(ExitCode.TERMINATED)


def _report(meter: Meter, send: Callable[[Message], None]) -> None:
    pause = threading.Event()
    while not pause.wait(REPORT_EVERY_SECONDS):
        send(meter)
