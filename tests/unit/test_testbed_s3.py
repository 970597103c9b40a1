"""The testbed's S3 server and proxy do what Headframe's tests rely on."""

from base64 import b64encode
from pathlib import Path

import boto3
import pytest
from awscrt.checksums import crc64nvme
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, SSLError

from testbed.certificates import CertificateAuthority
from testbed.s3 import S3Server
from testbed.toxiproxy import Toxiproxy

ONCE = Config(retries={"total_max_attempts": 1})


def test_the_s3_server_keeps_objects_and_their_crc64nvme(s3_server: S3Server) -> None:
    s3, bucket = s3_server.client(), s3_server.new_bucket()
    expected = b64encode(crc64nvme(b"hidden states").to_bytes(8, "big")).decode()
    put = s3.put_object(Bucket=bucket, Key="a/b", Body=b"hidden states", ChecksumAlgorithm="CRC64NVME")
    got = s3.get_object(Bucket=bucket, Key="a/b", ChecksumMode="ENABLED")
    assert got["Body"].read() == b"hidden states"
    assert got["ChecksumCRC64NVME"] == put["ChecksumCRC64NVME"] == expected


def test_the_s3_server_refuses_a_wrong_checksum(s3_server: S3Server) -> None:
    s3, bucket = s3_server.client(), s3_server.new_bucket()
    with pytest.raises(ClientError, match=r"BadDigest|InvalidRequest"):
        s3.put_object(Bucket=bucket, Key="k", Body=b"hidden states", ChecksumCRC64NVME="AAAAAAAAAAA=")


def test_the_first_writer_of_a_key_wins(s3_server: S3Server) -> None:
    s3, bucket = s3_server.client(), s3_server.new_bucket()
    s3.put_object(Bucket=bucket, Key="k", Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        s3.put_object(Bucket=bucket, Key="k", Body=b"second", IfNoneMatch="*")
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"first"


def test_the_first_multipart_upload_of_a_key_wins(s3_server: S3Server) -> None:
    s3, bucket = s3_server.client(), s3_server.new_bucket()

    def upload(body: bytes) -> None:
        started = s3.create_multipart_upload(
            Bucket=bucket, Key="k", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
        )
        target = {"Bucket": bucket, "Key": "k", "UploadId": started["UploadId"]}
        part = s3.upload_part(**target, PartNumber=1, Body=body, ChecksumAlgorithm="CRC64NVME")
        done = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"], "ChecksumCRC64NVME": part["ChecksumCRC64NVME"]}]}
        s3.complete_multipart_upload(**target, MultipartUpload=done, IfNoneMatch="*", ChecksumType="FULL_OBJECT")

    upload(b"first")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        upload(b"second")
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"first"


def test_the_s3_server_serves_ranges(s3_server: S3Server) -> None:
    s3, bucket = s3_server.client(), s3_server.new_bucket()
    s3.put_object(Bucket=bucket, Key="k", Body=b"0123456789")
    assert s3.get_object(Bucket=bucket, Key="k", Range="bytes=3-5")["Body"].read() == b"345"


def test_objects_survive_an_outage_of_the_s3_server(tmp_path: Path) -> None:
    with S3Server(tmp_path) as server:
        bucket = server.new_bucket()
        server.client().put_object(Bucket=bucket, Key="k", Body=b"kept")
        server.stop()
        with pytest.raises(BotoCoreError):
            server.client(config=ONCE).get_object(Bucket=bucket, Key="k")
        server.start()
        assert server.client().get_object(Bucket=bucket, Key="k")["Body"].read() == b"kept"


def test_the_s3_server_speaks_tls_to_who_trusts_its_authority(tmp_path: Path) -> None:
    with S3Server(tmp_path, authority=CertificateAuthority(tmp_path / "pki")) as server:
        bucket = server.new_bucket()
        assert server.endpoint.startswith("https://")
        anonymous = Config(retries={"total_max_attempts": 1}, signature_version=UNSIGNED)
        stranger = boto3.client("s3", endpoint_url=server.endpoint, region_name=server.region, config=anonymous)
        with pytest.raises(SSLError):
            stranger.head_bucket(Bucket=bucket)


def test_a_proxy_cuts_and_mends(s3_server: S3Server, toxiproxy: Toxiproxy) -> None:
    bucket = s3_server.new_bucket()
    proxy = toxiproxy.proxy(f"{s3_server.host}:{s3_server.port}")
    s3 = s3_server.client(f"http://{proxy.address}", ONCE)
    s3.put_object(Bucket=bucket, Key="k", Body=b"through")
    proxy.cut()
    with pytest.raises(BotoCoreError):
        s3.get_object(Bucket=bucket, Key="k")
    proxy.mend()
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"through"
    proxy.delete()


def test_a_toxic_breaks_a_transfer_in_the_middle(s3_server: S3Server, toxiproxy: Toxiproxy) -> None:
    bucket = s3_server.new_bucket()
    proxy = toxiproxy.proxy(f"{s3_server.host}:{s3_server.port}")
    s3 = s3_server.client(f"http://{proxy.address}", ONCE)
    s3.put_object(Bucket=bucket, Key="k", Body=b"x" * 1_000_000)
    toxic = proxy.add("limit_data", bytes=100_000)
    with pytest.raises(BotoCoreError):
        s3.get_object(Bucket=bucket, Key="k")["Body"].read()
    proxy.remove(toxic)
    assert len(s3.get_object(Bucket=bucket, Key="k")["Body"].read()) == 1_000_000
    proxy.delete()
