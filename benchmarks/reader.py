"""The readers against the least that reading the same bytes can cost on this machine, in one run.

    python benchmarks/reader.py [--samples N] [--hidden-size H] [--rounds N] [--folder DIR] [--s3] [--json]

A dataset of made-up states is written and read in three orders, each time also by the rawest means that give the same
states: `random` (StatesDataset by item) against safetensors' own slices of open files; `shuffled` (batches of a
PartBatchSampler) and `sequential` (StatesStream) against plain preads of the same ranges into new tensors. Sides
take turns, and ratios are of the fastest turns. The files are in memory and seconds are those of the process on the CPU, so it
is our own work that is measured, and neither the disk nor what else the machine does.

With --s3 the dataset lies in a bucket of a real server (versitygw) on this machine, and the raw means are boto3's ranged GETs of the
same ranges, as many at a time as ours. Then seconds are those of the clock: the server's work is part of a read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from botocore.config import Config
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from synthetic_output import MADE_UP, write_finished

from headframe_api.names import part_key
from headframe_api.spec import S3Spec
from headframe_worker.in_order import in_order
from headframe_worker.reader import PartBatchSampler, StatesDataset, StatesStream
from headframe_worker.reader.stored_part import read_header
from headframe_worker.stores.local import LocalStore
from testbed.s3 import S3Server

TARGETS = {"random_ratio": 0.8, "shuffled_ratio": 0.9, "sequential_ratio": 0.95}
STARVING_TOKENS_PER_SECOND = 30_000
READ_BYTES = 64 << 20
GET_BYTES, GETS, BATCH_GETS = 8 << 20, 8, 4
_HEADER_BYTES = 32 << 10


def main() -> None:
    """Run all of it, print it, and exit with 1 where a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--mean-length", type=int, default=300)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ExitStack() as running:
        dataset = make_dataset(Path(folder), options)
        raw: Raw = RawReads(dataset)
        if options.s3:
            server = running.enter_context(S3Server(Path(folder)))
            os.environ.update(server.environment)
            raw = RawGets(dataset, server)
            dataset = StatesDataset(raw.uri, S3Spec(endpoint=server.endpoint))
        results = measure(dataset, raw, options.rounds, time.perf_counter if options.s3 else time.process_time)
    if options.json:
        print(json.dumps(results))
    else:
        for name, value in results.items():
            print(f"{name:40} {value:,.3f}")
    missed = [name for name, target in TARGETS.items() if results[name] < target]
    missed += [
        name
        for name, value in results.items()
        if name.endswith("tokens_per_second") and value < STARVING_TOKENS_PER_SECOND
    ]
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


def make_dataset(folder: Path, options: argparse.Namespace) -> StatesDataset:
    """Six slots in bfloat16, lengths spread about the mean, parts of 512 MiB (half the default)."""
    random = np.random.default_rng(0)
    lengths = [max(1, int(length)) for length in random.gamma(2.0, options.mean_length / 2, options.samples)]
    output = write_finished(
        folder,
        lengths=lengths,
        layers=(1, 2, 3, 4, 5),
        hidden_size=options.hidden_size,
        model=MADE_UP.model_copy(update={"hidden_size": options.hidden_size}),
        part_target_bytes=512 << 20,
        refuse=False,
    )
    return StatesDataset(output.directory)


def measure(dataset: StatesDataset, raw: Raw, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Ratios of speed (ours over raw; 1 is as fast) and tokens per second of each reader, one process and thread of calls."""
    random = np.random.default_rng(1).permutation(len(dataset)).tolist()
    batches = list(PartBatchSampler(dataset, batch_tokens=4096, parts_together=4))
    stream = StatesStream(dataset.uri)
    sides: dict[str, tuple[Callable[[], int], Callable[[], int]]] = {
        "random": (
            lambda: sum(len(dataset[item].token_ids) for item in random),
            lambda: sum(map(raw.one, random)),
        ),
        "shuffled": (
            lambda: sum(len(sample.token_ids) for batch in batches for sample in dataset.__getitems__(batch)),
            lambda: sum(map(raw.batch, batches)),
        ),
        "sequential": (
            lambda: sum(len(sample.token_ids) for sample in stream),
            raw.all,
        ),
    }
    tokens = int(dataset.lengths.sum())
    results: dict[str, float] = {}
    for name, (ours, theirs) in sides.items():
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 1):
            for side, function in enumerate((ours, theirs)):
                start = clock()
                read = function()
                if read != tokens:
                    sys.exit(f"{name}: read {read} tokens of {tokens}")
                if turn:  # the first turn warms up
                    seconds[side].append(clock() - start)
        results[f"{name}_ratio"] = min(seconds[1]) / min(seconds[0])
        results[f"{name}_tokens_per_second"] = tokens / min(seconds[0])
        results[f"{name}_gigabytes_per_second"] = tokens * _token_bytes(dataset) / min(seconds[0]) / 1e9
    return results


class Raw(Protocol):
    """The same states by the rawest means; each call says how many tokens' states it read."""

    def one(self, item: int) -> int:
        """One sample."""
        ...

    def batch(self, items: Sequence[int]) -> int:
        """Several samples, all in memory at once."""
        ...

    def all(self) -> int:
        """All parts, one after the other."""
        ...


class Places:
    """Where the states of each sample and of each part lie, known beforehand."""

    def __init__(self, dataset: StatesDataset) -> None:
        store = LocalStore(Path(dataset.uri))
        index = dataset.index
        self.token_bytes = _token_bytes(dataset)
        self.items = [
            (part_key(int(shard), int(part)), int(start), int(length))
            for shard, part, start, length in zip(index.shards, index.parts, index.starts, index.lengths, strict=True)
        ]
        keys = sorted({key for key, *_ in self.items})
        self.headers = {key: read_header(store, key, at_least_bytes=_HEADER_BYTES) for key in keys}

    def sample(self, item: int) -> tuple[str, int, int]:
        """(key, first byte, bytes)."""
        key, start, length = self.items[item]
        return key, *self.headers[key].sample_range(start, length)

    def ranges(self, most_bytes: int) -> list[tuple[str, int, int]]:
        """All parts' states, cut into ranges of at most so many bytes."""
        places = {key: header.tensors["hidden_states"] for key, header in self.headers.items()}
        return [
            (key, start, min(most_bytes, place.start + place.size_bytes - start))
            for key, place in places.items()
            for start in range(place.start, place.start + place.size_bytes, most_bytes)
        ]


class RawReads:
    """By safetensors and by pread."""

    def __init__(self, dataset: StatesDataset) -> None:
        self._places = Places(dataset)
        self._paths = {key: Path(dataset.uri) / key for key in self._places.headers}
        self._files = {key: os.open(path, os.O_RDONLY) for key, path in self._paths.items()}

    def one(self, item: int) -> int:
        """By safetensors, as readers of one file a sample do: open, slice, read, close.

        The slice alone is a mapped view that has read nothing, so it is copied.
        """
        key, start, length = self._places.items[item]
        with safe_open(self._paths[key], framework="pt") as file:
            return len(file.get_slice("hidden_states")[start : start + length].clone())

    def batch(self, items: Sequence[int]) -> int:
        """By a pread for each."""
        return sum(map(len, [self._read(*self._places.sample(item)) for item in items])) // self._places.token_bytes

    def all(self) -> int:
        """By preads of 64 MiB."""
        return sum(len(self._read(*place)) for place in self._places.ranges(READ_BYTES)) // self._places.token_bytes

    def _read(self, key: str, start: int, size_bytes: int) -> torch.Tensor:
        data = torch.empty(size_bytes, dtype=torch.uint8)
        if os.preadv(self._files[key], [data.numpy().data], start) != size_bytes:
            raise EOFError(key)
        return data


class RawGets:
    """By boto3's ranged GETs, out of a bucket that the dataset is copied to."""

    def __init__(self, dataset: StatesDataset, server: S3Server) -> None:
        self._places = Places(dataset)
        self._bucket = server.new_bucket()
        self._client = server.client(config=Config(max_pool_connections=2 * GETS))
        self.uri = f"s3://{self._bucket}"
        store = LocalStore(Path(dataset.uri))
        for info in store.list():
            self._client.upload_file(str(store.directory / info.key), self._bucket, info.key)

    def one(self, item: int) -> int:
        """By one GET."""
        return len(self._get(self._places.sample(item))) // self._places.token_bytes

    def batch(self, items: Sequence[int]) -> int:
        """By a GET for each, as many at a time as StatesDataset has."""
        got = list(in_order(self._get, map(self._places.sample, items), threads=BATCH_GETS))
        return sum(map(len, got)) // self._places.token_bytes

    def all(self) -> int:
        """By GETs of 8 MiB, as many at a time as StatesStream has."""
        got = in_order(self._get, self._places.ranges(GET_BYTES), threads=GETS)
        return sum(map(len, got)) // self._places.token_bytes

    def _get(self, place: tuple[str, int, int]) -> bytes:
        key, start, size_bytes = place
        byte_range = f"bytes={start}-{start + size_bytes - 1}"
        return self._client.get_object(Bucket=self._bucket, Key=key, Range=byte_range)["Body"].read()


def _token_bytes(dataset: StatesDataset) -> int:
    return len(dataset.slot_names) * dataset.manifest.hidden_size * 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
