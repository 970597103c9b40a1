"""What interrupted writes leave in the bucket is taken back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from s3_content import LARGE, SMALL, TUNING, uploads

from headframe_api.errors import ConfigError, TemporaryError
from headframe_api.spec import S3Spec
from headframe_worker.stores.s3.store import S3Store
from testbed.faulty_proxy import FaultyProxy, operation
from testbed.process import wait_until
from testbed.s3 import S3Server


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


def test_once_all_is_settled_young_uploads_are_nobodys_too(s3_server: S3Server, store: S3Store, uri: str) -> None:
    bucket, client = uri.split("/")[2], s3_server.client()
    for key in ("states/a", "states/b", ".headframe-probe-1", "tokens/c"):
        client.create_multipart_upload(Bucket=bucket, Key=f"some/output/{key}")
    client.create_multipart_upload(Bucket=bucket, Key="elsewhere/states/d")
    assert store.clean_up("states/", settled=True) == 3
    assert sorted(uploads(s3_server, uri)) == ["elsewhere/states/d", "some/output/tokens/c"]


def test_a_writer_whose_upload_was_cleaned_up_takes_what_its_twin_made(
    proxied: S3Store, proxy: FaultyProxy, store: S3Store
) -> None:
    proxy.inject(operation("UploadPart"), answer=(404, "NoSuchUpload"))
    store.write("k", [LARGE], exclusive=True)
    assert proxied.write("k", [LARGE], exclusive=True).created is False
    assert proxy.requests["CreateMultipartUpload"] == 1


def test_a_probe_whose_upload_was_cleaned_up_is_made_again(proxied: S3Store, proxy: FaultyProxy, uri: str) -> None:
    again = S3Store(uri, S3Spec(endpoint=proxy.endpoint), tuning=TUNING)
    proxy.inject(operation("UploadPart"), times=2, answer=(404, "NoSuchUpload"))
    again.write("k", [LARGE], exclusive=True)
    assert again.write("k", [SMALL], exclusive=True).created is False
    assert proxy.requests["CreateMultipartUpload"] == 4  # three probes and the object
    again.close()


def test_probes_of_killed_processes_are_hidden_and_cleaned_up_once_they_are_old(
    s3_server: S3Server, store: S3Store, uri: str
) -> None:
    bucket, client = uri.split("/")[2], s3_server.client()
    for key in ("some/output/.headframe-probe-1", "some/output/states/k", "elsewhere/.headframe-probe-2"):
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    assert [info.key for info in store.list()] == ["states/k"]
    assert store.clean_up("states/") == 0
    old = S3Store(uri, S3Spec(endpoint=s3_server.endpoint), tuning=replace(TUNING, abandoned_after_seconds=-5))
    assert old.clean_up("states/") == 1
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys == ["elsewhere/.headframe-probe-2", "some/output/states/k"]
