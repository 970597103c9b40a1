"""The flow of parts through the model: tokens read ahead, forwards back to back, states copied and written behind them.

    reader thread -> forward (the caller's thread) -> completion thread -> writer threads -> free buffers -> forward

Every arrow is a bounded channel, so memory is bounded: a forward waits for a free buffer, and that is the backpressure. On
a GPU the forward never waits for the device: states are stripped of padding there, copied on a stream of their own
straight to their place in a page-locked part buffer, and the completion thread waits for the copy's event. On the CPU the
same flow writes into the part buffer at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headframe_api.errors import DataError, StoppedError
from headframe_worker.engine.batches import Batch, cut_batches, pad_right
from headframe_worker.engine.budget import TokenBudget, is_out_of_memory, release_memory, staged_batches
from headframe_worker.engine.capture import Capture
from headframe_worker.engine.channel import Channel, ClosedChannelError, T
from headframe_worker.engine.part_buffer import PartBuffer
from headframe_worker.engine.parts import FilledPart, TokenPart, fill
from headframe_worker.engine.staging import StagedBatch, on_host
from headframe_worker.engine.states import StatesTensors
from headframe_worker.meter import Meter

_BUFFERS = 3
WRITERS = 2
_READ_AHEAD = 2
_GLANCE_SECONDS = 0.2


@dataclass(frozen=True)
class _Passing:
    """A batch whose forward was started."""

    part: TokenPart
    buffer: PartBuffer
    batch: Batch
    is_last: bool
    """Of its part."""
    staged: StatesTensors | None
    """Kept alive until its copy is done; None where the states went straight into the buffer."""
    events: tuple[torch.cuda.Event, ...]
    """Start and end of the forward, start and end of the copy; none on the CPU."""
    waits: Mapping[str, float]
    """Seconds that the caller's thread waited, by what for, since it started the batch before."""


class Pipeline:
    """A model with hooks, ready to fill parts. Its buffers serve one shard after the other."""

    def __init__(
        self,
        capture: Capture,
        *,
        dtype: torch.dtype,
        slot_names: Sequence[str],
        budget: TokenBudget,
        meter: Meter,
        stop: threading.Event,
        grace_seconds: float,
    ) -> None:
        self.capture = capture
        self.dtype = dtype
        self.slot_names = slot_names
        self.budget = budget
        self.meter = meter
        self.stop = stop
        self.grace_seconds = grace_seconds
        self.device = capture.last_device
        self.copy_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._buffers: list[PartBuffer] = []

    def run(self, parts: Iterable[TokenPart], *, largest_part_tokens: int, write: Callable[[FilledPart], None]) -> None:
        """Fill the parts and give each to `write`, which is called in other threads, for two parts at once.

        Raises StoppedError after the wish to stop, DataError for a sample that does not fit alone, and whatever `parts`
        or `write` raise.
        """
        _Flow(self, parts, write).run(self._make_buffers(largest_part_tokens))

    def close(self) -> None:
        """Release the buffers."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _make_buffers(self, tokens: int) -> list[PartBuffer]:
        if not self._buffers or self._buffers[0].capacity_tokens < tokens:
            self.close()
            pinned = self.device.type == "cuda"
            slots, hidden_size = self.capture.slots, self.capture.hidden_size
            for _ in range(_BUFFERS):
                self._buffers.append(PartBuffer(tokens, slots, hidden_size, self.dtype, pinned=pinned))
        return self._buffers


class _Flow:
    """One shard's way through the pipeline."""

    def __init__(self, pipeline: Pipeline, parts: Iterable[TokenPart], write: Callable[[FilledPart], None]) -> None:
        self._pipeline = pipeline
        self._capture, self._meter, self._budget = pipeline.capture, pipeline.meter, pipeline.budget
        self._parts = parts
        self._write = write
        self._read: Channel[TokenPart] = Channel(_READ_AHEAD)
        self._free: Channel[PartBuffer] = Channel(_BUFFERS)
        # One waits here, one is waited for, one was just started; and one more waits for each device more.
        self._passing: Channel[_Passing] = Channel(staged_batches(pipeline.capture) - 2)
        self._full: Channel[tuple[FilledPart, PartBuffer]] = Channel(_BUFFERS)
        self._failure: BaseException | None = None
        self._failing = threading.Lock()
        self._stop_seen: float | None = None
        self._done_tokens, self._forward_since = 0, 0.0
        self._waits: dict[str, float] = {}
        self._last_computed: torch.cuda.Event | None = None
        self._under_way = 0
        self._landing = threading.Condition()

    def run(self, buffers: Sequence[PartBuffer]) -> None:
        for buffer in buffers:
            self._free.put(buffer)
        threads = [self._thread(self._read_ahead, "reader"), self._thread(self._complete, "completion")]
        threads += [self._thread(self._write_full, f"writer-{index}") for index in range(WRITERS)]
        stopped: StoppedError | None = None
        try:
            self._forward_all()
        except ClosedChannelError:
            pass  # another thread failed
        except StoppedError as error:
            stopped = error
            self._read.abort()
        except BaseException as error:  # noqa: BLE001  # it is raised below, after the threads were told
            self._fail(error)
        self._passing.close()  # what is on its way still arrives, and full parts are written
        if not self._join(threads):
            stopped = self._stopped()
        if self._failure is not None:
            raise self._failure
        if stopped is not None:
            raise stopped

    def _thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except ClosedChannelError:
                pass  # told to end
            except BaseException as error:  # noqa: BLE001  # it is raised in the caller's thread
                self._fail(error)

        thread = threading.Thread(target=guarded, name=f"headframe-{name}", daemon=True)
        thread.start()
        return thread

    def _fail(self, error: BaseException) -> None:
        with self._failing:
            self._failure = self._failure or error
        for channel in (self._read, self._free, self._passing, self._full):
            channel.abort()

    def _join(self, threads: Sequence[threading.Thread]) -> bool:
        """Wait for the threads; false where a write outlasts the grace after a wish to stop or after a failure."""
        failed_at: float | None = None
        for thread in threads:
            while thread.is_alive():
                thread.join(_GLANCE_SECONDS)
                if self._failure is not None:
                    failed_at = failed_at or time.monotonic()
                    left = failed_at + self._pipeline.grace_seconds - time.monotonic()
                else:
                    left = self._grace_left()
                if left <= 0:
                    for channel in (self._read, self._free, self._passing, self._full):
                        channel.abort()
                    return False
        return True

    # The forward, in the caller's thread.

    def _forward_all(self) -> None:
        while True:
            try:
                part = self._next(self._read, "waiting_data")
            except ClosedChannelError:
                if self._failure is not None:
                    raise
                return
            self._forward_part(part, self._next(self._free, "waiting_write"))

    def _next(self, channel: Channel[T], stage: str) -> T:
        since = time.perf_counter()
        while True:
            self._check_stop()
            try:
                item = channel.get(_GLANCE_SECONDS)
            except TimeoutError:
                continue
            self._waits[stage] = self._waits.get(stage, 0.0) + time.perf_counter() - since
            return item

    def _forward_part(self, part: TokenPart, buffer: PartBuffer) -> None:
        batches = deque(cut_batches(part.lengths, self._budget.tokens))
        while batches:
            batch = batches[0]
            if self._wants_stop() and not self._is_worth_finishing(batches):
                raise self._stopped()
            others = self._under_way
            passing = self._start(part, buffer, batch, is_last=len(batches) == 1)
            if passing is None:
                self._meter.count_retry("out_of_memory_retries")
                release_memory(self._capture.devices)
                if batch.samples == 1 and others:
                    self._wait_for_others()
                    continue
                self._shrink(part, batch)
                batches = deque(cut_batches(part.lengths, self._budget.tokens, first=batch.first))
                continue
            batches.popleft()
            self._done_tokens += batch.padded_tokens
            with self._landing:
                self._under_way += 1
            self._passing.put(passing)

    def _wait_for_others(self) -> None:
        """Let the batches before this one give back the memory of their states."""
        with self._landing:
            while not self._landing.wait_for(lambda: self._under_way == 0, _GLANCE_SECONDS):
                if self._failure is not None:
                    raise ClosedChannelError
                if self._grace_left() <= 0:
                    raise self._stopped()
        release_memory(self._capture.devices)

    def _start(self, part: TokenPart, buffer: PartBuffer, batch: Batch, *, is_last: bool) -> _Passing | None:
        """Start one batch's forward and copy; None where memory ran out."""
        lengths = part.lengths[batch.first : batch.first + batch.samples]
        ids, places = pad_right(part.token_ids[batch.start : batch.start + batch.tokens], lengths)
        target = buffer.tokens(batch.start, batch.tokens)
        self._forward_since = self._forward_since or time.monotonic()
        real = places if batch.padded_tokens != batch.tokens else None
        try:
            if self._pipeline.copy_stream is None:
                staged, events = self._start_on_cpu(ids, real, target)
            else:
                staged, events = self._start_on_gpu(ids, real, target, self._pipeline.copy_stream)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        waits, self._waits = self._waits, {}
        return _Passing(part, buffer, batch, is_last, staged, events, waits)

    def _start_on_cpu(
        self, ids: NDArray[np.int64], places: NDArray[np.int64] | None, target: StatesTensors
    ) -> tuple[StatesTensors | None, tuple[torch.cuda.Event, ...]]:
        with self._meter.timed("forward"):
            real = None if places is None else torch.from_numpy(places)
            self._capture.run(torch.from_numpy(ids), lambda slot, hidden: target.put(slot, hidden, real))
        return None, ()

    def _start_on_gpu(
        self,
        ids: NDArray[np.int64],
        places: NDArray[np.int64] | None,
        target: StatesTensors,
        copy_stream: torch.cuda.Stream,
    ) -> tuple[StatesTensors | None, tuple[torch.cuda.Event, ...]]:
        first, last = self._capture.devices[0], self._pipeline.device
        with torch.cuda.device(last):
            # All four on the last device: events of two devices have no time between them.
            started, computed, copying, copied = (
                torch.cuda.Event(enable_timing=True, blocking=index == 3) for index in range(4)
            )
            started.record()
        with torch.cuda.device(first):
            staged = StagedBatch(self._capture, places, target.states.shape[0], self._pipeline.dtype)
            self._capture.run(on_host(ids, pinned=True).to(first, non_blocking=True), staged.put)
        with torch.cuda.device(last):
            computed.record()
            with torch.cuda.stream(copy_stream):
                copy_stream.wait_event(computed)
                copying.record()
                target.copy_from(staged.states)
                copied.record()
        return staged.states, (started, computed, copying, copied)

    def _shrink(self, part: TokenPart, batch: Batch) -> None:
        if batch.samples == 1:
            row, length = int(part.rows[batch.first]), int(part.lengths[batch.first])
            raise DataError(
                f"row {row} of tokens/ ({length:,} tokens) does not fit the memory of {self._pipeline.device} even alone; "
                "lower spec.dataset.maxLength, or take a device with more memory",
                reason="SampleTooLarge",
            )
        self._budget.shrink(batch.padded_tokens)

    # Stopping.

    def _wants_stop(self) -> bool:
        if self._pipeline.stop.is_set() and self._stop_seen is None:
            self._stop_seen = time.monotonic()
        return self._stop_seen is not None

    def _check_stop(self) -> None:
        if self._wants_stop():
            raise self._stopped()

    def _grace_left(self) -> float:
        if not self._wants_stop() or self._stop_seen is None:
            return float("inf")
        return self._stop_seen + self._pipeline.grace_seconds - time.monotonic()

    def _is_worth_finishing(self, batches: Iterable[Batch]) -> bool:
        """Whether the part in flight can be computed in half the grace that is left; the other half is for its write."""
        if not self._done_tokens:
            return False
        seconds_per_token = (time.monotonic() - self._forward_since) / self._done_tokens
        return sum(batch.padded_tokens for batch in batches) * seconds_per_token < self._grace_left() / 2

    def _stopped(self) -> StoppedError:
        return StoppedError("stopped as asked; what is committed stays, and the same command goes on from there")

    # The other threads.

    def _read_ahead(self) -> None:
        parts = iter(self._parts)
        while True:
            with self._meter.timed("data"):
                part = next(parts, None)
            if part is None:
                self._read.close()
                return
            self._read.put(part)

    def _complete(self) -> None:
        try:
            while True:
                self._complete_one(self._passing.get())
                with self._landing:
                    self._under_way -= 1
                    self._landing.notify_all()
        except ClosedChannelError:
            self._full.close()
            raise

    def _complete_one(self, passing: _Passing) -> None:
        if passing.events:
            started, computed, copying, copied = passing.events
            copied.synchronize()
            self._meter.add_seconds("forward", started.elapsed_time(computed) / 1e3)
            self._meter.add_seconds("copy", copying.elapsed_time(copied) / 1e3)
        self._count_waits(passing)
        batch = passing.batch
        self._meter.batch_done(samples=batch.samples, tokens=batch.tokens, padded_tokens=batch.padded_tokens)
        if passing.is_last:
            filled = fill(passing.part, passing.buffer.tokens(0, passing.part.tokens), self._pipeline.slot_names)
            for sample in filled.refused:
                self._meter.quarantine(sample.reason)
                if sample.reason == "NonFinite":
                    self._meter.count_retry("non_finite_samples")
            self._full.put((filled, passing.buffer))

    def _count_waits(self, passing: _Passing) -> None:
        """Count the caller's waits, but no more of them than the device stood still: it may have had work queued."""
        waited = sum(passing.waits.values())
        share = 1.0
        if passing.events:
            started, computed, *_ = passing.events
            if self._last_computed is not None and waited > 0:
                share = min(1.0, self._last_computed.elapsed_time(started) / 1e3 / waited)
            self._last_computed = computed
        for stage, seconds in passing.waits.items():
            self._meter.add_seconds(stage, seconds * share)

    def _write_full(self) -> None:
        while True:
            filled, buffer = self._full.get()
            with self._meter.timed("write"):
                self._write(filled)
            self._free.put(buffer)
