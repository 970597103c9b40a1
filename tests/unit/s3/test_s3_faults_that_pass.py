"""Storms, slow links, resets, outages: nothing lost, nothing twice, and a word to whoever waits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from s3_content import FAST, LARGE, MIB, SMALL, TUNING

from headframe_api.errors import StoppedError, TemporaryError
from headframe_api.spec import S3Spec
from headframe_worker.stores.observer import StoreObserver
from headframe_worker.stores.s3.store import S3Store
from testbed.faulty_proxy import FaultyProxy, operation
from testbed.process import wait_until
from testbed.s3 import S3Server
from testbed.toxiproxy import Toxiproxy


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
        assert slow.write("k", [LARGE[:100_000]]).created
        slow.close()
        link.delete()
    assert store.read("k") == LARGE[:100_000]
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
    with pytest.raises(TemporaryError, match=r"PutObject failed \d+ times over .*run it again"):
        store.write("k", [SMALL])
    store.close()
    link.delete()


def test_the_wish_to_stop_ends_the_waiting_soon(s3_server: S3Server, toxiproxy: Toxiproxy, uri: str) -> None:
    link = toxiproxy.proxy(f"{s3_server.host}:{s3_server.port}")
    waiting, stop = threading.Event(), threading.Event()
    observer = StoreObserver(lambda message: waiting.set() if message else None, stopping=stop.is_set)
    tuning = replace(TUNING, retry=replace(FAST, budget_seconds=600, longest_delay_seconds=600, stopping_seconds=0.5))
    store = S3Store(uri, S3Spec(endpoint=f"http://{link.address}"), tuning=tuning, observer=observer)
    store.check_writable()
    link.cut()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(store.write, "k", [LARGE], exclusive=True), pool.submit(store.read, "k")]
        assert waiting.wait(30)
        stop.set()
        for call in calls:
            with pytest.raises(StoppedError, match="some/output/k waited for the object store"):
                call.result(30)
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
