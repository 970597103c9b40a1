"""Memory and requests stay within bounds; a store may be used in child processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from s3_content import MIB, SMALL

from headframe_worker.stores.s3.store import S3Store
from testbed.faulty_proxy import FaultyProxy
from testbed.s3 import S3Server


def test_the_start_beside_5_000_objects_takes_seconds_and_one_request_a_thousand(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server
) -> None:
    states = s3_server.folder / "objects" / proxied.uri.removeprefix("s3://") / "states"
    for shard in range(5):
        folder = states / f"shard-{shard:05d}"
        folder.mkdir(parents=True)
        for part in range(1000):
            os.close(os.open(folder / f"part-{part:05d}.safetensors", os.O_CREAT | os.O_WRONLY))
    started = time.monotonic()
    proxied.check_writable()
    assert sum(1 for _ in proxied.list("states/")) == 5_000
    assert proxied.clean_up() == 0
    assert time.monotonic() - started < 60  # a second on an idle machine
    assert proxy.requests["ListObjectsV2"] == 6
    assert sum(proxy.requests.values()) == 7


def _peak_growth_bytes(work: Callable[[], object]) -> int:
    """How much the process grew at most while work ran."""
    process, peak, done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return peak[0] - before


def test_a_transfer_takes_little_memory_whatever_the_size(store: S3Store, tmp_path: Path) -> None:
    content = memoryview(os.urandom(MIB) * 256)
    store.write("warm", [content[: 16 * MIB]])
    store.fetch("warm", tmp_path)
    assert _peak_growth_bytes(lambda: store.write("k", [content], exclusive=True)) < 48 * MIB
    assert _peak_growth_bytes(lambda: store.fetch("k", tmp_path)) < 48 * MIB
    assert (tmp_path / "k").read_bytes() == content


def _read_in_child(store: S3Store, key: str) -> bytes:
    return store.read(key)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_store_works_in_child_processes(store: S3Store, method: str) -> None:
    store.write("k", [SMALL])
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert pool.starmap(_read_in_child, [(store, "k")] * 8) == [bytes(SMALL)] * 8
    assert store.read("k") == SMALL


def test_pickles_hold_no_secret(store: S3Store, s3_server: S3Server) -> None:
    store.check_writable()
    assert s3_server.secret_key.encode() not in pickle.dumps(store)
    assert pickle.loads(pickle.dumps(store)).uri == store.uri
