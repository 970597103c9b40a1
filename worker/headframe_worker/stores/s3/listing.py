"""Listings: one request for each 1,000 entries."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from headframe_worker.stores.base import ObjectInfo
from headframe_worker.stores.s3.probe import HIDDEN_PREFIX
from headframe_worker.stores.s3.retry import Requests

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListMultipartUploadsOutputTypeDef, ListObjectsV2OutputTypeDef


def list_objects(requests: Requests, prefix: str, *, skip: int) -> Iterator[ObjectInfo]:
    """All objects whose key in the bucket starts with prefix, in order; `skip` characters of each key are left out."""
    resume: dict[str, Any] = {}
    while True:
        ask = partial(_ask_for_objects, bucket=requests.bucket, prefix=prefix, resume=resume)
        page = requests.call("ListObjectsV2", f"s3://{requests.bucket}/{prefix}", ask)
        for entry in page.get("Contents", ()):
            key = entry["Key"]
            if not key.rpartition("/")[2].startswith(HIDDEN_PREFIX):
                yield ObjectInfo(key[skip:], entry["Size"], entry["ETag"])
        if not page["IsTruncated"]:
            return
        resume = {"ContinuationToken": page["NextContinuationToken"]}


def list_abandoned_probes(requests: Requests, prefix: str, *, older_than_seconds: float) -> list[str]:
    """Keys of the hidden objects directly below prefix (empty, or with a final slash) that were written so long ago."""
    ask = partial(_ask_for_objects, bucket=requests.bucket, prefix=prefix + HIDDEN_PREFIX, resume={})
    page = requests.call("ListObjectsV2", f"s3://{requests.bucket}/{prefix}", ask)
    now = _server_time(page)
    return [
        entry["Key"]
        for entry in page.get("Contents", ())
        if now - entry["LastModified"] > timedelta(seconds=older_than_seconds)
    ]


def list_abandoned_uploads(
    requests: Requests, prefix: str, *, older_than_seconds: float | None
) -> list[tuple[str, str]]:
    """(key, upload id) of the multipart uploads under prefix that began so long ago, by the server's own clock; None: of all."""
    found: list[tuple[str, str]] = []
    resume: dict[str, Any] = {}
    while True:
        ask = partial(_ask_for_uploads, bucket=requests.bucket, prefix=prefix, resume=resume)
        page = requests.call("ListMultipartUploads", f"s3://{requests.bucket}/{prefix}", ask)
        now = _server_time(page)
        found += [
            (upload["Key"], upload["UploadId"])
            for upload in page.get("Uploads", ())
            if older_than_seconds is None or now - upload["Initiated"] > timedelta(seconds=older_than_seconds)
        ]
        if not page.get("IsTruncated"):
            return found
        markers = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
        resume = {name: value for name, value in markers.items() if value}


def _server_time(page: Any) -> datetime:
    """By the server's clock, as ages are."""
    date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date) if date else datetime.now(UTC)


def _ask_for_objects(
    client: S3Client, *, bucket: str, prefix: str, resume: dict[str, Any]
) -> ListObjectsV2OutputTypeDef:
    return client.list_objects_v2(Bucket=bucket, Prefix=prefix, **resume)


def _ask_for_uploads(
    client: S3Client, *, bucket: str, prefix: str, resume: dict[str, Any]
) -> ListMultipartUploadsOutputTypeDef:
    return client.list_multipart_uploads(Bucket=bucket, Prefix=prefix, **resume)
