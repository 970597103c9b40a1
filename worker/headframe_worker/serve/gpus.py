"""What the GPUs do, by NVML: use, memory and power, where there is a GPU and a driver that tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pynvml
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headframe_worker.gpus import open_gpus

_MILLIWATTS = 1000.0


class GpuCollector(Collector):
    """One series for each GPU that this process may use; nothing without NVML."""

    def __init__(self) -> None:
        self._devices = open_gpus()

    def collect(self) -> Iterator[Metric]:
        """Asks the driver at the moment of the scrape. A reading that the driver refuses is left out."""
        families = {
            "utilization_ratio": ("Share of the last second in which the GPU computed.", self._utilization),
            "memory_used_bytes": ("Memory of the GPU in use.", self._memory),
            "power_watts": ("Power that the GPU draws.", self._power),
        }
        for name, (text, read) in families.items():
            family = GaugeMetricFamily(f"headframe_gpu_{name}", text, labels=["gpu"])
            for index, device in self._devices.items():
                try:
                    family.add_metric([index], read(device))
                except pynvml.NVMLError:
                    continue
            yield family

    def _utilization(self, device: Any) -> float:
        return float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu) / 100

    def _memory(self, device: Any) -> float:
        return float(pynvml.nvmlDeviceGetMemoryInfo(device).used)

    def _power(self, device: Any) -> float:
        return float(pynvml.nvmlDeviceGetPowerUsage(device)) / _MILLIWATTS
