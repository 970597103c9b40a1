"""Whether the pipeline moves: what the probes ask, and a watch that writes down where a stalled one stands."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterable

from headframe_worker.meter import Meter

logger = logging.getLogger(__name__)

STALLED_AFTER_SECONDS = 900.0
"""Without a batch or an upload for so long, though nothing outside is waited for, the worker is stuck."""
_READY_STATES = ("running", "waiting", "done")
_LOOK_EVERY_SECONDS = 5.0


def is_stalled(meters: Iterable[Meter], *, stalled_after_seconds: float = STALLED_AFTER_SECONDS) -> bool:
    """Whether a worker stands still without a reason."""
    return any(meter.progress(stalled_after_seconds=stalled_after_seconds).stalled for meter in meters)


def is_ready(meters: Iterable[Meter]) -> bool:
    """Whether every worker has its model loaded, its kernels warm and its self-check passed."""
    states = [meter.state for meter in meters]
    return bool(states) and all(state in _READY_STATES for state in states)


class StallWatch:
    """Writes the stacks of all threads of this process to the log when its meter stalls: once for each stall."""

    def __init__(self, meter: Meter, *, stalled_after_seconds: float = STALLED_AFTER_SECONDS) -> None:
        self._meter = meter
        self._stalled_after_seconds = stalled_after_seconds
        self._told = False
        self._end = threading.Event()

    def start(self) -> None:
        """Look from now on, in a thread that ends with the process or by `stop`."""
        threading.Thread(target=self._run, name="stall-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._end.set()

    def look(self) -> None:
        """Look once."""
        stalled = is_stalled([self._meter], stalled_after_seconds=self._stalled_after_seconds)
        if stalled and not self._told:
            logger.error(
                "stalled: no batch and no upload for %.0f s; the threads stand at:\n%s",
                self._stalled_after_seconds,
                all_stacks(),
            )
        self._told = stalled

    def _run(self) -> None:
        while not self._end.wait(min(_LOOK_EVERY_SECONDS, self._stalled_after_seconds)):
            self.look()


def all_stacks() -> str:
    """The stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()  # noqa: SLF001  (Python has no public name for it)
    )
