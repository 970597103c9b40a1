"""Servers differ: their certificates, the place of the bucket's name, encryption."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from s3_content import LARGE, SMALL, TUNING, digest

from headframe_api.errors import ConfigError
from headframe_api.spec import S3Spec
from headframe_worker.stores.s3.body import Buffers
from headframe_worker.stores.s3.store import S3Store
from headframe_worker.stores.s3.write import Capabilities, Write
from testbed.certificates import CertificateAuthority
from testbed.s3 import S3Server


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
