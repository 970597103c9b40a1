"""StatesDataset: a finished dataset of hidden states as a map-style torch Dataset, local or on S3.

A sample's states are one contiguous range of one part, so `dataset[i]` is one ranged read. What a part says of its
samples (offsets, tokens, masks, scales) is read once a part and kept for the parts read last.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from headframe_api.names import SAMPLES_KEY, part_key
from headframe_api.spec import S3Spec
from headframe_worker.documents import read_manifest
from headframe_worker.reader.sample import Sample, StatesDecoder
from headframe_worker.reader.samples_index import SamplesIndex, load_samples_index
from headframe_worker.reader.stored_part import StoredPart, read_header, read_small_tensors
from headframe_worker.stores.base import Store
from headframe_worker.stores.local import LocalStore
from headframe_worker.stores.open import open_store

_THREADS = 4
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class _Opened:
    """What belongs to one process: connections and threads do not survive a fork."""

    process: int
    store: Store
    threads: ThreadPoolExecutor
    parts: OrderedDict[tuple[int, int], StoredPart] = field(default_factory=OrderedDict)


class StatesDataset(Dataset[Sample]):
    """A finished output of Headframe, one item a stored sample, in the order of their rows.

    uri: `s3://bucket/prefix`, `file:///path` or a path; s3: how to reach S3, as `spec.s3` of the manifest.
    dtype: what states are given out as; None is as stored, and bfloat16 for float8 (always decoded by its scales).
    parts_kept: of how many parts the small tensors stay in memory.

    Raises ConfigError where the output is not finished. Pickles without its connections, so it works in DataLoader's
    workers, forked or spawned.
    """

    def __init__(
        self,
        uri: str | Path,
        s3: S3Spec | None = None,
        *,
        dtype: torch.dtype | None = None,
        parts_kept: int = 256,
    ) -> None:
        self.uri = str(uri)
        self._s3 = s3 or S3Spec()
        self._parts_kept = parts_kept
        self._opened: _Opened | None = None
        store = self._process().store
        self.manifest = read_manifest(store)
        """What the dataset is: model, layers, norms, counts."""
        with TemporaryDirectory(prefix="headframe-") as folder:
            self.index: SamplesIndex = load_samples_index(store.fetch(SAMPLES_KEY, Path(folder)))
            """Where every sample lies. `positions` says which of them this dataset gives out."""
        self.positions: NDArray[np.int64] = np.arange(len(self.index))
        self._decoder = StatesDecoder(self.manifest.states, self.manifest.hidden_size, dtype)

    @property
    def layers(self) -> list[int]:
        """The L layers of `hidden_states`, 0-based: outputs of decoder layers, -1 the embeddings."""
        return self.manifest.states.layers

    @property
    def slot_names(self) -> list[str]:
        """Names of all stored slots: the layers' and, where it is kept, the last state's."""
        return self.manifest.slot_names

    @property
    def dtype(self) -> torch.dtype:
        """What states are given out as."""
        return self._decoder.dtype

    @property
    def rows(self) -> NDArray[np.int64]:
        """Row in tokens/ of each item."""
        return self.index.rows[self.positions]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Length in tokens of each item."""
        return self.index.lengths[self.positions]

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, item: int) -> Sample:
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int]) -> list[Sample]:
        """Several items at once, as DataLoader asks for a batch: neighbours in a part are read together."""
        positions = [int(self.positions[item]) for item in items]
        runs = self._runs(sorted(set(positions), key=self._place))
        opened = self._process()
        # Threads hide the latency of a remote store; local reads are copies, which they would only slow down.
        apply = map if len(runs) == 1 or isinstance(opened.store, LocalStore) else opened.threads.map
        read = chain.from_iterable(apply(self._read_run, runs))
        by_position = dict(zip(chain.from_iterable(runs), read, strict=True))
        return [by_position[position] for position in positions]

    def split(self, fraction: float, *, seed: int = 0) -> tuple[StatesDataset, StatesDataset]:
        """(training, validation) datasets; about `fraction` of the samples are for validation.

        Which side a sample is on depends on its row and the seed alone: a longer dataset, another machine or another
        set of quarantined samples does not move the others.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction: {fraction} is not between 0 and 1")
        validation = _uniform(self.rows, seed) < fraction
        return self._view(self.positions[~validation]), self._view(self.positions[validation])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def _view(self, positions: NDArray[np.int64]) -> StatesDataset:
        view = object.__new__(type(self))
        view.__dict__.update(self.__getstate__(), positions=positions)
        return view

    def _place(self, position: int) -> tuple[int, int, int]:
        index = self.index
        return int(index.shards[position]), int(index.parts[position]), int(index.starts[position])

    def _runs(self, positions: list[int]) -> list[list[int]]:
        """Cut positions, ordered by their place, into runs that lie side by side in one part."""
        runs: list[list[int]] = []
        end = None
        for position in positions:
            shard, part, start = self._place(position)
            if (shard, part, start) == end:
                runs[-1].append(position)
            else:
                runs.append([position])
            end = (shard, part, start + int(self.index.lengths[position]))
        return runs

    def _read_run(self, positions: list[int]) -> list[Sample]:
        store = self._process().store
        shard, number, start = self._place(positions[0])
        tokens = int(self.index.lengths[positions].sum())
        part = self._part(shard, number, start + tokens)
        first_byte, size_bytes = part.header.sample_range(start, tokens)
        stored = torch.empty(size_bytes, dtype=torch.uint8)
        store.read_into(part.key, first_byte, stored.numpy().data)
        first = int(np.searchsorted(part.offsets, start))
        names = [self.index.sample_ids[position].as_py() for position in positions]
        return self._decoder.samples(part, range(first, first + len(positions)), names, stored)

    def _part(self, shard: int, number: int, tokens: int) -> StoredPart:
        """A part's small tensors; it has `tokens` tokens or more."""
        opened = self._process()
        part = opened.parts.get((shard, number))
        if part is None:
            key = part_key(shard, number)
            layout = self.manifest.states
            header = read_header(
                opened.store, key, at_least_bytes=tokens * layout.bytes_per_token(self.manifest.hidden_size)
            )
            part = read_small_tensors(opened.store, key, header)
            opened.parts[shard, number] = part
            while len(opened.parts) > self._parts_kept:
                opened.parts.popitem(last=False)
        return part

    def _process(self) -> _Opened:
        """This process' connections; those that a fork copied from its parent are left alone."""
        opened = self._opened
        if opened is None or opened.process != os.getpid():
            opened = _Opened(os.getpid(), open_store(self.uri, self._s3), ThreadPoolExecutor(_THREADS))
            self._opened = opened
        return opened


def _uniform(rows: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each row, by splitmix64."""
    with np.errstate(over="ignore"):
        value = rows.astype(np.uint64) * _MIX + np.uint64(seed & (1 << 64) - 1) * np.uint64(0xD1342543DE82EF95) + _MIX
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value ^= value >> np.uint64(31)
    return (value >> np.uint64(11)).astype(np.float64) / float(1 << 53)
