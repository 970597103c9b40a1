"""Which GPUs and CPUs each worker process of a local run gets."""

from __future__ import annotations

from collections.abc import Sequence

from headframe_api.errors import ConfigError
from headframe_api.spec import ExtractionJobSpec
from headframe_worker.gpus import near_cpus, visible_gpus
from headframe_worker.run.cores import allowed_cpus, divide_cores, read_cores


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


def worker_cpus(devices: Sequence[Sequence[str]]) -> list[frozenset[int]]:
    """The CPUs of each worker process, given its GPUs; empty for workers on the CPU, which the kernel spreads better."""
    if not any(devices):
        return [frozenset() for _ in devices]
    allowed = allowed_cpus()
    return divide_cores([near_cpus(list(gpus)) for gpus in devices], allowed, read_cores(allowed))
