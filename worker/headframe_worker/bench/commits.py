"""How fast a pipeline commits parts once it runs: without the time until the first, and without the last one's own write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from headframe_worker.engine.pipeline import WRITERS
from headframe_worker.meter import Meter

_SKIPPED = WRITERS
"""Parts may come as many at a time as there are writers."""
_FEWEST = 2 * WRITERS


@dataclass(frozen=True)
class Commit:
    """A part is written."""

    at_seconds: float
    """On the clock of time.perf_counter."""
    bytes: int


class CommitMeter(Meter):
    """A meter that remembers when each object was written."""

    def __init__(self) -> None:
        super().__init__("extract")
        self.commits: list[Commit] = []

    def uploaded(self, *, size_bytes: int, seconds: float) -> None:
        """See Meter."""
        super().uploaded(size_bytes=size_bytes, seconds=seconds)
        self.commits.append(Commit(time.perf_counter(), size_bytes))


def steady_bytes_per_second(commits: Sequence[Commit]) -> float | None:
    """Bytes per second from the first commits, one a writer, to the last; None where there are too few to tell.

    Between two commits lies what the slowest stage takes for a part, be it the forward or the write. What precedes the
    first is the pipeline filling up, once in a shard.
    """
    if len(commits) < _FEWEST:
        return None
    ordered = sorted(commits, key=lambda commit: commit.at_seconds)
    span = ordered[-1].at_seconds - ordered[_SKIPPED - 1].at_seconds
    return sum(commit.bytes for commit in ordered[_SKIPPED:]) / span if span > 0 else None
