"""How long work takes on its devices, launches and all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def median_seconds(
    work: Callable[[], object],
    devices: Sequence[torch.device],
    *,
    repeats: int = 3,
    within_seconds: float = float("inf"),
) -> float:
    """Median of up to `repeats` calls of `work`, after one that compiles and warms.

    One repeat is always made; none begins after `within_seconds`.
    """
    started = time.perf_counter()
    seconds(work, devices)
    times = [seconds(work, devices)]
    while len(times) < repeats and time.perf_counter() - started < within_seconds:
        times.append(seconds(work, devices))
    return statistics.median(times)


def seconds(work: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """One call of `work`, until the devices are done with it."""
    _synchronize(devices)
    started = time.perf_counter()
    work()
    _synchronize(devices)
    return time.perf_counter() - started


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
