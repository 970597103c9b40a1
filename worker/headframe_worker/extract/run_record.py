"""What a process writes down about its part in a shard: speed, stages, versions."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from types import TracebackType
from typing import Self

from headframe_api.manifests import ExtractionRun, StagePlacement, Throughput
from headframe_worker.engine.engine import EngineFacts
from headframe_worker.meter import Meter

_STRETCH_SECONDS = 2.0
_MOST_STRETCHES = 240
"""Beyond, neighbours are joined: a long shard is drawn as finely as a short one."""
_PACKAGES = ("headframe-worker", "torch", "transformers", "flash-linear-attention", "triton")


@dataclass
class RunRecord:
    """Filled while a process works on one shard: a context manager around that work."""

    meter: Meter
    started_at: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    parts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._stretches: list[Throughput] = []
        self._end = threading.Event()
        meter = self.meter
        self._seconds_before = dict(meter.seconds)
        self._before = (meter.tokens, meter.padded_tokens, meter.out_of_memory_retries)
        self._last = (meter.tokens, meter.samples)

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="headframe-throughput", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._add_stretch()

    def committed(self, part: int) -> None:
        """This process committed a part. May be called from any thread."""
        with self._lock:
            self.parts.append(part)

    def _watch(self) -> None:
        while not self._end.wait(_STRETCH_SECONDS):
            self._add_stretch()

    def _add_stretch(self) -> None:
        """What was computed since the last stretch; nothing where nothing was."""
        with self._lock:
            now = (self.meter.tokens, self.meter.samples)
            tokens, samples = now[0] - self._last[0], now[1] - self._last[1]
            if not tokens:
                return
            self._last = now
            seconds = round(time.monotonic() - self._start, 3)
            self._stretches.append(Throughput(seconds=seconds, tokens=tokens, samples=samples))
            if len(self._stretches) > _MOST_STRETCHES:
                self._stretches = _halved(self._stretches)

    def finish(self, facts: EngineFacts, *, load_seconds: float, batch_tokens: int) -> ExtractionRun:
        """The record as the shard's manifest holds it."""
        meter = self.meter
        tokens, padded, retries = (
            now - before
            for now, before in zip(
                (meter.tokens, meter.padded_tokens, meter.out_of_memory_retries), self._before, strict=True
            )
        )
        return ExtractionRun(
            started_at=self.started_at,
            wall_seconds=round(time.monotonic() - self._start, 3),
            model_load_seconds=round(load_seconds, 3),
            device=facts.device,
            placement=_placement(facts),
            versions=versions(),
            attention=facts.attention,
            fusions=list(facts.fusions.applied),
            slow_path=list(facts.slow_path),
            self_check_error=facts.self_check_error,
            batch_tokens=batch_tokens,
            padding_fraction=round(1 - tokens / padded, 6) if padded else 0.0,
            out_of_memory_retries=retries,
            parts=sorted(self.parts),
            stage_seconds={
                stage: round(seconds - self._seconds_before[stage], 6) for stage, seconds in meter.seconds.items()
            },
            throughput=list(self._stretches),
        )


def _placement(facts: EngineFacts) -> list[StagePlacement]:
    placement = facts.placement
    if placement is None:
        return []
    return [
        StagePlacement(device=str(device), first_layer=layers.start, last_layer=layers.stop - 1)
        for device, layers in ((device, placement.layers(stage)) for stage, device in enumerate(placement.devices))
    ]


def versions() -> dict[str, str]:
    """Versions of what computes the states, as far as it is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _halved(stretches: Sequence[Throughput]) -> list[Throughput]:
    """Neighbours joined, two and two."""
    joined = []
    for index in range(0, len(stretches), 2):
        pair = stretches[index : index + 2]
        joined.append(
            Throughput(
                seconds=pair[-1].seconds,
                tokens=sum(stretch.tokens for stretch in pair),
                samples=sum(stretch.samples for stretch in pair),
            )
        )
    return joined
