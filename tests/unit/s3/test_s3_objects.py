"""What the S3 store keeps of the Store's promises while nothing fails."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path

import pytest
from s3_content import LARGE, MIB, SMALL, TUNING, digest

from headframe_api.errors import ConfigError, DataError
from headframe_api.spec import S3Spec
from headframe_worker.stores.missing import MissingObjectError
from headframe_worker.stores.s3.store import S3Store
from headframe_worker.stores.s3.write import part_bytes_for
from testbed.s3 import S3Server


@pytest.mark.parametrize("content", [memoryview(b""), SMALL, LARGE])
def test_what_is_written_is_read(store: S3Store, tmp_path: Path, content: memoryview) -> None:
    written = store.write("a/key", [content[:5], content[5:]])
    assert written.created
    assert written.size_bytes == len(content)
    assert written.digest == digest(content)
    assert store.read("a/key") == content
    fetched = store.fetch("a/key", tmp_path)
    assert fetched.read_bytes() == content
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["key"]
    assert store.write_file("copy", fetched) == written
    assert store.read("copy") == content


def test_the_server_keeps_the_checksum_of_the_whole_object(store: S3Store, s3_server: S3Server, uri: str) -> None:
    for key, content in (("small", SMALL), ("large", LARGE)):
        written = store.write(key, [content])
        bucket = uri.split("/")[2]
        head = s3_server.client().head_object(Bucket=bucket, Key=f"some/output/{key}", ChecksumMode="ENABLED")
        assert head["ChecksumType"] == "FULL_OBJECT"
        assert head["ChecksumCRC64NVME"]
        assert written.digest == f"crc64nvme:{b64decode(head['ChecksumCRC64NVME']).hex()}"


def test_a_range_is_exact_or_an_error(store: S3Store) -> None:
    store.write("k", [memoryview(b"0123456789")])
    assert store.read_range("k", 3, 4) == b"3456"
    assert store.read_range("k", 9, 1) == b"9"
    assert store.read_range("k", 4, 0) == b""
    buffer = bytearray(4)
    store.read_into("k", 3, memoryview(buffer))
    assert buffer == b"3456"
    with pytest.raises(DataError, match="has 10 bytes, needed up to byte 12"):
        store.read_into("k", 8, memoryview(buffer))
    with pytest.raises(DataError, match="has 10 bytes, needed up to byte 12"):
        store.read_range("k", 8, 4)
    with pytest.raises(DataError, match="ends before byte 20"):
        store.read_range("k", 20, 4)
    with pytest.raises(MissingObjectError):
        store.read_range("none", 0, 1)


def test_missing_objects_say_so_and_may_be_deleted(store: S3Store, tmp_path: Path) -> None:
    for attempt in (lambda: store.read("none"), lambda: store.fetch("none", tmp_path)):
        with pytest.raises(MissingObjectError, match="some/output/none"):
            attempt()
    store.write("there", [SMALL])
    assert [store.exists(key) for key in ("there", "none")] == [True, False]
    store.delete(["there", "none"])
    assert list(store.list()) == []
    assert list(tmp_path.iterdir()) == []


def test_listings_hold_whole_objects_in_order_relative_to_the_uri(store: S3Store) -> None:
    for key in ("b", "a/2", "a/1", "ab"):
        store.write(key, [SMALL], exclusive=True)
    assert [info.key for info in store.list()] == ["a/1", "a/2", "ab", "b"]
    assert [info.key for info in store.list("a/")] == ["a/1", "a/2"]
    assert {info.size_bytes for info in store.list()} == {len(SMALL)}


def test_a_store_at_the_top_of_a_bucket_lists_its_keys(s3_server: S3Server) -> None:
    store = S3Store(f"s3://{s3_server.new_bucket()}/", S3Spec(endpoint=s3_server.endpoint), tuning=TUNING)
    store.write("k", [SMALL], exclusive=True)
    assert [info.key for info in store.list()] == ["k"]


def test_parts_are_few_enough_for_any_size() -> None:
    assert part_bytes_for(6 * MIB, MIB) == 5 * MIB
    for size in (1 << 30, 100 << 30, 5 << 40):
        part = part_bytes_for(size, 16 * MIB)
        assert part >= 16 * MIB
        assert -(-size // part) <= 10_000


@pytest.mark.parametrize("uri", ["s3://", "s3:///key", "s3://a b/c", "s3://user:secret@bucket/key"])
def test_bad_uris_are_refused_without_repeating_secrets(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        S3Store(uri, S3Spec())
    assert "secret" not in str(caught.value)
