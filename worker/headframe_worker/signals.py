"""SIGTERM and Ctrl-C as a wish to stop that the pipeline honours between batches; a second Ctrl-C ends at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from headframe_api.exit_codes import ExitCode


class StopWish:
    """Set by a signal. `event` is what the stages watch; `exit_code` is what the process should exit with."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.exit_code = ExitCode.TERMINATED

    def install(self) -> None:
        """Handle SIGTERM and SIGINT from now on. Call it in the main thread."""
        signal.signal(signal.SIGTERM, self._wish)
        signal.signal(signal.SIGINT, self._wish)

    def _wish(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.exit_code = ExitCode.INTERRUPTED
            if self.event.is_set():
                raise KeyboardInterrupt
        self.event.set()
