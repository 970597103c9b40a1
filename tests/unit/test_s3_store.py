"""The S3 store keeps the Store's promises on a real server, through every fault that a network and a server can have."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headframe_api.errors import ConfigError, DataError, HeadframeError, TemporaryError
from headframe_api.spec import S3Spec
from headframe_worker.checksum import crc64, digest_text
from headframe_worker.stores.missing import MissingObjectError
from headframe_worker.stores.observer import StoreObserver
from headframe_worker.stores.s3.body import Buffers
from headframe_worker.stores.s3.retry import RetryPolicy
from headframe_worker.stores.s3.store import S3Store, S3Tuning
from headframe_worker.stores.s3.write import Capabilities, Write, part_bytes_for
from testbed.certificates import CertificateAuthority
from testbed.faulty_proxy import FaultyProxy, operation
from testbed.process import wait_until
from testbed.s3 import S3Server
from testbed.toxiproxy import Toxiproxy

MIB = 1 << 20
FAST = RetryPolicy(budget_seconds=20, first_delay_seconds=0.01, longest_delay_seconds=0.1)
TUNING = S3Tuning(part_bytes=5 * MIB, threads=4, retry=FAST)
SMALL = memoryview(b"hidden states")
LARGE = memoryview(bytes(range(256)) * (12 * MIB // 256))


@pytest.fixture(autouse=True)
def _credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        if name != "AWS_ENDPOINT_URL":
            monkeypatch.setenv(name, value)


@pytest.fixture
def uri(s3_server: S3Server) -> str:
    return f"s3://{s3_server.new_bucket()}/some/output"


@pytest.fixture
def store(s3_server: S3Server, uri: str) -> Iterator[S3Store]:
    opened = S3Store(uri, S3Spec(endpoint=s3_server.endpoint), tuning=TUNING)
    yield opened
    opened.close()


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_server) as made:
        yield made


@pytest.fixture
def proxied(proxy: FaultyProxy, uri: str) -> Iterator[S3Store]:
    """A store behind the faulty proxy that has already found out what the server can do."""
    opened = S3Store(uri, S3Spec(endpoint=proxy.endpoint), tuning=TUNING)
    opened.check_writable()
    proxy.requests.clear()
    yield opened
    opened.close()


def digest(*buffers: memoryview) -> str:
    return digest_text(crc64(buffers))


def uploads(server: S3Server, uri: str) -> list[str]:
    bucket = uri.split("/")[2]
    return [entry["Key"] for entry in server.client().list_multipart_uploads(Bucket=bucket).get("Uploads", ())]


# What a store is


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


# Exclusive writes


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


# Faults that pass


def test_a_storm_of_refusals_passes(proxied: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    struck = iter(range(10**6))
    proxy.inject(lambda _: next(struck) % 3 != 2, times=10**6, answer=(503, "SlowDown"))
    for index in range(10):
        assert proxied.write(f"k{index}", [SMALL], exclusive=True).created
    proxy.inject(lambda _: next(struck) % 2 == 0, times=20, answer=(500, "InternalError"))
    assert proxied.write("large", [LARGE], exclusive=True).created
    assert proxied.fetch("large", tmp_path).read_bytes() == LARGE
    assert [info.key for info in proxied.list("k")] == [f"k{index}" for index in range(10)]


@pytest.mark.parametrize("fault", [{"truncate_bytes": 5}, {"flip_byte": True}, {"answer": (500, "InternalError")}])
def test_what_arrives_broken_is_read_again(
    proxied: S3Store, proxy: FaultyProxy, tmp_path: Path, fault: dict[str, object]
) -> None:
    proxied.write("k", [LARGE])
    for read in (lambda: proxied.read("k"), lambda: proxied.fetch("k", tmp_path).read_bytes()):
        proxy.inject(operation("GetObject"), **fault)
        assert read() == LARGE
    if "flip_byte" not in fault:  # a range carries no checksum of its own
        proxy.inject(operation("GetObject"), **fault)
        assert proxied.read_range("k", 10, 100) == LARGE[10:110]
        proxy.inject(operation("GetObject"), **fault)
        buffer = bytearray(100)
        proxied.read_into("k", 10, memoryview(buffer))
        assert buffer == LARGE[10:110]


@pytest.mark.parametrize("status", [200, 502])
def test_a_gateways_page_instead_of_an_answer_is_no_answer(proxied: S3Store, proxy: FaultyProxy, status: int) -> None:
    proxied.write("k", [LARGE])
    page = "<html><body>Bad gateway</p></html>"
    proxy.inject(operation("ListObjectsV2", "CompleteMultipartUpload"), times=2, answer=(status, ""), text=page)
    assert [info.key for info in proxied.list()] == ["k"]
    proxy.inject(operation("UploadPart", "CompleteMultipartUpload"), times=4, answer=(status, ""), text=page)
    assert proxied.write("l", [LARGE], exclusive=True).created
    assert proxied.read("l") == LARGE
    proxy.inject(operation("PutObject"), times=2, answer=(status, ""), text=page)
    assert proxied.write("m", [SMALL], exclusive=True).created
    assert proxied.read("m") == SMALL


def test_an_object_replaced_during_a_download_is_downloaded_whole(
    proxied: S3Store, proxy: FaultyProxy, store: S3Store, tmp_path: Path
) -> None:
    proxied.write("k", [LARGE])
    other = memoryview(bytes(reversed(LARGE)))
    replaced = threading.Lock()

    def replace_once(request: object) -> bool:
        if operation("GetObject")(request) and replaced.acquire(blocking=False):  # type: ignore[arg-type]
            store.write("k", [other])
        return False

    proxy.inject(replace_once)
    assert proxied.fetch("k", tmp_path).read_bytes() == other


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [("latency", {"latency": 100, "jitter": 100}), ("bandwidth", {"rate": 4000}), ("slicer", {"average_size": 700})],
)
def test_a_slow_link_is_only_slow(
    s3_server: S3Server, toxiproxy: Toxiproxy, uri: str, tmp_path: Path, kind: str, attributes: dict[str, int]
) -> None:
    link = toxiproxy.proxy(f"{s3_server.host}:{s3_server.port}")
    store = S3Store(uri, S3Spec(endpoint=f"http://{link.address}"), tuning=TUNING)
    for stream in ("upstream", "downstream"):
        link.add(kind, stream=stream, **attributes)
    assert store.write("k", [LARGE[: 7 * MIB]], exclusive=True).created
    assert store.fetch("k", tmp_path).read_bytes() == LARGE[: 7 * MIB]
    store.close()
    link.delete()


def test_five_seconds_of_latency_or_64_kib_a_second_are_no_fault(
    s3_server: S3Server, toxiproxy: Toxiproxy, uri: str
) -> None:
    store = S3Store(uri, S3Spec(endpoint=s3_server.endpoint), tuning=TUNING)
    store.check_writable()
    capabilities = store._here().capabilities
    retries: list[None] = []
    observer = StoreObserver(retried=lambda: retries.append(None))
    for toxic in ({"kind": "latency", "latency": 5000}, {"kind": "bandwidth", "rate": 64}):
        link = toxiproxy.proxy(f"{s3_server.host}:{s3_server.port}")
        link.add(str(toxic.pop("kind")), stream="upstream", **toxic)  # type: ignore[arg-type]
        slow = S3Store(uri, S3Spec(endpoint=f"http://{link.address}"), tuning=TUNING, observer=observer)
        slow._here().capabilities = capabilities  # what was found out without the toxic
        assert slow.write("k", [LARGE[:300_000]]).created
        slow.close()
        link.delete()
    assert store.read("k") == LARGE[:300_000]
    assert retries == []
    store.close()


def test_connections_that_are_reset_mid_body_are_made_again(
    s3_server: S3Server, toxiproxy: Toxiproxy, uri: str, tmp_path: Path
) -> None:
    link = toxiproxy.proxy(f"{s3_server.host}:{s3_server.port}")
    store = S3Store(uri, S3Spec(endpoint=f"http://{link.address}"), tuning=TUNING)
    store.check_writable()
    cuts = [
        link.add("limit_data", stream="upstream", toxicity=0.5, bytes=2 * MIB),
        link.add("limit_data", stream="downstream", toxicity=0.3, bytes=2 * MIB),
    ]
    assert store.write("k", [LARGE], exclusive=True).created
    assert store.fetch("k", tmp_path).read_bytes() == LARGE
    for cut in cuts:
        link.remove(cut)
    assert store.read("k") == LARGE
    store.close()
    link.delete()


def test_an_outage_pauses_says_so_and_goes_on(s3_server: S3Server, toxiproxy: Toxiproxy, uri: str) -> None:
    link = toxiproxy.proxy(f"{s3_server.host}:{s3_server.port}")
    said: list[str | None] = []
    retries: list[None] = []
    observer = StoreObserver(waiting=said.append, retried=lambda: retries.append(None))
    store = S3Store(uri, S3Spec(endpoint=f"http://{link.address}"), tuning=TUNING, observer=observer)
    store.write("before", [SMALL], exclusive=True)
    link.cut()
    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(store.write, f"k{index}", [LARGE], exclusive=True) for index in range(4)]
        wait_until(lambda: len(retries) > 20)
        assert len(said) == 1
        assert said[0] is not None
        assert "some/output/k" in said[0]
        link.mend()
        assert all(write.result(60).created for write in writes)
    assert said[-1] is None
    assert len(said) == 2
    assert all(store.read(f"k{index}") == LARGE for index in range(4))
    store.close()
    link.delete()


def test_an_outage_longer_than_the_budget_ends_in_a_temporary_error(
    s3_server: S3Server, toxiproxy: Toxiproxy, uri: str
) -> None:
    link = toxiproxy.proxy(f"{s3_server.host}:{s3_server.port}")
    tuning = replace(TUNING, retry=replace(FAST, budget_seconds=0.5))
    store = S3Store(uri, S3Spec(endpoint=f"http://{link.address}"), tuning=tuning)
    store.check_writable()
    link.cut()
    with pytest.raises(TemporaryError, match=r"PutObject failed \d+ times over .*run the same command again"):
        store.write("k", [SMALL])
    store.close()
    link.delete()


def test_closing_ends_a_write_that_waits(s3_server: S3Server, toxiproxy: Toxiproxy, uri: str) -> None:
    link = toxiproxy.proxy(f"{s3_server.host}:{s3_server.port}")
    waiting = threading.Event()
    observer = StoreObserver(waiting=lambda message: waiting.set() if message else None)
    store = S3Store(uri, S3Spec(endpoint=f"http://{link.address}"), tuning=TUNING, observer=observer)
    store.check_writable()
    link.cut()
    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(store.write, "k", [LARGE], exclusive=True)
        assert waiting.wait(30)
        store.close()
        with pytest.raises(TemporaryError, match="closed"):
            write.result(30)
    link.delete()


# What interrupted writes leave


def test_an_upload_that_fails_or_is_closed_is_aborted(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server, uri: str
) -> None:
    proxy.inject(lambda r: "partNumber=2" in r.path, answer=(403, "AccessDenied"))
    with pytest.raises(ConfigError, match="UploadPart was refused"):
        proxied.write("k", [LARGE], exclusive=True)
    assert uploads(s3_server, uri) == []
    proxy.inject(lambda r: "partNumber=2" in r.path, times=10**6, answer=(503, "SlowDown"))
    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(proxied.write, "k", [LARGE], exclusive=True)
        wait_until(lambda: uploads(s3_server, uri))
        proxied.close()
        assert isinstance(write.exception(30), TemporaryError)
    assert uploads(s3_server, uri) == []


def test_old_uploads_under_the_prefix_are_cleaned_up(s3_server: S3Server, uri: str) -> None:
    bucket, client = uri.split("/")[2], s3_server.client()
    for key in ("some/output/states/a", "some/output/states/b", "some/output/tokens/c", "elsewhere/d"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    spec = S3Spec(endpoint=s3_server.endpoint)
    assert S3Store(uri, spec, tuning=TUNING).clean_up() == 0
    store = S3Store(uri, spec, tuning=replace(TUNING, abandoned_after_seconds=-5))
    assert store.clean_up("states/") == 2
    assert sorted(uploads(s3_server, uri)) == ["elsewhere/d", "some/output/tokens/c"]
    assert store.clean_up() == 1


# Faults that stay


@pytest.mark.parametrize(
    ("answer", "reason", "advice"),
    [
        ((403, "AccessDenied"), "AccessDenied", "s3:PutObject"),
        ((403, "InvalidAccessKeyId"), "BadCredentials", "AWS_ACCESS_KEY_ID"),
        ((403, "SignatureDoesNotMatch"), "BadCredentials", "AWS_SECRET_ACCESS_KEY"),
        ((400, "ExpiredToken"), "ExpiredCredentials", "new credentials"),
        ((404, "NoSuchBucket"), "NoSuchBucket", "bucket"),
        ((400, "InvalidStorageClass"), "StoreRefused", "spec.s3"),
    ],
)
def test_what_stays_wrong_ends_at_once_and_says_what_to_check(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server, answer: tuple[int, str], reason: str, advice: str
) -> None:
    proxy.inject(operation("PutObject"), times=99, answer=answer)
    with pytest.raises(ConfigError) as caught:
        proxied.write("k", [SMALL])
    text = str(caught.value)
    assert caught.value.reason == reason
    assert proxy.requests["PutObject"] == 1
    for part in (f"{proxied.uri}/k", "PutObject", answer[1], f"****{s3_server.access_key[-4:]} (from env)", advice):
        assert part in text
    assert s3_server.access_key not in text
    assert s3_server.secret_key not in text


def test_a_wrong_clock_is_explained(proxied: S3Store, proxy: FaultyProxy) -> None:
    headers = {"Date": "Tue, 01 Jan 2030 00:00:00 GMT"}
    proxy.inject(operation("PutObject"), times=99, answer=(403, "RequestTimeTooSkewed"), headers=headers)
    with pytest.raises(TemporaryError, match=r"clock is \d+ s behind the server's"):
        proxied.write("k", [SMALL])


def test_a_bucket_that_is_missing_or_forbidden_is_found_before_anything_is_written(s3_server: S3Server) -> None:
    store = S3Store("s3://there-is-no-such-bucket/x", S3Spec(endpoint=s3_server.endpoint), tuning=TUNING)
    with pytest.raises(ConfigError, match="create there-is-no-such-bucket"):
        store.check_writable()
    with pytest.raises(ConfigError, match="create there-is-no-such-bucket"):
        list(store.list())


def test_no_credentials_at_all_say_where_they_may_come_from(
    s3_server: S3Server, uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = S3Store(uri, S3Spec(endpoint=s3_server.endpoint), tuning=TUNING)
    with pytest.raises(ConfigError, match="no credentials; provide credentials") as caught:
        store.check_writable()
    assert caught.value.reason == "NoCredentials"


def test_a_host_that_does_not_exist_is_not_waited_for_long(uri: str) -> None:
    policy = replace(FAST, budget_seconds=600, unknown_host_seconds=0.2)
    store = S3Store(uri, S3Spec(endpoint="http://no-such-host.invalid"), tuning=replace(TUNING, retry=policy))
    with pytest.raises(TemporaryError, match=r"no-such-host\.invalid"):
        store.check_writable()


def test_expired_credentials_that_refresh_go_on(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proxied.write("before", [SMALL])
    # The secret in the file is rotated, as a mounted Secret is; the one in memory has expired.
    credentials = tmp_path / "credentials"
    lines = ["[default]", f"aws_access_key_id={s3_server.access_key}", f"aws_secret_access_key={s3_server.secret_key}"]
    credentials.write_text("\n".join([*lines, "aws_session_token=second"]))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    proxy.inject(
        lambda request: "x-amz-security-token" not in request.headers, times=10**6, answer=(400, "ExpiredToken")
    )
    proxy.without_headers = ("x-amz-security-token",)
    assert proxied.write("k", [LARGE], exclusive=True).created
    assert proxied.read("k") == LARGE


def test_a_credential_process_is_asked_again_when_the_server_says_expired(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    script = tmp_path / "credentials.sh"
    keys = f'"AccessKeyId": "{s3_server.access_key}", "SecretAccessKey": "{s3_server.secret_key}"'
    script.write_text(
        f"#!/bin/sh\necho x >> {calls}\n"
        f"""echo '{{"Version": 1, {keys}, "Expiration": "2099-01-01T00:00:00Z", "SessionToken": "'$(wc -l < {calls})'"}}'\n"""
    )
    script.chmod(0o755)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {script}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    proxy.without_headers = ("x-amz-security-token",)
    store = S3Store(proxied.uri, S3Spec(endpoint=proxy.endpoint), tuning=TUNING)
    store.check_writable()
    asked = len(calls.read_text().split())
    proxy.inject(
        lambda request: int(request.headers["x-amz-security-token"]) <= asked, times=10**6, answer=(403, "ExpiredToken")
    )
    assert store.write("k", [LARGE], exclusive=True).created
    assert len(calls.read_text().split()) == asked + 1
    assert store.read("k") == LARGE
    store.close()


def test_no_error_and_no_log_line_holds_a_secret(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    secrets_known = (s3_server.access_key, s3_server.secret_key)
    texts = []
    for status, code in ((403, "AccessDenied"), (403, s3_server.secret_key), (503, f"SlowDown {s3_server.access_key}")):
        proxy.inject(operation("PutObject", "ListObjectsV2"), times=2, answer=(status, code))
        for attempt in (lambda: proxied.write("k", [SMALL]), lambda: list(proxied.list())):
            try:
                attempt()
            except HeadframeError as error:
                texts.append(f"{error} {error!r}")
    assert len(texts) == 4
    text = "\n".join([*texts, caplog.text, repr(proxied), repr(vars(proxied))])
    assert not [secret for secret in secrets_known if secret in text]


# A server of one's own


def test_tls_needs_the_authority_and_then_signs_no_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = CertificateAuthority(tmp_path / "pki")
    with S3Server(tmp_path / "s3", authority=authority) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
        uri, spec = f"s3://{server.new_bucket()}/out", S3Spec(endpoint=server.endpoint)
        with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE, or by spec\.s3\.caSecret") as caught:
            S3Store(uri, spec, tuning=TUNING).check_writable()
        assert caught.value.reason == "UntrustedCertificate"
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="no such file"):
            S3Store(uri, spec, tuning=TUNING).check_writable()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.certificate))
        store = S3Store(uri, spec, tuning=TUNING)
        hashes: set[str] = set()
        store._here().requests.connection.client.meta.events.register(
            "before-send.s3.UploadPart",
            lambda request, **_: hashes.add(_text(request.headers["X-Amz-Content-SHA256"])),
        )
        assert store.write("k", [LARGE], exclusive=True).digest == digest(LARGE)
        assert hashes == {"UNSIGNED-PAYLOAD"}
        assert store.fetch("k", tmp_path).read_bytes() == LARGE
        store.close()


def _text(header: str | bytes) -> str:
    return header.decode() if isinstance(header, bytes) else header


@pytest.mark.parametrize(
    ("addressing", "endpoint", "url"),
    [
        ("auto", "http://store.example:9000", "http://store.example:9000/bucket/out/k"),
        ("virtual", "http://store.example:9000", "http://bucket.store.example:9000/out/k"),
        ("auto", None, "https://bucket.s3.amazonaws.com/out/k"),
        ("path", None, "https://s3.eu-central-1.amazonaws.com/bucket/out/k"),
    ],
)
def test_addressing_names_the_bucket_where_it_should(
    monkeypatch: pytest.MonkeyPatch, addressing: Any, endpoint: str | None, url: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    spec = S3Spec(endpoint=endpoint, region="eu-central-1", addressing=addressing)
    client = S3Store("s3://bucket/out", spec)._here().requests.connection.client
    presigned = client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "out/k"})
    assert presigned.partition("?")[0] == url


def test_encryption_and_storage_class_go_with_every_object(s3_server: S3Server, uri: str) -> None:
    seen: list[dict[str, str]] = []
    spec = S3Spec(endpoint=s3_server.endpoint, encryption="aws:kms", kms_key_id="key-1", storage_class="STANDARD")
    store = S3Store(uri, spec, tuning=TUNING)
    events = store._here().requests.connection.client.meta.events
    for name in ("PutObject", "CreateMultipartUpload"):
        events.register(f"before-send.s3.{name}", lambda request, **_: seen.append(dict(request.headers)))
    with contextlib.suppress(ConfigError):  # this server knows no KMS
        store.check_writable()
    with contextlib.suppress(ConfigError):
        store._here().uploader.multipart(
            Write("k", "k", Capabilities(conditional_writes=True, crc64nvme=True), conditional=False), Buffers([SMALL])
        )
    assert len(seen) >= 2
    for headers in seen:
        lower = {name.lower(): _text(value) for name, value in headers.items()}
        assert lower["x-amz-server-side-encryption"] == "aws:kms"
        assert lower["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
        assert lower["x-amz-storage-class"] == "STANDARD"


# Bounds


def test_the_start_beside_50_000_objects_takes_seconds_and_one_request_a_thousand(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server
) -> None:
    states = s3_server.folder / "objects" / proxied.uri.removeprefix("s3://") / "states"
    for shard in range(50):
        folder = states / f"shard-{shard:05d}"
        folder.mkdir(parents=True)
        for part in range(1000):
            os.close(os.open(folder / f"part-{part:05d}.safetensors", os.O_CREAT | os.O_WRONLY))
    started = time.monotonic()
    proxied.check_writable()
    assert sum(1 for _ in proxied.list("states/")) == 50_000
    assert proxied.clean_up() == 0
    assert time.monotonic() - started < 30
    assert proxy.requests["ListObjectsV2"] == 50
    assert sum(proxy.requests.values()) == 51


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


# Processes


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
