"""The S3 store against the best that plain boto3 can do with the same server and the same objects, in one run.

    python benchmarks/store.py [--object-bytes N] [--rounds N] [--folder DIR] [--json]

Both sides take turns, so that a machine's ups and downs strike both; each ratio is of medians. plain boto3 is
`upload_fileobj` with the best TransferConfig of a small grid, and `get_object` with a Range. The server is a real one
(versitygw) over a folder; a folder in memory (/dev/shm) keeps the disk out of it. Forward plus upload against forward alone:
see upload_pipeline.py; its forward makes states at half the rate of uploads alone, so that the server is fast enough.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from boto3.s3.transfer import TransferConfig
from upload_pipeline import forward_and_upload

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from headframe_api.spec import S3Spec
from headframe_worker.stores.s3.store import S3Store
from testbed.s3 import S3Server

MIB = 1 << 20
RANGES = 200
TARGETS = {"upload_ratio": 0.9, "range_ratio": 0.8, "forward_and_upload_ratio": 0.95}
MEMORY = ("memory_growth_bytes", "run_memory_growth_bytes")
MEMORY_GROWTH_LIMIT_BYTES = 32 * MIB


def main() -> None:
    """Run all of it, print it, and exit with 1 where a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--object-bytes", type=int, default=256 * MIB)
    parser.add_argument("--range-bytes", type=int, default=2 * MIB)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, S3Server(Path(folder)) as server:
        os.environ.update(server.environment)
        results = measure(server, options)
    if options.json:
        print(json.dumps(results))
    else:
        for name, value in results.items():
            print(f"{name:32} {value:,.3f}" if isinstance(value, float) else f"{name:32} {value}")
    missed = [name for name, target in TARGETS.items() if results[name] < target]
    missed += [name for name in MEMORY if results[name] > MEMORY_GROWTH_LIMIT_BYTES]
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


def measure(server: S3Server, options: argparse.Namespace) -> dict[str, Any]:
    """All ratios."""
    bucket = server.new_bucket()
    content = np.random.default_rng(0).integers(0, 256, options.object_bytes, dtype=np.uint8)
    store = S3Store(f"s3://{bucket}", S3Spec(endpoint=server.endpoint))
    store.check_writable()
    client = server.client()

    def plain(config: TransferConfig) -> Callable[[], object]:
        source = _StaysOpen(content.data)
        return lambda: (source.seek(0), client.upload_fileobj(source, bucket, "plain", Config=config))

    grid = {
        (chunk, threads): TransferConfig(
            multipart_threshold=chunk * MIB, multipart_chunksize=chunk * MIB, max_concurrency=threads
        )
        for chunk in (8, 16, 32)
        for threads in (4, 8, 16)
    }
    timed = {settings: min(seconds(plain(config)) for _ in range(2)) for settings, config in grid.items()}
    best = min(timed, key=lambda settings: timed[settings])
    ours = lambda: store.write("ours", [content.data])  # noqa: E731
    upload = take_turns(ours, plain(grid[best]), options.rounds)
    before = psutil.Process().memory_info().rss
    for _ in range(options.rounds):
        ours()
    growth = psutil.Process().memory_info().rss - before

    size = options.range_bytes
    starts = np.random.default_rng(1).integers(0, options.object_bytes - size, RANGES).tolist()
    buffer = memoryview(bytearray(size))
    ranges = take_turns(
        lambda: [store.read_into("ours", start, buffer) for start in starts],
        lambda: [
            client.get_object(Bucket=bucket, Key="ours", Range=f"bytes={start}-{start + size - 1}")["Body"].read()
            for start in starts
        ],
        options.rounds,
    )
    together = forward_and_upload(store, 0.5 * options.object_bytes / upload[0], max(1, options.rounds // 3))
    store.close()
    return {
        "object_mib": options.object_bytes // MIB,
        "best_plain_chunk_mib_and_threads": best,
        "upload_mib_per_second": options.object_bytes / MIB / upload[0],
        "plain_upload_mib_per_second": options.object_bytes / MIB / upload[1],
        "upload_ratio": upload[1] / upload[0],
        "range_reads_per_second": RANGES / ranges[0],
        "plain_range_reads_per_second": RANGES / ranges[1],
        "range_ratio": ranges[1] / ranges[0],
        "memory_growth_bytes": growth,
        **together,
    }


class _StaysOpen(io.BytesIO):
    """boto3 closes what it uploads by one request, and to make another would be a copy that counts against it."""

    def close(self) -> None:
        """Not before it is collected."""


def take_turns(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float]:
    """(median seconds of ours, of theirs), measured alternately after one warm-up each."""
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) if turn % 2 else seconds_reversed(ours, theirs) for turn in range(rounds)]
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)


def seconds_reversed(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """The same pair, the other one first."""
    second = seconds(theirs)
    return seconds(ours), second


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
