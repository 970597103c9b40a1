"""What prepare leaves behind for given token ids and a real checkpoint: the state in which extract begins.

Tests that start from text run prepare itself; these start from token ids, so that every family can have its own vocabulary.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from headframe_api.job import ExtractionJob
from headframe_api.layers import hugging_face_indexes, resolve_layers
from headframe_api.names import PLAN_KEY, tokens_key
from headframe_api.parse import parse_job
from headframe_api.plan import LengthPercentiles, ModelIdentity, Plan, ShardPlan, StatesLayout, TokensIdentity
from headframe_worker.extract.stage import Extractor
from headframe_worker.format.cut import shard_parts
from headframe_worker.meter import Meter
from headframe_worker.model_source import locate_model
from headframe_worker.prepare.tokens_file import tokens_writer
from headframe_worker.stores.local import LocalStore

Samples = Sequence[NDArray[np.int64]]


def random_samples(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """Random token ids from 3 on: 0 to 2 are special in the tiny checkpoints."""
    random = np.random.default_rng(seed)
    return [random.integers(3, vocabulary, length) for length in lengths]


def write_prepared(
    directory: Path,
    checkpoint: Path,
    samples: Samples,
    *,
    states: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    batch_tokens: int | str = "auto",
    shards: int = 1,
    part_target_bytes: int = 1 << 30,
) -> tuple[ExtractionJob, Plan, LocalStore]:
    """Write plan.json and tokens/ for samples; the job computes on the CPU, in float32 unless `model` says otherwise."""
    job = parse_job(
        {
            "apiVersion": "headframe.dev/v1alpha1",
            "kind": "ExtractionJob",
            "metadata": {"name": "test"},
            "spec": {
                "model": {"source": str(checkpoint), "gpus": 0, "dtype": "float32", **(model or {})},
                "dataset": {"source": "tokens.jsonl", "format": "tokens", "lossMask": "all"},
                "states": {"dtype": "float32", **(states or {})},
                "output": {"uri": str(directory)},
                "batchTokens": batch_tokens,
            },
        },
        where="test",
    )
    plan = _plan(job, directory, samples, shards, part_target_bytes)
    store = LocalStore(directory)
    store.write(PLAN_KEY, [memoryview(plan.to_json())])
    for shard in plan.shards:
        _write_tokens(directory / tokens_key(shard.index), samples, shard)
    return job, plan, store


def extractor(
    job: ExtractionJob,
    plan: Plan,
    store: LocalStore,
    *,
    meter: Meter | None = None,
    stop: threading.Event | None = None,
    grace_seconds: float = 20.0,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
) -> Extractor:
    """An extractor, on the CPU unless told otherwise."""
    return Extractor(
        job,
        plan,
        store,
        devices=devices,
        scratch=store.directory / "scratch",
        meter=meter or Meter("extract"),
        stop=stop or threading.Event(),
        grace_seconds=grace_seconds,
    )


def _plan(job: ExtractionJob, directory: Path, samples: Samples, shards: int, part_target_bytes: int) -> Plan:
    spec = job.spec
    files = locate_model(spec.model, spec.s3, scratch=directory / "scratch", weights=True)
    config = files.config().get_text_config(decoder=True)
    layers = resolve_layers(spec.states.preset, spec.states.layers, config.num_hidden_layers)
    layout = StatesLayout(
        layers=list(layers),
        hugging_face_indexes=list(hugging_face_indexes(layers)),
        last=spec.states.last,
        last_layer=config.num_hidden_layers - 1,
        dtype=spec.states.dtype,
    )
    lengths = [len(sample) for sample in samples]
    plan = Plan(
        digest="",
        created_at="2026-01-01T00:00:00Z",
        versions={},
        model=ModelIdentity(
            source=spec.model.source,
            revision=files.revision,
            architecture="unknown",
            model_type=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            context_length=None,
            dtype=spec.model.dtype,
            norm_type="unknown",
            norm_gain="weight",
            norm_epsilon=None,
        ),
        tokens_from=TokensIdentity(
            source=spec.dataset.source,
            format="tokens",
            format_reason="asked for",
            files_digest="sha256:1",
            tokenizer_digest="sha256:2",
            chat_template_digest=None,
            loss_mask="all",
            mask_method="all",
            max_length=4096,
            on_too_long="truncate",
            limit=None,
        ),
        states=layout,
        rows_in=len(samples),
        samples=len(samples),
        tokens=sum(lengths),
        loss_tokens=sum(lengths),
        quarantined={},
        lengths=LengthPercentiles(minimum=min(lengths), p50=1, p90=1, p99=1, maximum=max(lengths), mean=1.0),
        part_target_bytes=part_target_bytes,
        bytes=sum(lengths) * layout.bytes_per_token(config.hidden_size),
        shards=[],
    )
    bounds = np.linspace(0, len(lengths), shards + 1).astype(int)
    planned = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        own = lengths[start:stop]
        parts = len(shard_parts(plan, own))
        planned.append(ShardPlan(index=index, first_row=int(start), samples=len(own), tokens=sum(own), parts=parts))
    return plan.model_copy(update={"shards": planned}).sealed()


def _write_tokens(path: Path, samples: Samples, shard: ShardPlan) -> None:
    own = samples[shard.first_row : shard.first_row + shard.samples]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tokens_writer(path) as writer:
        lengths = np.array([len(sample) for sample in own], np.int64)
        writer.write(
            np.concatenate(own).astype(np.int32),
            np.ones(int(lengths.sum()), np.uint8),
            lengths,
            pa.array([f"sample-{shard.first_row + index}" for index in range(len(own))], pa.string()),
        )
