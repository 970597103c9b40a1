"""Contents and tunings that tests of the S3 store share."""

from __future__ import annotations

from headframe_worker.checksum import crc64, digest_text
from headframe_worker.stores.s3.retry import RetryPolicy
from headframe_worker.stores.s3.store import S3Tuning
from testbed.s3 import S3Server

MIB = 1 << 20
FAST = RetryPolicy(budget_seconds=20, first_delay_seconds=0.01, longest_delay_seconds=0.1)
TUNING = S3Tuning(part_bytes=5 * MIB, threads=4, retry=FAST)
SMALL = memoryview(b"hidden states")
LARGE = memoryview(bytes(range(256)) * (12 * MIB // 256))


def digest(*buffers: memoryview) -> str:
    return digest_text(crc64(buffers))


def uploads(server: S3Server, uri: str) -> list[str]:
    bucket = uri.split("/")[2]
    return [entry["Key"] for entry in server.client().list_multipart_uploads(Bucket=bucket).get("Uploads", ())]
