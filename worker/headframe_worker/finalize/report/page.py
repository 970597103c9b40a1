"""The report's page: numbers gathered from an output, laid into the template."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log10
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headframe_api.manifests import DatasetManifest
from headframe_api.names import part_key
from headframe_api.plan import Plan
from headframe_worker.documents import read_shard_manifest
from headframe_worker.finalize.report.charts import Bar, Range, area_chart, compact, histogram, range_chart
from headframe_worker.finalize.report.runs import RunTotals, add_runs, throughput
from headframe_worker.finalize.samples_index import read_columns
from headframe_worker.size import human_bytes
from headframe_worker.stores.base import Store

_BARS = 60
_STAGES = {
    "forward": ("Forward pass", "the model computing"),
    "copy": ("Copy", "device to host"),
    "write": ("Write", "parts, in the background"),
    "data": ("Data", "batches from tokens"),
    "waiting_data": ("Waiting for data", "the model stood still"),
    "waiting_write": ("Waiting for writes", "the model stood still"),
    "load": ("Model load", "once a process"),
}


def render_report(output: Store, plan: Plan, manifest: DatasetManifest, index: Path) -> str:
    """report.html of a dataset; `index` is a local samples.parquet. Raises ConfigError where a shard's manifest is gone."""
    runs = add_runs(read_shard_manifest(output, shard.shard) for shard in manifest.shards)
    environment = Environment(
        loader=PackageLoader("headframe_worker.finalize.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["compact"] = compact
    return environment.get_template("report.html.jinja").render(
        plan=plan,
        manifest=manifest,
        runs=runs,
        cards=_cards(manifest, runs),
        speed=_speed(runs),
        stages=_stages(runs),
        lengths=_lengths(manifest, index),
        norms=_norms(manifest),
        slots=_slots(manifest, runs),
        quarantine=_quarantine(manifest),
        versions=_versions(plan, runs),
    )


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.4 h`, `2.1 d`."""
    for limit, size, unit in ((100, 1, "s"), (6000, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds / 86400:.1f} d"


def _cards(manifest: DatasetManifest, runs: RunTotals) -> list[tuple[str, str, str]]:
    points = throughput(runs)
    active = [rate for _, rate in points if rate > 0]
    refused = sum(manifest.quarantined.values())
    devices = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in sorted(runs.devices.items()))
    return [
        ("Samples", f"{manifest.samples:,}", f"of {manifest.rows_in:,} rows"),
        ("Tokens", compact(manifest.tokens), f"{compact(manifest.loss_tokens)} of them to learn"),
        ("Size", human_bytes(manifest.bytes), f"{sum(shard.parts for shard in manifest.shards):,} parts"),
        ("Speed", f"{compact(sum(active) / len(active)) if active else '–'} tok/s", "all processes together"),
        ("Compute time", duration(runs.wall_seconds), devices or "no process"),
        ("Quarantine", f"{refused:,}", f"{refused / max(1, manifest.rows_in):.2%} of the rows"),
    ]


def _speed(runs: RunTotals) -> Markup | None:
    points = throughput(runs)
    if not points:
        return None
    size, unit = next(
        (size, unit)
        for limit, size, unit in ((300, 1, "s"), (18000, 60, "min"), (1e18, 3600, "h"))
        if points[-1][0] < limit
    )
    best = max(rate for _, rate in points)
    return area_chart(
        [(seconds / size, rate) for seconds, rate in points],
        label=f"Tokens per second over {duration(points[-1][0])}; at most {compact(best)}",
        x_unit=unit,
    )


def _stages(runs: RunTotals) -> list[dict[str, Any]]:
    """Busy seconds by stage as shares of all processes' wall time; stages overlap."""
    seconds: dict[str, float] = {**runs.stage_seconds, "load": runs.load_seconds}
    wall = max(runs.wall_seconds, 1e-9)
    return [
        {
            "key": key,
            "name": _STAGES.get(key, (key, ""))[0],
            "what": _STAGES.get(key, (key, ""))[1],
            "seconds": duration(value),
            "percent": 100 * value / wall,
        }
        for key, value in sorted(
            seconds.items(), key=lambda entry: list(_STAGES).index(entry[0]) if entry[0] in _STAGES else 99
        )
    ]


def _lengths(manifest: DatasetManifest, index: Path) -> Markup | None:
    if not manifest.samples:
        return None
    top = manifest.lengths.maximum
    width = _round_step(top / _BARS)
    counts = np.zeros(-(-top // width), np.int64)
    for columns in read_columns(index, ["length"]):
        counts += np.bincount((columns["length"] - 1) // width, minlength=len(counts))
    bars = [
        Bar(float(count), f"{number * width + 1} to {(number + 1) * width} tokens: {count:,} samples")
        for number, count in enumerate(counts)
    ]
    return histogram(
        bars, label=f"Samples by length, in steps of {width} tokens, up to {top}", x_top=width * len(counts)
    )


def _round_step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 ... that is not below `least`."""
    power: int = 10 ** max(0, ceil(log10(least)) - 1) if least > 1 else 1
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least)


def _norms(manifest: DatasetManifest) -> Markup | None:
    if not manifest.statistics:
        return None
    ranges = [
        Range(name, entry.norm_min, entry.norm_mean, entry.norm_max)
        for name, entry in zip(manifest.slot_names, manifest.statistics, strict=True)
    ]
    return range_chart(ranges, label="Smallest, mean and largest norm of a token's state in each slot, logarithmic")


def _slots(manifest: DatasetManifest, runs: RunTotals) -> list[dict[str, Any]]:
    states = manifest.states
    layers = [
        (str(layer), "none" if index is None else str(index))
        for layer, index in zip(states.layers, states.hugging_face_indexes, strict=True)
    ]
    if states.last != "none":
        layers.append((str(states.last_layer), f"{states.last_layer + 1} {'†' if states.last == 'preNorm' else '‡'}"))
    rows = []
    for number, (name, (layer, index)) in enumerate(zip(manifest.slot_names, layers, strict=True)):
        statistics = manifest.statistics[number] if manifest.statistics else None
        extreme = runs.extremes[number] if number < len(runs.extremes) else None
        rows.append(
            {
                "number": number,
                "name": name,
                "layer": layer,
                "index": index,
                "statistics": statistics,
                "outlier": statistics.norm_max / max(statistics.norm_mean, 1e-30) if statistics else 0.0,
                "where": part_key(extreme.shard, extreme.part) if extreme and extreme.norm >= 0 else "–",
            }
        )
    return rows


def _quarantine(manifest: DatasetManifest) -> list[dict[str, Any]]:
    most = max(manifest.quarantined.values(), default=1)
    return [
        {"reason": reason, "count": count, "percent": 100 * count / most, "share": count / max(1, manifest.rows_in)}
        for reason, count in sorted(manifest.quarantined.items(), key=lambda entry: -entry[1])
    ]


def _versions(plan: Plan, runs: RunTotals) -> list[tuple[str, str, str]]:
    """(what, in prepare, in extract)"""
    extract: Mapping[str, str] = {name: ", ".join(sorted(numbers)) for name, numbers in runs.versions.items()}
    return [(name, plan.versions.get(name, "–"), extract.get(name, "–")) for name in sorted({*plan.versions, *extract})]
