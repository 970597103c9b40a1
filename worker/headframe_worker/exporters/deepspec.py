"""DeepSpec's target cache, version 2: few large shards and an index of fixed-size records.

Checked against deepseek-ai/DeepSpec afdfa7c: deepspec/data/target_cache_dataset.py,
scripts/data/prepare_target_cache.py, and deepspec/eval/base_evaluator.py, which refuses the last decoder layer.

    shard-00000.bin    sample after sample: input_ids [T] int32, attention_mask [T] uint8 (ones), loss_mask [T] uint8,
                       target_hidden_states [T, L*H] bfloat16, target_last_hidden_states [T, H] bfloat16 (after the final norm)
    samples.idx        a little-endian record <QIIQQQQQ a sample: id (dense), shard, T, the five offsets
    manifest.json

Layers are numbered as Headframe's, -1 being the embeddings, in ascending order. One shard here is one part of the dataset.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from headframe_api.plan import Plan
from headframe_worker.exporters.export import Advance, PartDone, SourceKey
from headframe_worker.exporters.kept_layers import layers_side_by_side, need_ascending, need_no_last_layer
from headframe_worker.exporters.last_state import PostNorm
from headframe_worker.exporters.samples import Sample, SourceDataset, SourcePart
from headframe_worker.model_ends.checkpoint import ModelAccess
from headframe_worker.stores.base import Store

_VERSION = 2
_RECORD = struct.Struct("<QIIQQQQQ")


class DeepSpec:
    """See the module."""

    def __init__(self, plan: Plan, access: ModelAccess, *, min_loss_tokens: int = 0) -> None:
        need_ascending(plan.states, "DeepSpec")
        need_no_last_layer(plan.states, "DeepSpec")
        self._layers = len(plan.states.layers)
        self._min_loss_tokens = min_loss_tokens
        self._last = PostNorm.prepare(plan, access, trainer="DeepSpec")

    @property
    def options(self) -> dict[str, Any]:
        """See Exporter."""
        return {"to": "deepspec", "min_loss_tokens": self._min_loss_tokens}

    def export_part(self, part: SourcePart, target: Store, threads: ThreadPoolExecutor, advance: Advance) -> PartDone:
        """See Exporter. One shard is held in memory."""
        wanted = [i for i in range(len(part.rows)) if int(part.mask(i).sum()) >= self._min_loss_tokens]
        kept = set(wanted)
        buffers: list[memoryview] = []
        records: list[list[int]] = []
        position = 0
        for sample, tensors in threads.map(lambda index: self._tensors(part.sample(index)), wanted):
            record = [len(sample.token_ids)]
            for tensor in tensors:
                record.append(position)
                if tensor.nbytes:
                    buffers.append(tensor.view(torch.uint8).reshape(-1).numpy().data)
                    position += tensor.nbytes
            records.append(record)
            advance(1, len(sample.token_ids), 0)
        if wanted:
            target.write(_shard_file(part.shard, part.part), buffers)
            advance(0, 0, position)
        return PartDone(
            rows=[int(part.rows[index]) for index in wanted],
            left_out=[int(part.rows[index]) for index in range(len(part.rows)) if index not in kept],
            bytes=position,
            records=records,
        )

    def finish(self, source: SourceDataset, target: Store, done: Iterator[tuple[SourceKey, PartDone]]) -> None:
        """See Exporter. Sample ids count the rows that are there, in their order."""
        files: list[str] = []
        found: list[tuple[int, int, list[int]]] = []
        for key, part in done:
            if part.rows:
                found += [(row, len(files), record) for row, record in zip(part.rows, part.records, strict=True)]
                files.append(_shard_file(*key))
        found.sort()
        index = b"".join(_RECORD.pack(number, shard, *record) for number, (_, shard, record) in enumerate(found))
        target.write("samples.idx", [memoryview(index)])
        plan = source.plan
        manifest = {
            "version": _VERSION,
            "num_samples": len(found),
            "num_shards": len(files),
            "target_layer_ids": list(plan.states.layers),
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": _RECORD.size,
            "hidden_size": plan.model.hidden_size,
            "shards": [{"shard_id": number, "file_name": name} for number, name in enumerate(files)],
            "target_model_name_or_path": plan.model.source,
            "max_length": plan.tokens_from.max_length,
            "min_loss_tokens": self._min_loss_tokens,
            "headframe_plan": plan.digest,
        }
        target.write("manifest.json", [memoryview(json.dumps(manifest, indent=2, sort_keys=True).encode())])

    def _tensors(self, sample: Sample) -> tuple[Sample, list[torch.Tensor]]:
        mask = sample.loss_mask.to(torch.uint8)
        return sample, [
            sample.token_ids.to(torch.int32),
            torch.ones_like(mask),
            mask,
            layers_side_by_side(sample, self._layers, torch.bfloat16),
            self._last.of(sample, torch.bfloat16),
        ]


def _shard_file(shard: int, part: int) -> str:
    return f"shard-{shard:05d}-{part:05d}.bin"
