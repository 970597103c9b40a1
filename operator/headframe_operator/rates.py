"""Throughput over a window, from sums that only grow: the truth, with the gaps between shards in it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headframe_operator.snapshot import Rates
from headframe_operator.totals import Totals

_WINDOW_SECONDS = 60.0
_SHORTEST_SECONDS = 5.0


@dataclass
class RateWindow:
    """The last minute of one ExtractionJob's sums."""

    _points: deque[tuple[float, Totals]] = field(default_factory=deque)

    def add(self, seconds: float, totals: Totals) -> None:
        """Note the sums at a moment of a monotonic clock. Sums that shrink (a new Job) start the window anew."""
        if self._points and totals.tokens < self._points[-1][1].tokens:
            self._points.clear()
        self._points.append((seconds, totals))
        while len(self._points) > 2 and seconds - self._points[1][0] >= _WINDOW_SECONDS:
            self._points.popleft()

    def rates(self) -> Rates | None:
        """Units a second over the window; None while it is too short to tell."""
        if len(self._points) < 2:
            return None
        (first, before), (last, after) = self._points[0], self._points[-1]
        elapsed = last - first
        if elapsed < _SHORTEST_SECONDS:
            return None
        return Rates((after.samples - before.samples) / elapsed, (after.tokens - before.tokens) / elapsed)
