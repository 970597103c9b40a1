"""Which GPUs this process may use, and what the driver tells of them, by NVML: nothing here loads torch."""

from __future__ import annotations

import os
from typing import Any

import pynvml

_NO_DEVICE = ("", "-1", "NoDevFiles")
_MASK_BITS = 64


def visible_gpus() -> list[str]:
    """Indexes or UUIDs as CUDA_VISIBLE_DEVICES spells them, one a usable GPU; empty without a driver."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip() not in _NO_DEVICE]
    try:
        pynvml.nvmlInit()
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def open_gpus() -> dict[str, Any]:
    """NVML's handles of the visible GPUs by their names; empty without a driver."""
    try:
        pynvml.nvmlInit()
        return {name: _handle(name) for name in visible_gpus()}
    except pynvml.NVMLError:
        return {}


def near_cpus(gpus: list[str]) -> frozenset[int]:
    """The CPUs of the NUMA nodes at which these GPUs are plugged in; empty where the driver does not tell."""
    try:
        pynvml.nvmlInit()
        words = (os.cpu_count() or 1) // _MASK_BITS + 1
        masks = [pynvml.nvmlDeviceGetCpuAffinity(_handle(name), words) for name in gpus]
    except pynvml.NVMLError:
        return frozenset()
    return frozenset(
        word * _MASK_BITS + bit
        for mask in masks
        for word, bits in enumerate(mask)
        for bit in range(_MASK_BITS)
        if bits >> bit & 1
    )


def _handle(name: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
