"""Reading objects: whole, one range, or in parallel ranges into a file; every length is checked, checksums where there are any."""

from __future__ import annotations

import os
import secrets
from base64 import b64decode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from awscrt.checksums import combine_crc64nvme

from headframe_api.errors import DataError, TemporaryError
from headframe_worker.checksum import crc64
from headframe_worker.stores.missing import MissingObjectError
from headframe_worker.stores.s3.errors import PreconditionError, RangeError, TruncatedError
from headframe_worker.stores.s3.probe import HIDDEN_PREFIX
from headframe_worker.stores.s3.retry import Requests

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 5


def object_exists(requests: Requests, key: str) -> bool:
    """Whether there is such an object, by one request."""
    try:
        requests.call(
            "HeadObject",
            f"s3://{requests.bucket}/{key}",
            lambda client: client.head_object(Bucket=requests.bucket, Key=key),
        )
    except MissingObjectError:
        return False
    return True


def read_object(requests: Requests, key: str) -> bytes:
    """The whole object; boto3 verifies its checksum where it has one."""

    def get(client: S3Client) -> bytes:
        answer = client.get_object(Bucket=requests.bucket, Key=key, ChecksumMode="ENABLED")
        with closing(answer["Body"]) as body:
            data = body.read()
        return _whole(data, answer["ContentLength"])

    return requests.call("GetObject", f"s3://{requests.bucket}/{key}", get)


def read_range(requests: Requests, key: str, start: int, length: int) -> bytes:
    """`length` bytes from `start` by one request. Raises DataError where the object ends before."""

    def take(body: StreamingBody) -> bytes:
        return _whole(body.read(), length)

    return _ranged(requests, key, start, length, take) if length else b""


def read_into(requests: Requests, key: str, start: int, buffer: memoryview) -> None:
    """Fill the buffer with bytes from `start`, as they come from the network."""

    def take(body: StreamingBody) -> None:
        done = 0
        while done < len(buffer):
            # urllib3 reads into bytes of its own and copies them: in small pieces that memory stays in the cache.
            count = body.readinto(buffer[done : done + _CHUNK_BYTES])  # type: ignore[arg-type]
            if not count:
                raise TruncatedError(got=done, wanted=len(buffer))
            done += count

    if len(buffer):
        _ranged(requests, key, start, len(buffer), take)


def _ranged(requests: Requests, key: str, start: int, length: int, take: Callable[[StreamingBody], T]) -> T:
    where = f"s3://{requests.bucket}/{key}"

    def get(client: S3Client) -> T:
        answer = client.get_object(Bucket=requests.bucket, Key=key, Range=f"bytes={start}-{start + length - 1}")
        with closing(answer["Body"]) as body:
            if answer["ContentLength"] != length:
                size = answer.get("ContentRange", "").rpartition("/")[2]
                raise DataError(f"{where}: has {size or 'too few'} bytes, needed up to byte {start + length}")
            return take(body)

    try:
        return requests.call("GetObject", where, get)
    except RangeError as error:
        raise DataError(f"{where}: ends before byte {start}, needed up to byte {start + length}") from error


def fetch_object(requests: Requests, key: str, target: Path, pool: ThreadPoolExecutor, *, part_bytes: int) -> Path:
    """Download an object to target, which appears whole; memory stays at a buffer a thread."""
    where = f"s3://{requests.bucket}/{key}"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{HIDDEN_PREFIX}{secrets.token_hex(8)}"
    try:
        for _ in range(_ATTEMPTS):
            head = requests.call(
                "HeadObject",
                where,
                lambda client: client.head_object(Bucket=requests.bucket, Key=key, ChecksumMode="ENABLED"),
            )
            try:
                size = head["ContentLength"]
                with temporary.open("wb") as file:
                    file.truncate(size)
                    copies = [
                        _Copy(requests.bucket, key, head["ETag"], start, min(part_bytes, size - start), file.fileno())
                        for start in range(0, size, part_bytes)
                    ]
                    checksum = _run(requests, copies, pool)
            except PreconditionError:  # replaced while we read it
                continue
            if _checksum_of(head) in (None, checksum):
                temporary.replace(target)
                return target
    finally:
        temporary.unlink(missing_ok=True)
    raise TemporaryError(f"{where}: changed, or came with a wrong checksum, {_ATTEMPTS} times", reason="Corrupted")


@dataclass(frozen=True)
class _Copy:
    """A range of one version of an object on its way to the same place of an open file. Returns the range's checksum."""

    bucket: str
    key: str
    etag: str
    start: int
    length: int
    descriptor: int

    def __call__(self, client: S3Client) -> int:
        answer = client.get_object(
            Bucket=self.bucket,
            Key=self.key,
            Range=f"bytes={self.start}-{self.start + self.length - 1}",
            IfMatch=self.etag,
        )
        checksum = done = 0
        with closing(answer["Body"]) as body:
            while chunk := body.read(_CHUNK_BYTES):
                checksum = crc64([memoryview(chunk)], checksum)
                done += _write_at(self.descriptor, chunk, self.start + done)
        if done != self.length:
            raise TruncatedError(got=done, wanted=self.length)
        return checksum


def _run(requests: Requests, copies: Sequence[_Copy], pool: ThreadPoolExecutor) -> int:
    """Copy all ranges in parallel; the checksum of the whole."""
    where = f"s3://{requests.bucket}/{copies[0].key}" if copies else ""
    futures = [pool.submit(requests.call, "GetObject", where, copy) for copy in copies]
    try:
        checksums = [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.exception()  # the file must stay open until the last one has written
    whole = 0
    for checksum, copy in zip(checksums, copies, strict=True):
        whole = combine_crc64nvme(whole, checksum, copy.length)
    return whole


def _write_at(descriptor: int, data: bytes, position: int) -> int:
    view = memoryview(data)
    while view:
        view = view[os.pwrite(descriptor, view, position + len(data) - len(view)) :]
    return len(data)


def _checksum_of(head: Any) -> int | None:
    """The object's CRC-64/NVME where the server keeps one over the whole object."""
    text = head.get("ChecksumCRC64NVME")
    whole = text is not None and head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and "-" not in text
    return int.from_bytes(b64decode(text), "big") if whole else None


def _whole(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise TruncatedError(got=len(data), wanted=length)
    return data
