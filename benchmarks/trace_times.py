"""When the GPU was at work, from a profiler's trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.profiler import profile

Interval = tuple[str, float, float]
"""Kernel, start and end in microseconds."""


def kernel_times(trace: profile) -> list[Interval]:
    """The kernels of a trace; copies and fills are not among them, as they run beside."""
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and event.time_range.elapsed_us() > 0
        and not event.name.startswith(("Memcpy", "Memset"))
    ]


def idle_share(kernels: Sequence[Interval]) -> float:
    """The share of the time between the first kernel's start and the last one's end in which none ran."""
    busy = at = 0.0
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        busy += max(0.0, end - max(start, at))
        at = max(at, end)
    first = min(start for _, start, _ in kernels)
    return 1 - busy / (at - first)
