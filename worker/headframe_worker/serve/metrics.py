"""/metrics: the meters of this machine's workers as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headframe_api.progress import ProgressState
from headframe_worker.meter import STAGES, WAITS, Histogram, Meter

Meters = Callable[[], Mapping[str, Meter]]
"""The meters to show, by the number of their worker."""

_COUNTERS = {
    "samples": "Samples that went through the stage.",
    "tokens": "Tokens of these samples.",
    "padded_tokens": "Tokens that went through the model, with padding.",
    "bytes_written": "Bytes of the objects written.",
    "out_of_memory_retries": "Batches tried again because the GPU's memory was full.",
    "non_finite_samples": "Samples whose states held NaN or infinity.",
    "upload_retries": "Requests to the object store that were sent again.",
}
_NAMES = {"bytes_written": "written_bytes"}


class MeterCollector(Collector):
    """Turns meters into metrics, each with the label `worker`, at the moment they are asked for."""

    def __init__(self, meters: Meters, *, stalled_after_seconds: float) -> None:
        self._meters = meters
        self._stalled_after_seconds = stalled_after_seconds

    def collect(self) -> Iterator[Metric]:
        """All families; they are there, at zero, before anything was counted."""
        meters = self._meters()
        for attribute, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"headframe_{_NAMES.get(attribute, attribute)}", text, labels=["worker"])
            for worker, meter in meters.items():
                counter.add_metric([worker], getattr(meter, attribute))
            yield counter
        yield from _seconds(meters)
        yield _quarantined(meters)
        yield _histogram("batch_tokens", "Padded tokens of a batch.", meters, lambda meter: meter.batch_tokens)
        yield _histogram("upload_seconds", "Seconds to write an object.", meters, lambda meter: meter.upload_seconds)
        yield from self._gauges(meters)

    def _gauges(self, meters: Mapping[str, Meter]) -> Iterator[Metric]:
        gauges: dict[str, tuple[str, Callable[[Meter], float]]] = {
            "model_load_seconds": ("Seconds that loading the model took.", lambda meter: meter.model_load_seconds),
            "upload_backlog_bytes": (
                "Bytes computed and not yet written.",
                lambda meter: float(meter.upload_backlog_bytes),
            ),
            "slow_path": ("Mixers of the model on a slow reference path.", lambda meter: float(len(meter.slow_path))),
            "stalled": ("1: nothing has moved for too long.", self._stalled),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"headframe_{name}", text, labels=["worker"])
            for worker, meter in meters.items():
                gauge.add_metric([worker], value(meter))
            yield gauge
        state = GaugeMetricFamily("headframe_state", "1 for what the worker does now.", labels=["worker", "state"])
        for worker, meter in meters.items():
            for name in get_args(ProgressState):
                state.add_metric([worker, name], float(meter.state == name))
        yield state

    def _stalled(self, meter: Meter) -> float:
        return float(meter.progress(stalled_after_seconds=self._stalled_after_seconds).stalled)


def _seconds(meters: Mapping[str, Meter]) -> Iterator[Metric]:
    stages = CounterMetricFamily(
        "headframe_stage_seconds", "Busy seconds by stage of the pipeline.", labels=["worker", "stage"]
    )
    waits = CounterMetricFamily(
        "headframe_waiting_seconds",
        "Seconds in which the model stood still, by what it waited for.",
        labels=["worker", "for"],
    )
    for worker, meter in meters.items():
        for stage in STAGES:
            stages.add_metric([worker, stage], meter.seconds[stage])
        for wait in WAITS:
            waits.add_metric([worker, wait.removeprefix("waiting_")], meter.seconds[wait])
    yield stages
    yield waits


def _quarantined(meters: Mapping[str, Meter]) -> Metric:
    family = CounterMetricFamily(
        "headframe_quarantined_samples", "Samples that were refused, by reason.", labels=["worker", "reason"]
    )
    for worker, meter in meters.items():
        for reason, count in dict(meter.quarantined).items():
            family.add_metric([worker, reason], count)
    return family


def _histogram(name: str, text: str, meters: Mapping[str, Meter], pick: Callable[[Meter], Histogram]) -> Metric:
    family = HistogramMetricFamily(f"headframe_{name}", text, labels=["worker"])
    for worker, meter in meters.items():
        histogram = pick(meter)
        bounds = [*(f"{float(bound)}" for bound in histogram.bounds), "+Inf"]
        counts = accumulate(histogram.counts)
        family.add_metric([worker], list(zip(bounds, counts, strict=True)), histogram.total)
    return family
