"""Several samples as one sequence without padding, as trainers with variable-length attention want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from headframe_worker.reader.sample import Sample


class PackedBatch(NamedTuple):
    """N samples of T tokens together, one after the other. A named tuple, so that DataLoader pins and moves it."""

    rows: torch.Tensor
    """[N] int64"""
    token_ids: torch.Tensor
    """[T] int64"""
    loss_mask: torch.Tensor
    """[T] int64"""
    position_ids: torch.Tensor
    """[T] int64: each sample's tokens counted from 0."""
    sequence_ids: torch.Tensor
    """[T] int32: which sample of the batch a token is of."""
    cu_seqlens: torch.Tensor
    """[N + 1] int32: sample i is tokens cu_seqlens[i] to cu_seqlens[i + 1]; flash-attention's name and dtype."""
    hidden_states: torch.Tensor
    """[T, L, H]"""
    last: torch.Tensor | None
    """[T, H]; None where it is not kept."""


def collate_packed(samples: Sequence[Sample]) -> PackedBatch:
    """Pack samples; for DataLoader's `collate_fn`, with a PartBatchSampler of `batch_tokens`."""
    lengths = torch.tensor([len(sample.token_ids) for sample in samples])
    ends = lengths.cumsum(0)
    last = [sample.last for sample in samples if sample.last is not None]
    return PackedBatch(
        rows=torch.tensor([sample.row for sample in samples]),
        token_ids=torch.cat([sample.token_ids for sample in samples]),
        loss_mask=torch.cat([sample.loss_mask for sample in samples]),
        position_ids=torch.arange(int(ends[-1])) - (ends - lengths).repeat_interleave(lengths),
        sequence_ids=torch.arange(len(samples), dtype=torch.int32).repeat_interleave(lengths),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int32), ends.to(torch.int32)]),
        hidden_states=torch.cat([sample.hidden_states for sample in samples]),
        last=torch.cat(last) if last else None,
    )
