"""StatesStream: samples part by part in the order they lie, of a finished dataset or of one that is still being extracted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import torch
from torch.utils.data import IterableDataset, get_worker_info

from headframe_api.names import STATES_PREFIX, SUCCESS_KEY, part_key, tokens_key
from headframe_api.plan import Plan
from headframe_api.spec import S3Spec
from headframe_worker.documents import read_plan
from headframe_worker.prepare.tokens_file import read_tokens
from headframe_worker.reader.sample import Sample, StatesDecoder
from headframe_worker.reader.stored_part import StoredPart, read_header, read_small_tensors
from headframe_worker.stores.base import Store
from headframe_worker.stores.missing import MissingObjectError
from headframe_worker.stores.open import open_store

_READ_BYTES = 64 << 20


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
        self._follow, self._dtype, self._poll_seconds = follow, dtype, poll_seconds
        self._rank, self._ranks = rank, ranks

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker else (0, 1)
        mine, readers = self._rank * of + number, self._ranks * of
        store = open_store(self._uri, self._s3)
        try:
            plan = read_plan(store)
            decoder = StatesDecoder(plan.states, plan.model.hidden_size, self._dtype)
            with TemporaryDirectory(prefix="headframe-") as folder:
                tokens = _ShardTokens(store, Path(folder))
                for number, shard, part, size_bytes in self._committed(plan, store):
                    if number % readers == mine:
                        ids = tokens.sample_ids(shard)
                        yield from _read_part(
                            store, decoder, part_key(shard, part), size_bytes, ids, plan.shards[shard].first_row
                        )
        finally:
            store.close()

    def _committed(self, plan: Plan, store: Store) -> Iterator[tuple[int, int, int, int]]:
        """(number over all shards, shard, part, bytes) of each part once, as they appear."""
        places = [(shard.index, part) for shard in plan.shards for part in range(shard.parts)]
        waiting = {part_key(*place): (number, *place) for number, place in enumerate(places)}
        while True:
            finished = not self._follow or _is_finished(store)  # before listing: nothing comes after _SUCCESS
            for info in store.list(STATES_PREFIX):
                if (place := waiting.pop(info.key, None)) is not None:
                    yield *place, info.size_bytes
            if finished or not waiting:
                return
            time.sleep(self._poll_seconds)


class _ShardTokens:
    """The sample ids of the shard at hand; parts mostly come shard by shard."""

    def __init__(self, store: Store, scratch: Path) -> None:
        self._store, self._scratch = store, scratch
        self._shard = -1
        self._ids: pa.ChunkedArray | None = None

    def sample_ids(self, shard: int) -> pa.ChunkedArray:
        if shard != self._shard:
            path = self._store.fetch(tokens_key(shard), self._scratch)
            self._shard, self._ids = shard, read_tokens(path).id_column
            if path.is_relative_to(self._scratch):
                path.unlink()  # mapped, so still readable
        return self._ids


def _read_part(
    store: Store, decoder: StatesDecoder, key: str, size_bytes: int, sample_ids: pa.ChunkedArray, first_row: int
) -> Iterator[Sample]:
    part = read_small_tensors(store, key, read_header(store, key, at_least_bytes=size_bytes))
    for run in _runs(part):
        start, stop = int(part.offsets[run[0]]), int(part.offsets[run[-1] + 1])
        first_byte, run_bytes = part.header.sample_range(start, stop - start)
        stored = torch.empty(run_bytes, dtype=torch.uint8)
        store.read_into(key, first_byte, stored.numpy().data)
        ids = [sample_ids[int(part.rows[index]) - first_row].as_py() for index in run]
        yield from decoder.samples(part, run, ids, stored)


def _runs(part: StoredPart) -> Iterator[range]:
    """The part's samples in runs of about _READ_BYTES."""
    token_bytes = max(1, part.header.sample_range(0, 1)[1])
    start = 0
    for index in range(len(part.rows)):
        if (part.offsets[index + 1] - part.offsets[start]) * token_bytes >= _READ_BYTES or index == len(part.rows) - 1:
            yield range(start, index + 1)
            start = index + 1


def _is_finished(store: Store) -> bool:
    try:
        store.read(SUCCESS_KEY)
    except MissingObjectError:
        return False
    return True
