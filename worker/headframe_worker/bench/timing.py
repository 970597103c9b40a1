"""How long work takes on a device, launches and all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def median_seconds(
    work: Callable[[], object], device: torch.device, *, repeats: int = 3, within_seconds: float = float("inf")
) -> float:
    """Median of up to `repeats` calls of `work`, after one that compiles and warms.

    One repeat is always made; none begins after `within_seconds`.
    """
    started = time.perf_counter()
    seconds(work, device)
    times = [seconds(work, device)]
    while len(times) < repeats and time.perf_counter() - started < within_seconds:
        times.append(seconds(work, device))
    return statistics.median(times)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """One call of `work`, until the device is done with it."""
    _synchronize(device)
    started = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
