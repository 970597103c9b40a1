"""A small extracted output of made-up states: what finalize, verify and the readers work on, without a model.

`write_extracted` leaves an output as extract does (plan, tokens, parts, shard manifests); its `states_of` says what is
stored for each row, so that a test compares what it reads with what was meant. Real outputs are made by the end-to-end
tests; this one covers float8, several shards and parts, and quarantine within milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from headframe_api.job import ExtractionJob
from headframe_api.manifests import (
    ExtractionRun,
    PartEntry,
    PartMetadata,
    QuarantinedRow,
    ShardManifest,
    SlotStatistics,
    Throughput,
)
from headframe_api.names import JOB_KEY, PLAN_KEY, part_key, quarantine_key, shard_manifest_key, tokens_key
from headframe_api.parse import parse_job
from headframe_api.plan import LengthPercentiles, ModelIdentity, Plan, ShardPlan, StatesLayout, TokensIdentity
from headframe_api.spec import StateDtype
from headframe_worker.finalize.stage import finalize
from headframe_worker.format.cut import PartPlan, shard_parts
from headframe_worker.format.part import PartArrays, decode_header, encode_part, header_bytes
from headframe_worker.meter import Meter
from headframe_worker.prepare.tokens_file import directory_files, tokens_writer
from headframe_worker.stores.base import Store
from headframe_worker.stores.local import LocalStore

TORCH_DTYPE = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
FLOAT8_LARGEST = 448.0
REFUSED_ROW = 5
"""A row that `extract` refused, where the output has one."""


MADE_UP = ModelIdentity(
    source="made/up",
    revision="0123456789abcdef0123456789abcdef01234567",
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=6,
    hidden_size=16,
    vocab_size=1000,
    context_length=4096,
    dtype="float32",
    norm_type="LlamaRMSNorm",
    norm_gain="weight",
    norm_epsilon=1e-5,
)


@dataclass
class SyntheticOutput:
    """An extracted output and what is in it."""

    store: Store
    job: ExtractionJob
    plan: Plan
    tokens: list[NDArray[np.int64]]
    masks: list[NDArray[np.int64]]
    states: list[torch.Tensor]
    """[T, S, H] float32, by row, as they were before they were stored."""
    refused: set[int] = field(default_factory=set)

    @property
    def directory(self) -> Path:
        """Where it lies."""
        assert isinstance(self.store, LocalStore)
        return self.store.directory

    @property
    def kept(self) -> list[int]:
        """Rows whose states are stored."""
        return [row for row in range(len(self.tokens)) if row not in self.refused]


def write_extracted(
    store: Store,
    *,
    lengths: list[int] | None = None,
    shards: int = 2,
    dtype: StateDtype = "bfloat16",
    last: str = "preNorm",
    layers: tuple[int, ...] = (-1, 1, 4),
    hidden_size: int = 16,
    part_target_bytes: int = 20_000,
    refuse: bool = True,
    refused_by_prepare: str = "InvalidJson",
    seed: int = 0,
    model: ModelIdentity | None = None,
    model_source: str = "made/up",
    vocabulary: int = 1000,
    states_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    tokens: list[NDArray[np.int64]] | None = None,
) -> SyntheticOutput:
    """Write everything that prepare and extract write; `states_of` computes [T, S, H] from tokens, else both are random."""
    random = np.random.default_rng(seed)
    if tokens is not None:
        lengths = list(map(len, tokens))
    lengths = lengths or [int(length) for length in random.integers(1, 40, 60)]
    output = SyntheticOutput(
        store,
        _job(store.uri, model_source),
        _plan(
            lengths,
            shards,
            StatesLayout(
                layers=list(layers),
                hugging_face_indexes=[layer + 1 for layer in layers],
                last=last,  # type: ignore[arg-type]
                last_layer=(model or MADE_UP).num_layers - 1,
                dtype=dtype,
            ),
            model or MADE_UP.model_copy(update={"hidden_size": hidden_size}),
            part_target_bytes,
            refused_by_prepare,
        ),
        tokens or [random.integers(0, vocabulary, length) for length in lengths],
        [(np.arange(length) >= length // 2).astype(np.int64) for length in lengths],
        [],
        {REFUSED_ROW} if refuse and len(lengths) > REFUSED_ROW else set(),
    )
    if states_of is None:
        generator = torch.Generator().manual_seed(seed)
        scale = torch.arange(1, output.plan.states.slots + 1).view(1, -1, 1)
        shape = (output.plan.states.slots, output.plan.model.hidden_size)
        output.states = [torch.randn(length, *shape, generator=generator) * scale for length in lengths]
    else:
        output.states = [states_of(torch.from_numpy(tokens)) for tokens in output.tokens]
    store.write(PLAN_KEY, [memoryview(output.plan.to_json())])
    store.write(JOB_KEY, [memoryview(output.job.model_dump_json(by_alias=True).encode())])
    for key, data in directory_files(len(output.plan.shards), output.plan.digest).items():
        store.write(key, [memoryview(data)])
    refused = QuarantinedRow(
        row=None, sample_id="made:60", where="made:60", reason=refused_by_prepare, message="made up"
    )
    store.write(quarantine_key("prepare"), [memoryview(refused.model_dump_json().encode() + b"\n")])
    for shard in output.plan.shards:
        _write_tokens(output, shard)
        write_shard(output, shard)
    return output


def write_finished(directory: Path, **options: Any) -> SyntheticOutput:
    """Write and finalize a dataset at `output` in a directory; the options are those of `write_extracted`."""
    output = write_extracted(LocalStore(directory / "output"), **options)
    finalize(output.job, output.store, scratch=directory / "scratch", meter=Meter("finalize"))
    return output


def write_shard(output: SyntheticOutput, shard: ShardPlan) -> None:
    """What extract writes for one shard."""
    lengths = [len(output.tokens[row]) for row in range(shard.first_row, shard.first_row + shard.samples)]
    entries = [write_part(output, shard, part) for part in shard_parts(output.plan, lengths)]
    manifest = ShardManifest(
        plan=output.plan.digest,
        shard=shard.index,
        samples=sum(entry.samples for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        bytes=sum(entry.bytes for entry in entries),
        parts=entries,
        runs=[_run(shard, len(entries))],
    )
    lines = b"".join(row.model_dump_json().encode() + b"\n" for entry in entries for row in entry.quarantined)
    if lines:
        output.store.write(quarantine_key("extract", shard.index), [memoryview(lines)])
    output.store.write(shard_manifest_key(shard.index), [memoryview(manifest.to_json())])


def write_part(output: SyntheticOutput, shard: ShardPlan, part: PartPlan) -> PartEntry:
    """One part; returns its entry for the shard's manifest."""
    plan = output.plan
    rows = [shard.first_row + int(row) for row in part.rows]
    refused = [row for row in rows if row in output.refused]
    rows = [row for row in rows if row not in refused]
    slots, hidden = plan.states.slots, plan.model.hidden_size
    states = torch.cat([torch.zeros(0, slots, hidden), *(output.states[row] for row in rows)])
    stored, scales = encode(states, plan.states.dtype)
    arrays = PartArrays(
        hidden_states=stored.contiguous().view(torch.uint8).numpy().reshape(-1),
        token_ids=np.concatenate([np.zeros(0), *(output.tokens[row] for row in rows)]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(0), *(output.masks[row] for row in rows)]).astype(np.uint8),
        offsets=np.concatenate([[0], np.cumsum([len(output.tokens[row]) for row in rows])]).astype(np.int64),
        rows=np.array(rows, np.int64),
        scales=None if scales is None else scales.numpy(),
    )
    metadata = PartMetadata(
        plan=plan.digest,
        shard=shard.index,
        part=part.part,
        layers=plan.states.layers,
        last=plan.states.last,
        model=plan.model.source,
        revision=plan.model.revision,
        quarantined=[
            QuarantinedRow(row=row, sample_id=f"sample-{row}", where=f"made:{row}", reason="NonFinite", message="NaN")
            for row in refused
        ],
        statistics=[_statistics(states[:, slot]) for slot in range(slots)],
    )
    buffers = encode_part(arrays, metadata, slots=slots, hidden_size=hidden, dtype=plan.states.dtype)
    output.store.write(part_key(shard.index, part.part), buffers)
    first = bytes(buffers[0])
    return decode_header(first[: header_bytes(first)], where="synthetic").entry


def encode(states: torch.Tensor, dtype: StateDtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States as they are stored, and the scales of float8."""
    if dtype != "float8_e4m3fn":
        return states.to(TORCH_DTYPE[dtype]), None
    scales = (states.abs().amax(-1) / FLOAT8_LARGEST).clamp(min=1e-12)
    return (states / scales[..., None]).to(torch.float8_e4m3fn), scales


def _statistics(states: torch.Tensor) -> SlotStatistics:
    norms = states.norm(dim=-1)
    return SlotStatistics(
        tokens=len(states),
        sum=float(states.double().sum()),
        norm_mean=float(norms.mean()) if len(norms) else 0.0,
        norm_min=float(norms.min()) if len(norms) else 0.0,
        norm_max=float(norms.max()) if len(norms) else 0.0,
    )


def _write_tokens(output: SyntheticOutput, shard: ShardPlan) -> None:
    rows = range(shard.first_row, shard.first_row + shard.samples)
    path = output.directory / tokens_key(shard.index)
    path.parent.mkdir(exist_ok=True)
    with tokens_writer(path) as writer:
        writer.write(
            np.concatenate([np.zeros(0, np.int64), *(output.tokens[row] for row in rows)]).astype(np.int32),
            np.concatenate([np.zeros(0, np.int64), *(output.masks[row] for row in rows)]).astype(np.uint8),
            np.array([len(output.tokens[row]) for row in rows], np.int64),
            pa.array([f"sample-{row}" for row in rows], pa.string()),
        )


def _job(uri: str, model: str) -> ExtractionJob:
    return parse_job(
        {
            "apiVersion": "headframe.dev/v1alpha1",
            "kind": "ExtractionJob",
            "metadata": {"name": "synthetic"},
            "spec": {
                "model": {"source": model, "gpus": 0, "dtype": "float32"},
                "dataset": {"source": "chats.jsonl"},
                "output": {"uri": uri},
                "failurePolicy": {"maxQuarantinedFraction": 0.1},
            },
        },
        where="synthetic",
    )


def _plan(
    lengths: list[int],
    shards: int,
    states: StatesLayout,
    model: ModelIdentity,
    part_target_bytes: int,
    refused_by_prepare: str,
) -> Plan:
    bounds = np.linspace(0, len(lengths), shards + 1).astype(int)
    plan = Plan(
        digest="",
        created_at="2026-01-01T00:00:00Z",
        versions={"headframe": "0.1.0", "transformers": "5.24.0"},
        model=model,
        tokens_from=TokensIdentity(
            source="chats.jsonl",
            format="messages",
            format_reason="column messages",
            files_digest="sha256:1",
            tokenizer_digest="sha256:2",
            chat_template_digest="sha256:3",
            loss_mask="assistant",
            mask_method="prefix",
            max_length=4096,
            on_too_long="truncate",
            limit=None,
        ),
        states=states,
        rows_in=len(lengths) + 1,
        samples=len(lengths),
        tokens=sum(lengths),
        loss_tokens=sum(length - length // 2 for length in lengths),
        quarantined={refused_by_prepare: 1},
        lengths=LengthPercentiles(minimum=min(lengths), p50=1, p90=1, p99=1, maximum=max(lengths), mean=1.0),
        part_target_bytes=part_target_bytes,
        bytes=sum(lengths) * states.bytes_per_token(model.hidden_size),
        shards=[],
    )
    planned = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        own = lengths[start:stop]
        parts = len(shard_parts(plan, own))
        planned.append(ShardPlan(index=index, first_row=int(start), samples=len(own), tokens=sum(own), parts=parts))
    return plan.model_copy(update={"shards": planned}).sealed()


def _run(shard: ShardPlan, parts: int) -> ExtractionRun:
    return ExtractionRun(
        started_at=f"2026-01-01T00:0{shard.index % 10}:00Z",
        wall_seconds=10.0,
        model_load_seconds=1.0,
        device="CPU",
        versions={"headframe": "0.1.0", "torch": "2.15.0", "transformers": "5.24.0"},
        attention="sdpa",
        fusions=[],
        slow_path=[],
        self_check_error=1e-7,
        batch_tokens=4096,
        padding_fraction=0.03,
        out_of_memory_retries=0,
        parts=list(range(parts)),
        stage_seconds={
            "data": 0.5,
            "forward": 8.0,
            "copy": 1.0,
            "write": 2.0,
            "waiting_data": 0.1,
            "waiting_write": 0.2,
        },
        throughput=[
            Throughput(seconds=float(step), tokens=shard.tokens // 10, samples=max(1, shard.samples // 10))
            for step in range(1, 11)
        ],
    )
