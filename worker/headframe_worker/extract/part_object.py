"""From a filled part to the bytes of its object, with what its header must say of it."""

from __future__ import annotations

import numpy as np

from headframe_api.manifests import PartMetadata, QuarantinedRow
from headframe_api.names import tokens_key
from headframe_api.plan import Plan, ShardPlan
from headframe_worker.engine.parts import FilledPart
from headframe_worker.format.part import PartArrays, encode_part
from headframe_worker.prepare.tokens_file import TokensShard


def part_object(plan: Plan, shard: ShardPlan, tokens: TokensShard, filled: FilledPart) -> list[memoryview]:
    """The object's bytes as buffers to be written one after the other; views of the filled part, not copies."""
    metadata = PartMetadata(
        plan=plan.digest,
        shard=shard.index,
        part=filled.part,
        layers=plan.states.layers,
        last=plan.states.last,
        model=plan.model.source,
        revision=plan.model.revision,
        quarantined=[
            QuarantinedRow(
                row=sample.row,
                sample_id=tokens.sample_ids[sample.row - shard.first_row],
                where=f"{tokens_key(shard.index)} row {sample.row - shard.first_row}",
                reason=sample.reason,
                message=sample.message,
            )
            for sample in filled.refused
        ],
        statistics=list(filled.statistics),
    )
    return encode_part(
        part_arrays(filled),
        metadata,
        slots=plan.states.slots,
        hidden_size=plan.model.hidden_size,
        dtype=plan.states.dtype,
    )


def part_arrays(filled: FilledPart) -> PartArrays:
    """A filled part as the format names its arrays; nothing is copied but the lengths."""
    return PartArrays(
        hidden_states=filled.states,
        token_ids=filled.token_ids,
        loss_mask=filled.loss_mask,
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(filled.lengths)]),
        rows=filled.rows,
        scales=filled.scales,
    )
