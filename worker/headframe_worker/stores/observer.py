"""Who a store tells that it waits: the meter, so that /progress and the metrics say why nothing moves; and who ends its waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from headframe_api.progress import ProgressState
from headframe_worker.meter import Meter


def _ignore_message(_: str | None) -> None:
    pass


def _ignore() -> None:
    pass


def _never() -> bool:
    return False


@dataclass(frozen=True)
class StoreObserver:
    """Callbacks of a store; they come from any thread and must not call the store."""

    waiting: Callable[[str | None], None] = _ignore_message
    """Something outside holds requests up, in words; None: they succeed again."""
    retried: Callable[[], None] = _ignore
    """A request is sent again."""
    stopping: Callable[[], bool] = _never
    """Whether the process is to end: then an outage is not waited for any longer."""


UNOBSERVED = StoreObserver()
"""Nobody hears."""


def tell(meter: Meter, stop: threading.Event) -> StoreObserver:
    """An observer that lets a meter say `waiting` while a store is down, and after that what it said before; `stop` ends that."""
    before: list[tuple[ProgressState, str]] = []

    def waiting(message: str | None) -> None:
        if message is not None:
            before[:] = [(meter.state, meter.message)]
            meter.set_state("waiting", message)
        elif before and meter.state == "waiting":
            meter.set_state(*before.pop())

    return StoreObserver(waiting, lambda: meter.count_retry("upload_retries"), stop.is_set)
