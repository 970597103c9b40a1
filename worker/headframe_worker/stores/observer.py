"""Who hears that a store waits: the meter, so that /progress and the metrics tell why nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _ignore_message(_: str | None) -> None:
    pass


def _ignore() -> None:
    pass


@dataclass(frozen=True)
class StoreObserver:
    """Callbacks of a store; they come from any thread and must not call the store."""

    waiting: Callable[[str | None], None] = _ignore_message
    """Something outside holds requests up, in words; None: they succeed again."""
    retried: Callable[[], None] = _ignore
    """A request is sent again."""
