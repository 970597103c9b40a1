"""A directory as a store keeps its promises against races, full disks, permissions and half-written files."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headframe_api.errors import ConfigError, DataError, HeadframeError, TemporaryError
from headframe_worker.stores.local import LocalStore
from headframe_worker.stores.missing import MissingObjectError

SMALL = memoryview(b"hidden states")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def files(store: LocalStore) -> list[str]:
    return sorted(path.name for path in store.directory.rglob("*") if path.is_file())


def test_what_is_written_is_read(store: LocalStore, tmp_path: Path) -> None:
    many = [memoryview(bytes([index])) for index in range(200)]  # more than one writev takes
    written = store.write("a/key", [SMALL, memoryview(b""), *many])
    content = bytes(SMALL) + bytes(range(200))
    assert (written.created, written.size_bytes) == (True, len(content))
    assert store.read("a/key") == content
    assert store.read_range("a/key", 3, 4) == content[3:7]
    assert store.write_file("copy", store.fetch("a/key", tmp_path)) == written
    assert [info.key for info in store.list()] == ["a/key", "copy"]
    assert [info.key for info in store.list("a/")] == ["a/key"]
    assert files(store) == ["copy", "key"]


def test_listings_are_in_the_order_of_keys_as_on_s3(store: LocalStore) -> None:
    keys = ["a/1", "a-b", "a.txt", "a/10", "a/2", "b"]
    for key in keys:
        store.write(key, [SMALL])
    assert [info.key for info in store.list()] == sorted(keys)
    assert [info.key for info in store.list("a/1")] == ["a/1", "a/10"]
    assert list(store.list("nowhere/")) == []


def test_errors_name_the_file(store: LocalStore, tmp_path: Path) -> None:
    store.write("k", [SMALL])
    for attempt in (
        lambda: store.read("none"),
        lambda: store.read_range("none", 0, 1),
        lambda: store.fetch("none", tmp_path),
    ):
        with pytest.raises(MissingObjectError, match="out/none"):
            attempt()
    with pytest.raises(DataError, match="ends at byte 13, needed up to 20"):
        store.read_range("k", 10, 10)
    store.delete(["k", "none"])
    assert files(store) == []


def test_of_many_writers_one_wins_and_none_replaces(store: LocalStore) -> None:
    contents = [memoryview(bytes([index]) * 100_000) for index in range(16)]
    barrier = threading.Barrier(len(contents))

    def write(content: memoryview) -> bool:
        barrier.wait()
        return store.write("k", [content], exclusive=True).created

    with ThreadPoolExecutor(len(contents)) as pool:
        created = list(pool.map(write, contents))
    assert sum(created) == 1
    assert store.read("k") == contents[created.index(True)]
    assert files(store) == ["k"]


def _write_forever(directory: Path, letter: bytes) -> None:
    store = LocalStore(directory)
    while True:
        store.write("k", [memoryview(letter * 300_000)])


def test_a_reader_never_sees_a_half_written_object_even_when_writers_are_killed(store: LocalStore) -> None:
    store.write("k", [memoryview(b"0" * 300_000)])
    for round_number in range(6):
        writers = [
            multiprocessing.get_context("fork").Process(target=_write_forever, args=(store.directory, letter))
            for letter in (b"1", b"2")
        ]
        for writer in writers:
            writer.start()
        seen = set()
        deadline = time.monotonic() + 20
        while len(seen - {b"0"}) < 1 + round_number % 2 and time.monotonic() < deadline:
            content = store.read("k")
            assert len(content) == 300_000
            assert len(set(content)) == 1
            seen.add(content[:1])
        for writer in writers:
            writer.kill()
            writer.join()
    assert [info.key for info in store.list()] == ["k"]


def test_what_killed_writers_left_is_removed_once_it_is_old(store: LocalStore) -> None:
    store.write("states/k", [SMALL])
    for folder, age_seconds in (("states", 7200), ("states", 10), ("tokens", 7200)):
        path = store.directory / folder / f".headframe-{age_seconds}"
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, times=(time.time() - age_seconds,) * 2)
    assert store.clean_up("states/") == 1
    assert files(store) == [".headframe-10", ".headframe-7200", "k"]
    assert store.clean_up() == 1


def test_a_full_disk_is_said_and_leaves_nothing_behind(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    store.write("there", [SMALL])
    for _ in range(3):
        with pytest.raises(TemporaryError, match=r"no space left .*goes on from here") as caught:
            store.write("k", [memoryview(bytes(2 << 20))], exclusive=True)
        assert caught.value.reason == "NoSpaceLeft"
    assert files(store) == ["there"]
    assert store.write("fits", [memoryview(bytes(500_000))], exclusive=True).created


def _as_nobody(results: Any, directory: Path) -> None:
    os.setgid(65534)
    os.setuid(65534)
    store = LocalStore(directory)
    for attempt in (store.check_writable, lambda: store.read("secret"), lambda: store.write("k", [SMALL])):
        try:
            attempt()
        except HeadframeError as error:
            results.put((int(error.exit_code), error.message))


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_missing_permissions_are_configuration() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        directory.chmod(0o755)
        (directory / "secret").touch(0o600)
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=_as_nobody, args=(results, directory))
        child.start()
        child.join()
        for words in ("cannot be written", "secret: cannot read", "k: cannot write"):
            code, message = results.get()
            assert code == 78
            assert words in message
        assert files(LocalStore(directory)) == ["secret"]


def test_a_file_where_a_directory_should_be_is_configuration(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        LocalStore(tmp_path / "out").check_writable()


def test_content_reaches_the_disk_before_its_name_does(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[list[str]] = []
    real = os.fdatasync

    def record(descriptor: int) -> None:
        real(descriptor)
        assert os.fstat(descriptor).st_size == len(SMALL)
        synced.append([name for name in files(store) if not name.startswith(".")])

    monkeypatch.setattr(os, "fdatasync", record)
    store.write("a", [SMALL])
    store.write("b", [SMALL], exclusive=True)
    assert synced == [[], ["a"]]


def test_once_all_is_settled_a_write_under_way_is_nobodys_and_ends_as_the_losers(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with store._temporary("states/k") as (temporary, descriptor):
        assert store.write("states/k", [memoryview(b"twin's")], exclusive=True).created
        assert store.clean_up("states/") == 0
        assert store.clean_up("states/", settled=True) == 1
        assert store._publish(temporary, "states/k", descriptor, exclusive=True) is False
    assert store.read("states/k") == b"twin's"
