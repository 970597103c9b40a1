"""An exclusive write never replaces, and says truly whether it made the object, whatever happened on the way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from s3_content import LARGE, MIB, SMALL, TUNING, digest, uploads

from headframe_api.spec import S3Spec
from headframe_worker.stores.s3.store import S3Store
from testbed.faulty_proxy import FaultyProxy, operation
from testbed.s3 import S3Server


@pytest.mark.parametrize("content", [SMALL, LARGE])
def test_an_exclusive_write_never_replaces(store: S3Store, s3_server: S3Server, uri: str, content: memoryview) -> None:
    store.write("k", [memoryview(b"first")], exclusive=True)
    second = store.write("k", [content], exclusive=True)
    assert second == replace(store.write("other", [content]), created=False)
    assert store.read("k") == b"first"
    assert uploads(s3_server, uri) == []


@pytest.mark.parametrize("size", [64, 6 * MIB])
def test_of_many_writers_one_wins(store: S3Store, size: int) -> None:
    contents = [memoryview(bytes([index]) * size) for index in range(8)]
    barrier = threading.Barrier(len(contents))

    def write(content: memoryview) -> bool:
        barrier.wait()
        return store.write("k", [content], exclusive=True).created

    store.check_writable()
    with ThreadPoolExecutor(len(contents)) as pool:
        created = list(pool.map(write, contents))
    assert sum(created) == 1
    assert store.read("k") == contents[created.index(True)]


@pytest.mark.parametrize(("content", "lost"), [(SMALL, "PutObject"), (LARGE, "CompleteMultipartUpload")])
@pytest.mark.parametrize("exclusive", [True, False])
def test_a_write_whose_answer_was_lost_was_ours(
    proxied: S3Store, proxy: FaultyProxy, content: memoryview, lost: str, exclusive: bool
) -> None:
    proxy.inject(operation(lost), lose_answer=True)
    written = proxied.write("k", [content], exclusive=exclusive)
    assert written.created
    assert written.digest == digest(content)
    assert proxied.read("k") == content
    assert proxied.write("k", [content], exclusive=True).created is False


def test_a_twin_that_came_first_with_the_same_bytes_is_not_us(
    proxied: S3Store, proxy: FaultyProxy, store: S3Store
) -> None:
    proxy.inject(operation("PutObject"), answer=(503, "SlowDown"))
    store.write("k", [SMALL], exclusive=True)
    assert proxied.write("k", [SMALL], exclusive=True).created is False


@pytest.mark.parametrize("content", [SMALL, LARGE])
def test_a_conflict_of_two_writers_begins_anew(proxied: S3Store, proxy: FaultyProxy, content: memoryview) -> None:
    proxy.inject(operation("PutObject", "CompleteMultipartUpload"), answer=(409, "ConditionalRequestConflict"))
    assert proxied.write("k", [content], exclusive=True).created
    assert proxied.read("k") == content


def test_an_upload_that_someone_aborted_begins_anew(proxied: S3Store, proxy: FaultyProxy) -> None:
    proxy.inject(operation("UploadPart"), answer=(404, "NoSuchUpload"))
    assert proxied.write("k", [LARGE], exclusive=True).created
    assert proxied.read("k") == LARGE


@pytest.mark.parametrize("kind", ["ignored", "refused"])
def test_a_server_without_conditional_writes_is_looked_at_before_each_write(
    s3_server: S3Server, uri: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultyProxy(s3_server, without_headers=("if-none-match",) if kind == "ignored" else ()) as proxy:
        if kind == "refused":
            proxy.inject(lambda request: "if-none-match" in request.headers, times=99, answer=(501, "NotImplemented"))
        store = S3Store(uri, S3Spec(endpoint=proxy.endpoint), tuning=TUNING)
        store.check_writable()
        for content in (SMALL, LARGE):
            key = f"k{len(content)}"
            assert store.write(key, [content], exclusive=True).created
            assert not store.write(key, [memoryview(b"second")], exclusive=True).created
            assert store.read(key) == content
        store.close()
    assert sum("no conditional writes" in record.message for record in caplog.records) == 1


def test_a_server_without_our_checksum_gets_none(
    s3_server: S3Server, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = (
        "x-amz-checksum-crc64nvme",
        "x-amz-checksum-algorithm",
        "x-amz-checksum-type",
        "x-amz-sdk-checksum-algorithm",
    )
    with FaultyProxy(s3_server, without_headers=names) as proxy:
        store = S3Store(uri, S3Spec(endpoint=proxy.endpoint), tuning=TUNING)
        for content in (SMALL, LARGE):
            key = f"k{len(content)}"
            assert store.write(key, [content], exclusive=True).digest == digest(content)
            assert store.read(key) == content
        store.close()
    assert "signed SHA-256" in caplog.text
