"""What the extraction's processes did, added up over all shards: speed over time, stages, versions, devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np

from headframe_api.manifests import ExtractionRun, PartEntry, ShardManifest

_BINS = 72


@dataclass
class SlotExtremes:
    """Where a slot's largest norm was seen."""

    norm: float = -1.0
    shard: int = 0
    part: int = 0


@dataclass
class RunTotals:
    """Sums over processes; memory grows with the number of shards, not of samples."""

    wall_seconds: float = 0.0
    load_seconds: float = 0.0
    stage_seconds: Counter[str] = field(default_factory=Counter)
    devices: Counter[str] = field(default_factory=Counter)
    versions: dict[str, set[str]] = field(default_factory=dict)
    attention: set[str] = field(default_factory=set)
    fusions: set[str] = field(default_factory=set)
    slow_path: set[str] = field(default_factory=set)
    batch_tokens: set[int] = field(default_factory=set)
    self_check_error: float = 0.0
    padding: float = 0.0
    """Padded tokens' share, weighted by wall time."""
    out_of_memory_retries: int = 0
    extremes: list[SlotExtremes] = field(default_factory=list)
    stretches: list[tuple[float, float, int]] = field(default_factory=list)
    """(start, end, tokens) in seconds of absolute time."""

    @property
    def processes(self) -> int:
        """How many processes took part, restarts counted."""
        return self.devices.total()


def add_runs(shards: Iterable[ShardManifest]) -> RunTotals:
    """Sum up shards' manifests, one after the other."""
    totals = RunTotals()
    for shard in shards:
        for run in shard.runs:
            _add_run(totals, run)
        for part in shard.parts:
            _add_part(totals, shard.shard, part)
    return totals


def throughput(totals: RunTotals) -> list[tuple[float, float]]:
    """(seconds since the first start, tokens a second of all processes together) in even steps."""
    if not totals.stretches:
        return []
    starts, ends, tokens = (np.array(column, dtype=np.float64) for column in zip(*totals.stretches, strict=True))
    origin = starts.min()
    edges = np.linspace(0.0, max(ends.max() - origin, 1e-6), min(_BINS, 2 + len(starts)) + 1)
    # Tokens up to a moment, summed over stretches that each work at an even pace; its differences are the bins.
    spans = np.maximum(ends - starts, 1e-6)
    done = np.array([(np.clip((edge - (starts - origin)) / spans, 0, 1) * tokens).sum() for edge in edges])
    rates = np.diff(done) / np.diff(edges)
    middles = (edges[:-1] + edges[1:]) / 2
    return [
        (0.0, float(rates[0])),
        *zip(middles.tolist(), rates.tolist(), strict=True),
        (float(edges[-1]), float(rates[-1])),
    ]


def _add_run(totals: RunTotals, run: ExtractionRun) -> None:
    totals.padding = (totals.padding * totals.wall_seconds + run.padding_fraction * run.wall_seconds) / max(
        totals.wall_seconds + run.wall_seconds, 1e-9
    )
    totals.wall_seconds += run.wall_seconds
    totals.load_seconds += run.model_load_seconds
    totals.stage_seconds.update(run.stage_seconds)
    totals.devices[run.device] += 1
    totals.attention.add(run.attention)
    totals.fusions.update(run.fusions)
    totals.slow_path.update(run.slow_path)
    totals.batch_tokens.add(run.batch_tokens)
    totals.self_check_error = max(totals.self_check_error, run.self_check_error)
    totals.out_of_memory_retries += run.out_of_memory_retries
    for name, number in run.versions.items():
        totals.versions.setdefault(name, set()).add(number)
    start = datetime.fromisoformat(run.started_at).timestamp()
    before = 0.0
    for stretch in run.throughput:
        totals.stretches.append((start + before, start + stretch.seconds, stretch.tokens))
        before = stretch.seconds


def _add_part(totals: RunTotals, shard: int, part: PartEntry) -> None:
    for slot, statistics in enumerate(part.statistics):
        if slot == len(totals.extremes):
            totals.extremes.append(SlotExtremes())
        if statistics.tokens and statistics.norm_max > totals.extremes[slot].norm:
            totals.extremes[slot] = SlotExtremes(statistics.norm_max, shard, part.part)
