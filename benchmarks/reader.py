"""The readers against the least that reading the same bytes can cost on this machine, in one run.

    python benchmarks/reader.py [--samples N] [--hidden-size H] [--rounds N] [--folder DIR] [--json]

A dataset of made-up states is written and read in three orders, each time also by the rawest means that give the same
states: `random` (StatesDataset by item) against safetensors' own slices of open files; `shuffled` (batches of a
PartBatchSampler) and `sequential` (StatesStream) against plain preads of the same ranges into new tensors. Sides
take turns, and ratios are of the fastest turns. The files are in memory and seconds are those of the process on the CPU, so it
is our own work that is measured, and neither the disk nor what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from synthetic_output import MADE_UP, write_extracted

from headframe_api.names import part_key
from headframe_worker.finalize.stage import finalize
from headframe_worker.meter import Meter
from headframe_worker.reader import PartBatchSampler, StatesDataset, StatesStream
from headframe_worker.reader.stored_part import read_header
from headframe_worker.stores.local import LocalStore

TARGETS = {"random_ratio": 0.8, "shuffled_ratio": 0.9, "sequential_ratio": 0.95}
STARVING_TOKENS_PER_SECOND = 30_000
READ_BYTES = 64 << 20


def main() -> None:
    """Run all of it, print it, and exit with 1 where a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--mean-length", type=int, default=300)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = measure(make_dataset(Path(folder), options), options.rounds)
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
    output = write_extracted(
        LocalStore(folder / "output"),
        lengths=lengths,
        layers=(1, 2, 3, 4, 5),
        hidden_size=options.hidden_size,
        model=MADE_UP.model_copy(update={"hidden_size": options.hidden_size}),
        part_target_bytes=512 << 20,
        refuse=False,
    )
    finalize(output.job, output.store, scratch=folder / "scratch", meter=Meter("finalize"))
    return StatesDataset(output.directory)


def measure(dataset: StatesDataset, rounds: int) -> dict[str, float]:
    """Ratios of speed (ours over raw; 1 is as fast) and tokens per second of each reader, one process and thread of calls."""
    random = np.random.default_rng(1).permutation(len(dataset)).tolist()
    batches = list(PartBatchSampler(dataset, batch_tokens=4096, parts_together=4))
    raw = RawReads(dataset)
    sides: dict[str, tuple[Callable[[], int], Callable[[], int]]] = {
        "random": (
            lambda: sum(len(dataset[item].token_ids) for item in random),
            lambda: sum(len(raw.safetensors_slice(item)) for item in random),
        ),
        "shuffled": (
            lambda: sum(len(sample.token_ids) for batch in batches for sample in dataset.__getitems__(batch)),
            lambda: sum(tokens for batch in batches for tokens in map(raw.tokens_of, list(map(raw.pread, batch)))),
        ),
        "sequential": (
            lambda: sum(len(sample.token_ids) for sample in StatesStream(dataset.uri)),
            raw.pread_all,
        ),
    }
    tokens = int(dataset.lengths.sum())
    results: dict[str, float] = {}
    for name, (ours, theirs) in sides.items():
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 1):
            for side, function in enumerate((ours, theirs)):
                start = time.process_time()
                read = function()
                if read != tokens:
                    sys.exit(f"{name}: read {read} tokens of {tokens}")
                if turn:  # the first turn warms up
                    seconds[side].append(time.process_time() - start)
        results[f"{name}_ratio"] = min(seconds[1]) / min(seconds[0])
        results[f"{name}_tokens_per_second"] = tokens / min(seconds[0])
        results[f"{name}_gigabytes_per_second"] = tokens * _token_bytes(dataset) / min(seconds[0]) / 1e9
    return results


class RawReads:
    """The same states by safetensors and by pread, with places known beforehand."""

    def __init__(self, dataset: StatesDataset) -> None:
        store = LocalStore(Path(dataset.uri))
        index = dataset.index
        self._token_bytes = _token_bytes(dataset)
        self._items = [
            (part_key(int(shard), int(part)), int(start), int(length))
            for shard, part, start, length in zip(index.shards, index.parts, index.starts, index.lengths, strict=True)
        ]
        keys = sorted({key for key, *_ in self._items})
        paths = {key: Path(dataset.uri) / key for key in keys}
        self._paths = paths
        self._files = {key: os.open(path, os.O_RDONLY) for key, path in paths.items()}
        self._begins = {
            key: read_header(store, key, at_least_bytes=path.stat().st_size).tensors["hidden_states"].start
            for key, path in paths.items()
        }
        self._tokens = {key: sum(length for place, _, length in self._items if place == key) for key in keys}

    def safetensors_slice(self, item: int) -> torch.Tensor:
        """One sample's states by safetensors, as readers of one file a sample do: open, slice, read, close.

        The slice alone is a mapped view that has read nothing, so it is copied.
        """
        key, start, length = self._items[item]
        with safe_open(self._paths[key], framework="pt") as file:
            return file.get_slice("hidden_states")[start : start + length].clone()

    def pread(self, item: int) -> torch.Tensor:
        """One sample's bytes by pread."""
        key, start, length = self._items[item]
        return self._read(key, start * self._token_bytes, length * self._token_bytes)

    def _read(self, key: str, start: int, size_bytes: int) -> torch.Tensor:
        data = torch.empty(size_bytes, dtype=torch.uint8)
        if os.preadv(self._files[key], [data.numpy().data], self._begins[key] + start) != size_bytes:
            raise EOFError(key)
        return data

    def tokens_of(self, data: torch.Tensor) -> int:
        """How many tokens' states these are."""
        return len(data) // self._token_bytes

    def pread_all(self) -> int:
        """All parts' states by preads of 64 MiB; how many tokens."""
        count = 0
        for key in self._files:
            end = self._tokens[key] * self._token_bytes
            read = 0
            while read < end:
                read += len(self._read(key, read, min(READ_BYTES, end - read)))
            count += read // self._token_bytes
        return count


def _token_bytes(dataset: StatesDataset) -> int:
    return len(dataset.slot_names) * dataset.manifest.hidden_size * 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
