"""Which GPUs this machine lets us use, found without loading torch in the parent process."""

from __future__ import annotations

import os

import pynvml

from headframe_api.errors import ConfigError
from headframe_api.spec import ExtractionJobSpec


def visible_gpus() -> list[str]:
    """Identifiers for CUDA_VISIBLE_DEVICES, one a usable GPU; empty without a driver."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip() not in ("", "-1", "NoDevFiles")]
    try:
        pynvml.nvmlInit()
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def worker_devices(spec: ExtractionJobSpec, shards: int, workers: int | None) -> list[list[str]]:
    """The GPUs of each worker process; empty lists for workers on the CPU.

    One worker for each `model.gpus` GPUs unless `workers` says otherwise, and never more than shards. Raises ConfigError
    where the spec asks for more GPUs than there are.
    """
    per_worker = spec.model.gpus
    if per_worker == 0:
        return [[] for _ in range(max(1, min(workers or spec.workers, shards)))]
    gpus = visible_gpus()
    if len(gpus) < per_worker:
        raise ConfigError(
            f"spec.model.gpus: {per_worker} asked, {len(gpus)} visible on this machine; "
            "set spec.model.gpus to 0 to run on the CPU",
            reason="NoGpu",
        )
    groups = [gpus[start : start + per_worker] for start in range(0, len(gpus) - per_worker + 1, per_worker)]
    if workers is not None and workers > len(groups):
        raise ConfigError(
            f"--workers: {workers} workers of {per_worker} GPUs need {workers * per_worker}; {len(gpus)} are visible"
        )
    return groups[: max(1, min(workers or len(groups), shards))]
