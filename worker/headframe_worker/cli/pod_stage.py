"""What the three stage commands share in a pod: signals, scratch space, and the termination message that the operator reads."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headframe_api.errors import ConfigError, HeadframeError, StoppedError
from headframe_api.exit_codes import ExitCode
from headframe_api.names import HTTP_PORT, TERMINATION_LOG_ENVIRONMENT
from headframe_api.progress import Stage, TerminationMessage
from headframe_worker.log import set_up_log
from headframe_worker.meter import Meter
from headframe_worker.signals import StopWish

logger = logging.getLogger(__name__)

Manifest = Annotated[
    Path | None,
    typer.Argument(metavar="JOB", help="The ExtractionJob manifest (YAML or JSON); by default $HEADFRAME_JOB."),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        show_default=str(HTTP_PORT),
        help="Where /metrics, /progress, /healthz and /readyz are served; 0 serves nothing.",
    ),
]


@dataclass(frozen=True)
class StageProcess:
    """What a stage's work is given."""

    meter: Meter
    stop: StopWish
    scratch: Path


def run_stage(
    stage: Stage,
    work: Callable[[StageProcess], TerminationMessage],
    *,
    scratch: Path | None = None,
    shard: int | None = None,
    port: int | None = None,
) -> TerminationMessage:
    """Run a stage's work; whatever becomes of it is written to the termination log and re-raised.

    A StoppedError leaves with the exit code of the signal.
    """
    set_up_log()
    meter, stop = Meter(stage), StopWish()
    started = time.monotonic()
    try:
        with (
            stop.heard(),
            _served(meter, port),
            tempfile.TemporaryDirectory(prefix="headframe-", dir=scratch, ignore_cleanup_errors=True) as folder,
        ):
            message = work(StageProcess(meter, stop, Path(folder)))
    except BaseException as error:
        meter.set_state("failed", str(error))
        _write_termination_message(_failure(stage, shard, meter, error, stop, time.monotonic() - started))
        raise
    message = message.model_copy(update={"seconds": round(time.monotonic() - started, 3)})
    meter.set_state("done")
    _write_termination_message(message)
    return message


@contextmanager
def _served(meter: Meter, port: int | None) -> Iterator[None]:
    """Serve the meter. A pod has its port to itself; beside another stage on one machine the default port may be taken."""
    from headframe_worker.serve.health import StallWatch
    from headframe_worker.serve.server import MeterServer

    with ExitStack() as open_until_done:
        if port != 0:
            try:
                server = MeterServer(lambda: {"0": meter}, port=HTTP_PORT if port is None else port)
            except ConfigError as error:
                if port is not None:
                    raise
                logger.warning("%s; nothing is served", error.message)
            else:
                open_until_done.enter_context(server)
        watch = StallWatch(meter)
        watch.start()
        open_until_done.callback(watch.stop)
        yield


def _failure(
    stage: Stage, shard: int | None, meter: Meter, error: BaseException, stop: StopWish, seconds: float
) -> TerminationMessage:
    if isinstance(error, StoppedError | KeyboardInterrupt):
        code, reason, text = int(stop.exit_code), "Stopped", str(error)
    elif isinstance(error, HeadframeError):
        code, reason, text = int(error.exit_code), error.reason, error.message
    else:
        code, reason, text = 1, type(error).__name__, f"{type(error).__name__}: {error}"
    return TerminationMessage(
        stage=stage,
        exit_code=code,
        reason=reason,
        message=text,
        shard=shard,
        samples=meter.samples,
        tokens=meter.tokens,
        bytes=meter.bytes_written,
        quarantined=meter.quarantined.total(),
        seconds=round(seconds, 3),
        slow_path=list(meter.slow_path),
    )


def _write_termination_message(message: TerminationMessage) -> None:
    path = os.environ.get(TERMINATION_LOG_ENVIRONMENT)
    if path:
        Path(path).write_text(message.to_text(), encoding="utf-8")


def completed(stage: Stage) -> TerminationMessage:
    """The message of a stage that did all it should; callers fill in the counts."""
    return TerminationMessage(stage=stage, exit_code=int(ExitCode.OK), reason="Completed")
