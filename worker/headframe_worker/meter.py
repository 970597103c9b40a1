"""What a worker counts while it works: one thread-safe object that the stages fill and that the display, /progress and /metrics read."""

from __future__ import annotations

import copy
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from headframe_api.progress import Progress, ProgressState, Stage

RATE_WINDOW_SECONDS = 30.0
STAGES = ("data", "forward", "copy", "write")
WAITS = ("waiting_data", "waiting_write")


@dataclass
class Histogram:
    """Counts of observations up to each bound, as Prometheus wants them."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Meter:
    """Counters since the process started, and the state of the shard at work. Methods may be called from any thread."""

    def __init__(self, stage: Stage) -> None:
        self._lock = threading.Lock()
        self.stage: Stage = stage
        self.shard: int | None = None
        self.state: ProgressState = "starting"
        self.message = ""
        self.samples = self.tokens = self.bytes_written = 0
        self.resumed_samples = self.resumed_tokens = 0
        self.samples_total = self.tokens_total = 0
        self.shard_samples = self.shard_tokens = 0
        self.shard_samples_total = self.shard_tokens_total = 0
        self.padded_tokens = 0
        self.out_of_memory_retries = self.non_finite_samples = 0
        self.upload_retries = 0
        self.upload_backlog_bytes = 0
        self.model_load_seconds = 0.0
        self.slow_path: tuple[str, ...] = ()
        self.quarantined: Counter[str] = Counter()
        self.seconds = dict.fromkeys((*STAGES, *WAITS), 0.0)
        self.batch_tokens = Histogram((256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072))
        self.upload_seconds = Histogram((0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300))
        self.moved_at = time.monotonic()
        self._recent: deque[tuple[float, int, int]] = deque()

    def __getstate__(self) -> dict[str, Any]:
        """A copy for another process; times of its clock mean the same there, as both are of one machine."""
        with self._lock:
            return {key: copy.deepcopy(value) for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds of the block to one of STAGES or WAITS."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(stage, time.perf_counter() - start)

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere, such as by CUDA events."""
        with self._lock:
            self.seconds[stage] += seconds

    def begin_shard(
        self, shard: int, *, samples_total: int, tokens_total: int, samples_done: int = 0, tokens_done: int = 0
    ) -> None:
        """Work on a shard begins; what an earlier run committed of it counts as done, but not as this process' work."""
        with self._lock:
            self.shard, self.state, self.message = shard, "running", ""
            self.shard_samples, self.shard_tokens = samples_done, tokens_done
            self.shard_samples_total, self.shard_tokens_total = samples_total, tokens_total
            self.resumed_samples += samples_done
            self.resumed_tokens += tokens_done
            self.moved_at = time.monotonic()

    def begin_stage(self, *, samples_total: int, tokens_total: int) -> None:
        """Work on all shards together begins, as prepare and finalize do it."""
        with self._lock:
            self.state, self.message = "running", ""
            self.shard_samples_total, self.shard_tokens_total = samples_total, tokens_total
            self.moved_at = time.monotonic()

    def advance(self, *, samples: int, tokens: int) -> None:
        """Samples were dealt with, but not by a model."""
        now = time.monotonic()
        with self._lock:
            self.samples += samples
            self.tokens += tokens
            self.shard_samples += samples
            self.shard_tokens += tokens
            self._recent.append((now, samples, tokens))
            self.moved_at = now

    def batch_done(self, *, samples: int, tokens: int, padded_tokens: int) -> None:
        """A batch went through the model and its states reached the host."""
        now = time.monotonic()
        with self._lock:
            self.samples += samples
            self.tokens += tokens
            self.shard_samples += samples
            self.shard_tokens += tokens
            self.padded_tokens += padded_tokens
            self.batch_tokens.observe(padded_tokens)
            self._recent.append((now, samples, tokens))
            self.moved_at = now

    @contextmanager
    def writing(self, size_bytes: int) -> Iterator[None]:
        """So many bytes are computed and not yet written, for as long as the block lasts."""
        with self._lock:
            self.upload_backlog_bytes += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self.upload_backlog_bytes -= size_bytes

    def uploaded(self, *, size_bytes: int, seconds: float) -> None:
        """An object was written."""
        with self._lock:
            self.bytes_written += size_bytes
            self.upload_seconds.observe(seconds)
            self.moved_at = time.monotonic()

    def quarantine(self, reason: str, count: int = 1) -> None:
        """Samples were refused."""
        with self._lock:
            self.quarantined[reason] += count

    def set_state(self, state: ProgressState, message: str = "") -> None:
        """What the worker is doing, and what it waits for."""
        with self._lock:
            self.state, self.message = state, message
            if state != "waiting":
                self.moved_at = time.monotonic()

    def count_retry(self, counter: str, count: int = 1) -> None:
        """Raise one of out_of_memory_retries, non_finite_samples, upload_retries."""
        with self._lock:
            setattr(self, counter, getattr(self, counter) + count)

    def rates(self) -> tuple[float, float]:
        """(samples, tokens) per second over about the last 30 seconds."""
        now = time.monotonic()
        with self._lock:
            while self._recent and now - self._recent[0][0] > RATE_WINDOW_SECONDS:
                self._recent.popleft()
            if not self._recent:
                return 0.0, 0.0
            span = max(now - self._recent[0][0], 1e-3)
            # The first batch of the window marks its start: its own work lies before it.
            samples = sum(entry[1] for entry in self._recent) - (self._recent[0][1] if len(self._recent) > 1 else 0)
            tokens = sum(entry[2] for entry in self._recent) - (self._recent[0][2] if len(self._recent) > 1 else 0)
            return samples / span, tokens / span

    def progress(self, *, stalled_after_seconds: float = float("inf")) -> Progress:
        """The state as GET /progress tells it."""
        samples_per_second, tokens_per_second = self.rates()
        with self._lock:
            return Progress(
                stage=self.stage,
                shard=self.shard,
                state=self.state,
                message=self.message,
                samples=self.shard_samples,
                samples_total=self.shard_samples_total,
                tokens=self.shard_tokens,
                tokens_total=self.shard_tokens_total,
                bytes=self.bytes_written,
                quarantined=self.quarantined.total(),
                samples_per_second=round(samples_per_second, 3),
                tokens_per_second=round(tokens_per_second, 1),
                seconds_by_stage={key: round(value, 3) for key, value in self.seconds.items()},
                out_of_memory_retries=self.out_of_memory_retries,
                slow_path=list(self.slow_path),
                stalled=self.state == "running" and time.monotonic() - self.moved_at > stalled_after_seconds,
                updated_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            )
