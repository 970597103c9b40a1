"""The dataset's manifest as a sum over its shards, added up one shard at a time."""

from __future__ import annotations

import platform
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from headframe_api.manifests import DatasetManifest, ShardEntry, SlotStatistics
from headframe_api.plan import LengthPercentiles, Plan
from headframe_worker.finalize.shard_check import CheckedShard


class DatasetTotals:
    """Sums over the shards seen so far. Memory grows with the number of shards and the longest sample, not with samples."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._shards: list[ShardEntry] = []
        self.failed: list[int] = []
        """Shards without a manifest."""
        self._missing_samples = 0
        self._loss_tokens = 0
        self._length_counts = np.zeros(0, np.int64)
        self._quarantined = Counter(plan.quarantined)
        self._statistics: list[SlotStatistics] = []
        self._fusions: set[str] = set()
        self._attention: set[str] = set()
        self._versions: dict[str, set[str]] = {}

    @property
    def quarantined(self) -> int:
        """Refused samples so far, those of prepare included."""
        return self._quarantined.total()

    def add(self, shard: CheckedShard) -> None:
        """Add a shard that has no faults, committed or not."""
        if shard.manifest is None:
            self.failed.append(shard.plan.index)
            self._missing_samples += shard.plan.samples
            return
        manifest = shard.manifest
        lengths = shard.samples.column("length").to_numpy()
        counts = np.bincount(lengths, minlength=len(self._length_counts))
        counts[: len(self._length_counts)] += self._length_counts
        self._length_counts = counts
        self._loss_tokens += int(shard.samples.column("loss_tokens").to_numpy().sum(dtype=np.int64))
        refused = [row for part in manifest.parts for row in part.quarantined]
        self._quarantined.update(row.reason for row in refused)
        for part in manifest.parts:
            self._statistics = merge_statistics(self._statistics, part.statistics)
        for run in manifest.runs:
            self._fusions.update(run.fusions)
            self._attention.add(run.attention)
            for name, number in run.versions.items():
                self._versions.setdefault(name, set()).add(number)
        self._shards.append(
            ShardEntry(
                shard=manifest.shard,
                samples=manifest.samples,
                tokens=manifest.tokens,
                bytes=manifest.bytes,
                parts=len(manifest.parts),
                quarantined=len(refused),
                manifest_digest=shard.manifest_digest,
            )
        )

    def manifest(self, samples_digest: str) -> DatasetManifest:
        """The manifest of what was added."""
        plan = self._plan
        return DatasetManifest(
            plan=plan.digest,
            created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            versions={"headframe": version("headframe-worker"), "python": platform.python_version()}
            | {name: ", ".join(sorted(numbers)) for name, numbers in sorted(self._versions.items())},
            model=plan.model,
            tokens_from=plan.tokens_from,
            states=plan.states,
            slot_names=list(plan.states.slot_names),
            hidden_size=plan.model.hidden_size,
            rows_in=plan.rows_in,
            samples=sum(shard.samples for shard in self._shards),
            tokens=sum(shard.tokens for shard in self._shards),
            loss_tokens=self._loss_tokens,
            bytes=sum(shard.bytes for shard in self._shards),
            lengths=length_percentiles(self._length_counts),
            quarantined=dict(sorted(self._quarantined.items())),
            failed_shards=self.failed,
            missing_samples=self._missing_samples,
            samples_digest=samples_digest,
            fusions=sorted(self._fusions),
            attention=sorted(self._attention),
            shards=self._shards,
            statistics=self._statistics,
        )


def merge_statistics(one: list[SlotStatistics], other: list[SlotStatistics]) -> list[SlotStatistics]:
    """Statistics over the tokens of both; a part without tokens (or an empty list) adds nothing."""
    if not one or not one[0].tokens:
        return other
    if not other or not other[0].tokens:
        return one
    return [
        SlotStatistics(
            tokens=a.tokens + b.tokens,
            sum=a.sum + b.sum,
            norm_mean=(a.norm_mean * a.tokens + b.norm_mean * b.tokens) / (a.tokens + b.tokens),
            norm_min=min(a.norm_min, b.norm_min),
            norm_max=max(a.norm_max, b.norm_max),
        )
        for a, b in zip(one, other, strict=True)
    ]


def length_percentiles(counts: NDArray[np.int64]) -> LengthPercentiles:
    """Percentiles (nearest rank) from how many samples have each length; zeros where there are no samples."""
    samples = int(counts.sum())
    if not samples:
        return LengthPercentiles(minimum=0, p50=0, p90=0, p99=0, maximum=0, mean=0.0)
    up_to = np.cumsum(counts)

    def at(fraction: float) -> int:
        return int(np.searchsorted(up_to, np.ceil(fraction * samples)))

    return LengthPercentiles(
        minimum=int(np.flatnonzero(counts)[0]),
        p50=at(0.5),
        p90=at(0.9),
        p99=at(0.99),
        maximum=len(counts) - 1,
        mean=float(np.dot(counts, np.arange(len(counts))) / samples),
    )
