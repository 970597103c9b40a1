"""SIGTERM and Ctrl-C as a wish to stop that the pipeline honours between batches; a second Ctrl-C ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headframe_api.exit_codes import ExitCode


class SignalEvent(threading.Event):
    """An event that a signal's handler may set while the same thread is inside `wait` or `set`.

    Event's lock knows no owner: the handler, which runs in the main thread between two of its instructions, would wait for ever
    for what that thread itself holds. A wait that the handler meets before it has begun lasts its timeout.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())


class StopWish:
    """Set by a signal. `event` is what the stages watch; `exit_code` is what the process should exit with."""

    def __init__(self) -> None:
        self.event: threading.Event = SignalEvent()
        self.exit_code = ExitCode.TERMINATED

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT in this block. Enter it in the main thread."""
        before = {number: signal.signal(number, self._wish) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wish(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.exit_code = ExitCode.INTERRUPTED
            if self.event.is_set():
                raise KeyboardInterrupt
        self.event.set()
