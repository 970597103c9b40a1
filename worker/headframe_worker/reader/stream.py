"""StatesStream: samples part by part in the order they lie, of a finished dataset or of one that is still being extracted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from headframe_api.names import STATES_PREFIX, SUCCESS_KEY, part_key, tokens_key
from headframe_api.plan import Plan
from headframe_api.spec import S3Spec
from headframe_worker.documents import read_plan
from headframe_worker.in_order import in_order
from headframe_worker.prepare.tokens_file import read_tokens
from headframe_worker.reader.sample import Sample, StatesDecoder
from headframe_worker.reader.stored_part import StoredPart, read_header, read_small_tensors
from headframe_worker.stores.base import Store
from headframe_worker.stores.local import LocalStore
from headframe_worker.stores.missing import MissingObjectError
from headframe_worker.stores.open import open_store

_LOCAL_READ_BYTES = 4 << 20
"""So little that the memory a sample leaves is used for the next ones, still in the processor's cache."""
_REMOTE_READ_BYTES = 8 << 20
_THREADS = 8
_PARTS_AHEAD = 2
_LENGTH_FIELD_BYTES = 8
"""At the start of every part."""


class StatesStream(IterableDataset[Sample]):
    """Every stored sample once, by large sequential reads.

    follow: go on with parts as a running extraction commits them, until it is done; else what is there now. rank, ranks:
    as torch.distributed has them; parts are dealt out to ranks and to the DataLoader's workers, so their numbers of samples
    differ. poll_seconds: how often a following stream looks for new parts. dtype: as for StatesDataset.

    An interrupted stream begins anew. Raises ConfigError where there is no plan.json.
    """

    def __init__(
        self,
        uri: str | Path,
        s3: S3Spec | None = None,
        *,
        follow: bool = False,
        dtype: torch.dtype | None = None,
        rank: int = 0,
        ranks: int = 1,
        poll_seconds: float = 10.0,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank: {rank} is not below ranks, {ranks}")
        self._uri, self._s3 = str(uri), s3 or S3Spec()
        self._kept: Store | None = None
        self._follow, self._dtype, self._poll_seconds = follow, dtype, poll_seconds
        self._rank, self._ranks = rank, ranks

    def __iter__(self) -> Iterator[Sample]:
        # A pass that comes to its end leaves its store to the next one: a client takes 60 ms to make.
        store, self._kept = self._kept or open_store(self._uri, self._s3), None
        samples = self._pass(store)
        try:
            for sample in samples:  # noqa: UP028  (`yield from` would wait for the reads ahead before the store is closed)
                yield sample
        except BaseException:  # broken off, or failed: what is on its way, or tried again, need not come
            store.close()
            raise
        self._kept = store

    def _pass(self, store: Store) -> Iterator[Sample]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker else (0, 1)
        mine, readers = self._rank * of + number, self._ranks * of
        # Many requests at once hide the latency of a remote store; local reads are copies, which threads would only slow down.
        local = isinstance(store, LocalStore)
        apply = map if local else partial(in_order, threads=_THREADS)
        open_ahead = map if local else partial(in_order, threads=_PARTS_AHEAD)
        run_bytes = _LOCAL_READ_BYTES if local else _REMOTE_READ_BYTES
        plan = read_plan(store)
        decoder = StatesDecoder(plan.states, plan.model.hidden_size, self._dtype)
        with TemporaryDirectory(prefix="headframe-") as folder:
            tokens = _ShardTokens(store, plan, Path(folder))
            for parts in self._committed(plan, store):
                own = [part for part in parts if part.number % readers == mine]
                opened = zip(own, open_ahead(partial(_open_part, store), own), strict=True)
                for samples in apply(partial(_read_run, store, decoder), _runs(tokens, opened, run_bytes)):
                    yield from samples

    def _committed(self, plan: Plan, store: Store) -> Iterator[list[_Committed]]:
        """Each part once, as they appear."""
        places = [(shard.index, part) for shard in plan.shards for part in range(shard.parts)]
        waiting = {part_key(*place): (number, *place) for number, place in enumerate(places)}
        while True:
            finished = _is_finished(store)  # before listing: nothing comes after _SUCCESS
            yield [
                _Committed(*place, info.size_bytes)
                for info in store.list(STATES_PREFIX)
                if (place := waiting.pop(info.key, None)) is not None
            ]
            if finished:  # a listing that lags does not show all; of a failed shard there may be nothing
                there = in_order(store.exists, list(waiting), threads=_THREADS)
                unlisted = zip(waiting.values(), there, strict=True)
                yield [_Committed(*place, _LENGTH_FIELD_BYTES) for place, is_there in unlisted if is_there]
            if finished or not self._follow or not waiting:
                return
            time.sleep(self._poll_seconds)


@dataclass(frozen=True)
class _Committed:
    """A part that is there."""

    number: int
    """Over all shards."""
    shard: int
    part: int
    at_least_bytes: int
    """Its size, or less."""


@dataclass(frozen=True)
class _Run:
    """Samples side by side in a part: what one request reads."""

    part: StoredPart
    indexes: range
    sample_ids: list[str]


class _ShardTokens:
    """The sample ids of the shard at hand; parts mostly come shard by shard."""

    def __init__(self, store: Store, plan: Plan, scratch: Path) -> None:
        self._store, self._plan, self._scratch = store, plan, scratch
        self._shard = -1
        self._ids: list[str] = []

    def sample_ids(self, shard: int, rows: NDArray[np.int64]) -> list[str]:
        """Of rows of tokens/."""
        if shard != self._shard:
            path = self._store.fetch(tokens_key(shard), self._scratch)
            self._shard, self._ids = shard, read_tokens(path).id_column.to_pylist()
            if path.is_relative_to(self._scratch):
                path.unlink()
        first = self._plan.shards[shard].first_row
        return [self._ids[row - first] for row in rows.tolist()]


def _open_part(store: Store, place: _Committed) -> StoredPart:
    key = part_key(place.shard, place.part)
    return read_small_tensors(store, key, read_header(store, key, at_least_bytes=place.at_least_bytes))


def _runs(tokens: _ShardTokens, parts: Iterable[tuple[_Committed, StoredPart]], run_bytes: int) -> Iterator[_Run]:
    """The samples of these parts in runs of about `run_bytes`."""
    for place, part in parts:
        token_bytes = max(1, part.header.sample_range(0, 1)[1])
        start = 0
        for index in range(len(part.rows)):
            size_bytes = (part.offsets[index + 1] - part.offsets[start]) * token_bytes
            if size_bytes >= run_bytes or index == len(part.rows) - 1:
                yield _Run(part, range(start, index + 1), tokens.sample_ids(place.shard, part.rows[start : index + 1]))
                start = index + 1


def _read_run(store: Store, decoder: StatesDecoder, run: _Run) -> list[Sample]:
    part = run.part
    start, stop = int(part.offsets[run.indexes.start]), int(part.offsets[run.indexes.stop])
    first_byte, size_bytes = part.header.sample_range(start, stop - start)
    stored = torch.empty(size_bytes, dtype=torch.uint8)
    store.read_into(part.key, first_byte, stored.numpy().data)
    return decoder.samples(part, run.indexes, run.sample_ids, stored)


def _is_finished(store: Store) -> bool:
    try:
        store.read(SUCCESS_KEY)
    except MissingObjectError:
        return False
    return True
