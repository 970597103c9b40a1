"""extract: one shard after the other through the model, part by part, each part committed as soon as it is written.

Nothing coordinates workers but the store itself: what is there is skipped, an exclusive write decides a race, and the shard's
manifest, written last, commits the shard.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from headframe_api.errors import ConfigError, DataError
from headframe_api.job import ExtractionJob
from headframe_api.manifests import ExtractionRun, PartEntry, ShardManifest
from headframe_api.names import part_key, quarantine_key, shard_manifest_key, shard_prefix, tokens_key
from headframe_api.plan import Plan, ShardPlan
from headframe_api.spec import ModelSpec, is_hub_id
from headframe_worker.documents import read_shard_manifest
from headframe_worker.engine.budget import default_tokens
from headframe_worker.engine.engine import Engine, EngineSettings
from headframe_worker.engine.loading import Checkpoint
from headframe_worker.engine.parts import FilledPart, TokenPart
from headframe_worker.engine.states import TORCH_DTYPE
from headframe_worker.extract.committed import committed_part, committed_parts
from headframe_worker.extract.part_object import part_object
from headframe_worker.extract.run_record import RunRecord
from headframe_worker.format.cut import PartPlan, shard_parts
from headframe_worker.format.part import decode_header
from headframe_worker.meter import Meter
from headframe_worker.model_source import locate_model
from headframe_worker.prepare.tokens_file import TokensShard, read_tokens
from headframe_worker.stores.base import Store
from headframe_worker.stores.observer import tell

logger = logging.getLogger(__name__)

GRACE_SECONDS = 20.0
"""How long after the wish to stop a part in flight may still be finished; Kubernetes kills a pod after 30 seconds."""


class Extractor:
    """A model and the output it works for: opened once a process, run for each shard it is given."""

    def __init__(
        self,
        job: ExtractionJob,
        plan: Plan,
        output: Store,
        *,
        devices: Sequence[torch.device],
        scratch: Path,
        meter: Meter,
        stop: threading.Event,
        grace_seconds: float = GRACE_SECONDS,
        engine: Engine | None = None,
    ) -> None:
        """`engine`: one that is ready for this model and these layers; without it, one is made where it is needed."""
        self.job = job
        self.plan = plan
        self.output = output
        self.devices = devices
        self.scratch = scratch
        self.meter = meter
        self.stop = stop
        self.grace_seconds = grace_seconds
        self._engine = engine
        self._load_is_told = False

    def load(self, shard: int | None = None) -> Engine | None:
        """Make the model ready, on samples of this shard or of the first that has any. `run` does it where it is needed.

        Returns None where there are no samples. Raises ConfigError where the model cannot be used.
        """
        candidates = [entry for entry in self.plan.shards if entry.samples and shard in (None, entry.index)]
        if self._engine is None and candidates:
            tokens = self._tokens(candidates[0])
            self._load(tokens, shard_parts(self.plan, tokens.seq_len)[0])
        return self._engine

    def run(self, shard: int) -> ShardManifest:
        """Compute what is missing of a shard and commit it; the manifest as it stands in the store.

        Raises StoppedError after the wish to stop; ConfigError, DataError, TemporaryError as their names say.
        """
        entry = self._shard_plan(shard)
        sizes = {info.key: info.size_bytes for info in self.output.list(shard_prefix(shard))}
        key = shard_manifest_key(shard)
        if key in sizes and self.output.exists(key):
            logger.info("shard %d is committed already", shard)
            return self._manifest(shard)
        work = _ShardWork(self, entry, self._tokens(entry), sizes)
        if work.entries:
            logger.info(
                "shard %d: of its parts %d are committed already, %d are missing",
                shard,
                len(work.entries),
                len(work.missing),
            )
        if work.missing:
            engine = self._load(work.tokens, work.missing[0])
            record = RunRecord(self.meter)
            self.meter.begin_shard(
                shard,
                samples_total=entry.samples,
                tokens_total=entry.tokens,
                samples_done=sum(part.samples for part in work.entries.values()),
                tokens_done=sum(part.tokens for part in work.entries.values()),
            )
            with record:
                work.compute(engine, record)
            load_seconds = 0.0 if self._load_is_told else engine.facts.load_seconds
            self._load_is_told = True
            runs = [record.finish(engine.facts, load_seconds=load_seconds, batch_tokens=engine.batch_tokens)]
        else:
            runs = []
        return self._commit(entry, [work.entries[number] for number in sorted(work.entries)], runs)

    def close(self) -> None:
        """Release what the model holds."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _shard_plan(self, shard: int) -> ShardPlan:
        if not 0 <= shard < len(self.plan.shards):
            raise ConfigError(f"shard {shard}: the plan has {len(self.plan.shards)} shards, counted from 0")
        return self.plan.shards[shard]

    def _tokens(self, shard: ShardPlan) -> TokensShard:
        key = tokens_key(shard.index)
        tokens = read_tokens(self.output.fetch(key, self.scratch))
        counts = (len(tokens), int(tokens.seq_len.sum()))
        if counts != (shard.samples, shard.tokens):
            raise DataError(
                f"{self.output.uri}/{key}: holds {counts[0]:,} samples and {counts[1]:,} tokens, planned were "
                f"{shard.samples:,} and {shard.tokens:,}",
                reason="TokensMismatch",
            )
        return tokens

    def _load(self, tokens: TokensShard, part: PartPlan) -> Engine:
        if self._engine is None:
            spec, plan = self.job.spec, self.plan
            files = locate_model(
                _pinned(spec.model, plan),
                spec.s3,
                scratch=self.scratch,
                weights=True,
                observer=tell(self.meter, self.stop),
            )
            if files.revision != plan.model.revision:
                raise ConfigError(
                    f"spec.model.source: {spec.model.source} has changed since the plan was made: revision {files.revision}, "
                    f"planned {plan.model.revision}",
                    reason="ModelChanged",
                )
            budget = None if spec.batch_tokens == "auto" else spec.batch_tokens
            settings = EngineSettings(
                checkpoint=Checkpoint(files.directory, files.gguf_file),
                devices=self.devices,
                dtype=TORCH_DTYPE[plan.model.dtype],
                states=plan.states,
                attention=spec.model.attention,
                trust_remote_code=spec.model.trust_remote_code,
                batch_tokens=budget,
                grace_seconds=self.grace_seconds,
            )
            samples = _first_samples(tokens, part, budget or default_tokens(self.devices[0]))
            self._engine = Engine(settings, samples, meter=self.meter, stop=self.stop)
            if self._engine.facts.placement is not None:
                logger.info("one replica on %d GPUs: %s", len(self.devices), self._engine.facts.placement)
        return self._engine

    def _manifest(self, shard: int) -> ShardManifest:
        manifest = read_shard_manifest(self.output, shard)
        if manifest.plan != self.plan.digest:
            raise ConfigError(
                f"{self.output.uri}/{shard_manifest_key(shard)}: belongs to plan {manifest.plan}, not to {self.plan.digest}; "
                "choose another spec.output.uri, or delete what is there",
                reason="ForeignOutput",
            )
        return manifest

    def _commit(self, shard: ShardPlan, entries: Sequence[PartEntry], runs: Sequence[ExtractionRun]) -> ShardManifest:
        manifest = ShardManifest(
            plan=self.plan.digest,
            shard=shard.index,
            samples=sum(entry.samples for entry in entries),
            tokens=sum(entry.tokens for entry in entries),
            bytes=sum(entry.bytes for entry in entries),
            parts=list(entries),
            runs=list(runs),
        )
        quarantined = [row for entry in entries for row in entry.quarantined]
        if manifest.samples + len(quarantined) != shard.samples:
            raise DataError(
                f"shard {shard.index}: {manifest.samples:,} samples and {len(quarantined):,} in quarantine do not make the "
                f"{shard.samples:,} planned",
                reason="CountMismatch",
            )
        if quarantined:
            lines = b"".join(row.model_dump_json().encode() + b"\n" for row in quarantined)
            self.output.write(quarantine_key("extract", shard.index), [memoryview(lines)])
        key = shard_manifest_key(shard.index)
        written = self.output.write(key, [memoryview(manifest.to_json())], exclusive=True)
        return manifest if written.created else self._manifest(shard.index)


class _ShardWork:
    """One shard in the works: what is committed of it, and what is missing."""

    def __init__(self, extractor: Extractor, shard: ShardPlan, tokens: TokensShard, sizes: Mapping[str, int]) -> None:
        self.extractor = extractor
        self.shard = shard
        self.tokens = tokens
        self.planned = {part.part: part for part in shard_parts(extractor.plan, tokens.seq_len)}
        self.entries = committed_parts(extractor.plan, shard.index, self.planned, sizes, extractor.output)
        self.missing = [part for number, part in self.planned.items() if number not in self.entries]
        self._lock = threading.Lock()

    def compute(self, engine: Engine, record: RunRecord) -> None:
        """Fill and commit the missing parts."""
        self.record = record
        engine.run(
            self._token_parts(engine.vocab_size),
            largest_part_tokens=max(part.tokens for part in self.missing),
            write=self._write,
        )

    def _token_parts(self, vocab_size: int) -> Iterator[TokenPart]:
        for part in self.missing:
            token_ids, loss_mask = _gather(self.tokens, part.rows)
            if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
                raise DataError(
                    f"{tokens_key(self.shard.index)}: token ids {token_ids.min()} to {token_ids.max()}, the model's embedding "
                    f"has {vocab_size} rows",
                    reason="TokenOutOfRange",
                )
            yield TokenPart(part.part, part.rows + self.shard.first_row, part.lengths, token_ids, loss_mask)

    def _write(self, filled: FilledPart) -> None:
        """Commit one part. Where another worker was faster, its part is the one that counts."""
        extractor = self.extractor
        buffers = part_object(extractor.plan, self.shard, self.tokens, filled)
        started = perf_counter()
        with extractor.meter.writing(sum(buffer.nbytes for buffer in buffers)):
            written = extractor.output.write(part_key(self.shard.index, filled.part), buffers, exclusive=True)
        extractor.meter.uploaded(size_bytes=written.size_bytes, seconds=perf_counter() - started)
        if written.created:
            entry = decode_header(bytes(buffers[0]), where=part_key(self.shard.index, filled.part)).entry
            self.record.committed(filled.part)
        else:
            entry = committed_part(extractor.plan, self.shard.index, self.planned[filled.part], extractor.output)
        with self._lock:
            self.entries[filled.part] = entry


def _pinned(spec: ModelSpec, plan: Plan) -> ModelSpec:
    """The spec with a hub id's revision as the plan pinned it."""
    if is_hub_id(spec.source) and not plan.model.revision.startswith("sha256:"):
        return spec.model_copy(update={"revision": plan.model.revision})
    return spec


def _gather(tokens: TokensShard, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """(token_ids [T], loss_mask [T]) of some rows, one after the other."""
    samples = [tokens.sample(int(row)) for row in rows]
    ids = np.concatenate([ids for ids, _ in samples]).astype(np.int32)
    return ids, np.concatenate([mask for _, mask in samples])


def _first_samples(tokens: TokensShard, part: PartPlan, wanted_tokens: int) -> list[NDArray[np.int32]]:
    """Samples of a part, longest first, that fill a batch, and its shortest."""
    padded = part.lengths[0] * np.arange(1, len(part.rows) + 1)
    count = max(1, int(np.searchsorted(padded, wanted_tokens, side="right")))
    rows = part.rows[:count].tolist()
    if count < len(part.rows):
        rows.append(int(part.rows[-1]))
    return [tokens.sample(row)[0].astype(np.int32) for row in rows]
