"""What the GPUs do, by NVML: use, memory and power, where there is a GPU and a driver that tells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_MILLIWATTS = 1000.0


class GpuCollector(Collector):
    """One series for each GPU that this process may use; nothing without NVML."""

    def __init__(self) -> None:
        self._nvml, self._devices = _open()

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
                except self._nvml.NVMLError:
                    continue
            yield family

    def _utilization(self, device: Any) -> float:
        return float(self._nvml.nvmlDeviceGetUtilizationRates(device).gpu) / 100

    def _memory(self, device: Any) -> float:
        return float(self._nvml.nvmlDeviceGetMemoryInfo(device).used)

    def _power(self, device: Any) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(device)) / _MILLIWATTS


def _open() -> tuple[Any, dict[str, Any]]:
    """NVML and its devices by index, those that CUDA_VISIBLE_DEVICES leaves."""
    import pynvml  # noqa: PLC0415  (loads the driver's library)

    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = (
            [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
            if visible is None
            else [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
        )
        return pynvml, {name: _device(pynvml, name) for name in names}
    except pynvml.NVMLError:
        return pynvml, {}


def _device(nvml: Any, name: str) -> Any:
    """A device by index or by UUID, as CUDA_VISIBLE_DEVICES may name it."""
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
