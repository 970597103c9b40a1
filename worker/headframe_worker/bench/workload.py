"""Work like the job's own, but less of it: batches drawn evenly from one of its shards.

Batches are cut from the shard's real parts at the engine's real budget. Every m-th of them is taken, so that long and short
samples, and padding, stand in the proportion of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headframe_api.plan import Plan
from headframe_worker.engine.batches import Batch, cut_batches, pad_right
from headframe_worker.format.cut import shard_parts
from headframe_worker.prepare.tokens_file import TokensShard


@dataclass(frozen=True)
class ShardBatch:
    """One forward pass of a shard."""

    rows: NDArray[np.int64]
    """Its samples, relative to the shard, longest first."""
    batch: Batch


def shard_batches(plan: Plan, tokens: TokensShard, budget: int) -> list[ShardBatch]:
    """Every forward pass that extracting this shard takes, at a budget of padded tokens."""
    return [
        ShardBatch(part.rows[batch.first : batch.first + batch.samples], batch)
        for part in shard_parts(plan, tokens.seq_len)
        for batch in cut_batches(part.lengths, budget)
    ]


def padding(batches: Sequence[ShardBatch]) -> float:
    """The share of padded tokens."""
    return 1 - count_tokens(batches) / sum(entry.batch.padded_tokens for entry in batches)


def count_tokens(batches: Sequence[ShardBatch]) -> int:
    """Real tokens."""
    return sum(entry.batch.tokens for entry in batches)


def evenly(batches: Sequence[ShardBatch], tokens: int) -> list[ShardBatch]:
    """Batches of about so many real tokens, from all over the list, at least one; all of them where there are no more."""
    count = round(len(batches) * min(1.0, tokens / count_tokens(batches)))
    places = (np.arange(max(1, count)) + 0.5) * len(batches) / max(1, count)
    return [batches[place] for place in places.astype(int)]


def token_ids(tokens: TokensShard, entry: ShardBatch, device: torch.device) -> Tensor:
    """[B, L] right-padded, as the engine lays them out."""
    samples = [tokens.sample(int(row))[0].astype(np.int32) for row in entry.rows]
    ids, _ = pad_right(np.concatenate(samples), np.array([len(sample) for sample in samples], np.int64))
    return torch.from_numpy(ids).to(device)
