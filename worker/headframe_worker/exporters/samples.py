"""The samples of a finished dataset, part by part, as an exporter wants them: whole, decoded, with their ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headframe_api.manifests import DatasetManifest, PartEntry
from headframe_api.names import part_key, tokens_key
from headframe_api.plan import Plan
from headframe_api.spec import StateDtype
from headframe_worker.documents import read_manifest, read_plan, read_shard_manifest
from headframe_worker.prepare.tokens_file import read_tokens
from headframe_worker.reader.sample import TORCH_DTYPE
from headframe_worker.reader.stored_part import StoredPart, read_header, read_small_tensors
from headframe_worker.stores.base import Store


@dataclass(frozen=True)
class Sample:
    """One sample of T tokens and S slots."""

    row: int
    sample_id: str
    token_ids: Tensor
    """[T] int64"""
    loss_mask: Tensor
    """[T] int64, 1 where a trainer is to learn."""
    states: Tensor
    """[T, S, H] as stored."""
    scales: Tensor | None
    """[T, S] float32, float8 only: state = stored * scale."""

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """[T, S, H]: the states' values in another dtype, without the scales of float8."""
        if self.scales is None:
            return self.states.to(dtype)
        return (self.states.float() * self.scales.unsqueeze(-1)).to(dtype)


@dataclass(frozen=True)
class SourcePart:
    """One part of the dataset; its samples' states are read one by one, so that memory stays bounded. Thread-safe."""

    store: Store
    dtype: StateDtype
    shard: int
    part: int
    stored: StoredPart
    sample_ids: list[str]
    """[N]"""

    @property
    def rows(self) -> NDArray[np.int64]:
        """[N] rows in tokens/, in the order of the part."""
        return self.stored.rows

    def mask(self, index: int) -> NDArray[np.uint8]:
        """[T] loss mask of one sample, without reading its states."""
        return self.stored.loss_mask[self.stored.offsets[index] : self.stored.offsets[index + 1]]

    def sample(self, index: int) -> Sample:
        """One sample, by one ranged read of its states."""
        stored = self.stored
        start, stop = int(stored.offsets[index]), int(stored.offsets[index + 1])
        place, length = stored.header.sample_range(start, stop - start)
        states = torch.empty(length, dtype=torch.uint8)
        self.store.read_into(stored.key, place, states.numpy().data)
        shape = stored.header.tensors["hidden_states"].shape
        return Sample(
            row=int(stored.rows[index]),
            sample_id=self.sample_ids[index],
            token_ids=torch.from_numpy(stored.token_ids[start:stop].astype(np.int64)),
            loss_mask=torch.from_numpy(stored.loss_mask[start:stop].astype(np.int64)),
            states=states.view(TORCH_DTYPE[self.dtype]).view(stop - start, *shape[1:]),
            scales=None if stored.scales is None else torch.from_numpy(stored.scales[start:stop].copy()),
        )


@dataclass(frozen=True)
class SourceDataset:
    """A finished dataset: what it says of itself, and its parts."""

    store: Store
    plan: Plan
    manifest: DatasetManifest

    @classmethod
    def open(cls, store: Store) -> SourceDataset:
        """Raises ConfigError where the dataset is not finished."""
        return cls(store, read_plan(store), read_manifest(store))

    def part_entries(self) -> Iterator[tuple[int, PartEntry]]:
        """(shard, part) of every part that holds samples, in order."""
        for shard in self.manifest.shards:
            for entry in read_shard_manifest(self.store, shard.shard).parts:
                if entry.samples:
                    yield shard.shard, entry

    def parts(self, wanted: list[tuple[int, PartEntry]], scratch: Path) -> Iterator[SourcePart]:
        """Open parts one after the other; the tokens of a shard are fetched once for all its parts."""
        shard_now, tokens_now = -1, None
        for shard, entry in wanted:
            if shard != shard_now or tokens_now is None:
                shard_now, tokens_now = shard, read_tokens(self.store.fetch(tokens_key(shard), scratch))
            key = part_key(shard, entry.part)
            header = read_header(self.store, key, at_least_bytes=entry.bytes)
            stored = read_small_tensors(self.store, key, header)
            first_row = self.plan.shards[shard].first_row
            names = [tokens_now.sample_ids[row - first_row] for row in stored.rows.tolist()]
            yield SourcePart(self.store, self.plan.states.dtype, shard, entry.part, stored, names)
