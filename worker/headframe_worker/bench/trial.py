"""A trial: a job of some of the real job's samples, from its tokens to committed parts, by the same code."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from headframe_api.job import ExtractionJob
from headframe_api.names import tokens_key
from headframe_api.plan import Plan, ShardPlan
from headframe_worker.bench.commits import CommitMeter, steady_bytes_per_second
from headframe_worker.bench.workload import ShardBatch
from headframe_worker.engine.engine import Engine
from headframe_worker.extract.stage import Extractor
from headframe_worker.format.cut import cut_parts
from headframe_worker.meter import STAGES, WAITS
from headframe_worker.prepare.scratch_space import scratch_space
from headframe_worker.prepare.tokens_file import TokensShard, tokens_writer
from headframe_worker.stores.base import Store


@dataclass(frozen=True)
class Trial:
    """One run from tokens to committed parts."""

    uri: str
    tokens: int
    bytes: int
    parts: int
    seconds: float
    """From the first token read to the shard's manifest."""
    tokens_per_second: float
    """Once it runs: without filling the pipeline and without the last write."""
    write_bytes_per_second: float
    """Of one writer while it writes; the pipeline has two."""
    stage_seconds: dict[str, float]
    """By the meter's stages and waits; those of other threads run beside the forward."""


@dataclass(frozen=True)
class TrialRunner:
    """The real job's model, ready, and an empty place for trials of it."""

    job: ExtractionJob
    plan: Plan
    tokens: TokensShard
    """Of the shard that samples are drawn from."""
    engine: Engine
    devices: Sequence[torch.device]
    meter: CommitMeter
    """The engine's own."""
    place: Store
    scratch: Path
    stop: threading.Event

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in a part."""
        return self.plan.states.bytes_per_token(self.plan.model.hidden_size)

    def run(self, batches: Sequence[ShardBatch], *, parts: int) -> Trial:
        """Extract the samples of these batches into at least so many parts, smaller than the job's where they must be.

        What it wrote is deleted again.
        """
        plan = self._write(batches, parts)
        before, upload_before, first = (
            dict(self.meter.seconds),
            self.meter.upload_seconds.total,
            len(self.meter.commits),
        )
        extractor = Extractor(
            self.job,
            plan,
            self.place,
            devices=self.devices,
            scratch=self.scratch,
            meter=self.meter,
            stop=self.stop,
            engine=self.engine,
        )
        started = time.perf_counter()
        done = extractor.run(0)
        elapsed = time.perf_counter() - started
        self.place.delete([info.key for info in self.place.list()])
        pace = steady_bytes_per_second(self.meter.commits[first:])
        return Trial(
            uri=self.place.uri,
            tokens=done.tokens,
            bytes=done.bytes,
            parts=len(done.parts),
            seconds=elapsed,
            tokens_per_second=done.tokens / elapsed if pace is None else pace * done.tokens / done.bytes,
            write_bytes_per_second=done.bytes / (self.meter.upload_seconds.total - upload_before),
            stage_seconds={name: self.meter.seconds[name] - before[name] for name in (*STAGES, *WAITS)},
        )

    def _write(self, batches: Sequence[ShardBatch], parts: int) -> Plan:
        """tokens/ of the trial; its plan, with one shard and otherwise the job's."""
        rows = np.sort(np.concatenate([entry.rows for entry in batches]))
        lengths = self.tokens.seq_len[rows]
        samples = [self.tokens.sample(int(row)) for row in rows]
        total = int(lengths.sum())
        with scratch_space(self.scratch) as folder:
            path = folder / "trial.arrow"
            with tokens_writer(path) as writer:
                writer.write(
                    np.concatenate([ids for ids, _ in samples]).astype(np.int32),
                    np.concatenate([mask for _, mask in samples]),
                    lengths,
                    pa.array([str(row) for row in rows], pa.string()),
                )
            self.place.write_file(tokens_key(0), path)
        part_bytes = max(1, min(self.plan.part_target_bytes, total * self.token_bytes // parts))
        planned = cut_parts(lengths, bytes_per_token=self.token_bytes, target_bytes=part_bytes)
        shard = ShardPlan(index=0, first_row=0, samples=len(rows), tokens=total, parts=len(planned))
        changes = {"shards": [shard], "samples": len(rows), "tokens": total, "part_target_bytes": part_bytes}
        return self.plan.model_copy(update=changes).sealed()
