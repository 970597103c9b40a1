"""Writing one object: a single request where it is small, parts in parallel where it is large; whole or not at all.

The checksum of the whole object is computed once, part by part in the threads that send them, and joined; the server
verifies each part and the whole. Each write carries a token in the object's metadata: when an answer was lost, the token
tells whether the object that now lies there is this write's or a twin's.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from awscrt.checksums import combine_crc64nvme

from headframe_api.errors import TemporaryError
from headframe_api.spec import S3Spec
from headframe_worker.checksum import crc64, digest_text
from headframe_worker.stores.base import Written
from headframe_worker.stores.missing import MissingObjectError
from headframe_worker.stores.s3.body import Body, Buffers
from headframe_worker.stores.s3.errors import PreconditionError, RequestError, UnconfirmedError, UploadLostError
from headframe_worker.stores.s3.retry import Requests
from headframe_worker.stores.s3.write import Capabilities, Write, header_text, part_bytes_for

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import PutObjectOutputTypeDef

logger = logging.getLogger(__name__)

_TOKEN = "headframe-write"  # noqa: S105  (a name in the object's metadata)
_ATTEMPTS = 5


class Uploader:
    """Writes objects of one bucket."""

    def __init__(self, requests: Requests, s3: S3Spec, pool: ThreadPoolExecutor, *, part_bytes: int) -> None:
        self._requests = requests
        self._bucket = requests.bucket
        self._pool = pool
        self._part_bytes = part_bytes
        self._settings = _settings(s3)
        self._lock = threading.Lock()
        self._open: dict[str, str] = {}  # upload id -> key

    def write(self, key: str, buffers: Buffers, capabilities: Capabilities, *, exclusive: bool) -> Written:
        """Write one object; `key` is the bucket's. See Store.write."""
        where = f"s3://{self._bucket}/{key}"
        conditional = exclusive and capabilities.conditional_writes
        if exclusive and not conditional and self._token(key) is not None:
            return Written(buffers.size_bytes, digest_text(_checksum(buffers)), created=False)
        write = Write(key, where, capabilities, conditional=conditional)
        for _ in range(_ATTEMPTS):
            try:
                if buffers.size_bytes <= self._part_bytes:
                    self.put(write, buffers)
                else:
                    self.multipart(write, buffers)
            except PreconditionError:
                token = self._token(key)
                if token is None:
                    continue  # deleted meanwhile
                created = token == write.token
            except UploadLostError:
                # This very upload was completed and the answer lost, or it met another writer, or someone aborted it.
                token = self._token(key)
                if token != write.token and (token is None or not exclusive):
                    continue
                created = token == write.token
            else:
                created = True
            checksum = _checksum(buffers) if write.checksum is None else write.checksum
            return Written(buffers.size_bytes, digest_text(checksum), created)
        raise TemporaryError(f"{where}: other writers came between {_ATTEMPTS} times", reason="WriteConflict")

    def abort_open(self) -> None:
        """Abort what is still in flight, once and without retries: for the end of the process."""
        with self._lock:
            left = dict(self._open)
        for upload_id, key in left.items():
            self._abort(key, upload_id)

    def abandon(self, key: str, upload_id: str) -> bool:
        """Abort an upload that another process left behind; False where it was gone."""
        try:
            self._requests.call(
                "AbortMultipartUpload",
                f"s3://{self._bucket}/{key}",
                lambda client: client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id),
            )
        except UploadLostError:
            return False
        return True

    def put(self, write: Write, buffers: Buffers) -> bool:
        """Write by one request; whether the server said that it verified the checksum."""
        write.checksum = _checksum(buffers)
        checksum = write.checksum

        def send(client: S3Client) -> PutObjectOutputTypeDef:
            answer = client.put_object(
                Bucket=self._bucket,
                Key=write.key,
                Body=self._body(write, buffers, 0, buffers.size_bytes),
                Metadata={_TOKEN: write.token},
                **write.checksum_header(checksum),
                **write.condition,
                **self._settings,
            )
            _etag(answer)
            return answer

        answer = self._requests.call("PutObject", write.where, send)
        return answer.get("ChecksumCRC64NVME") == header_text(checksum)

    def multipart(self, write: Write, buffers: Buffers) -> None:
        """Write by parts, in parallel."""
        whole: dict[str, Any] = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        checked = write.capabilities.crc64nvme
        started = self._requests.call(
            "CreateMultipartUpload",
            write.where,
            lambda client: client.create_multipart_upload(
                Bucket=self._bucket,
                Key=write.key,
                Metadata={_TOKEN: write.token},
                **(whole if checked else {}),
                **self._settings,
            ),
        )
        upload_id = started["UploadId"]
        with self._lock:
            self._open[upload_id] = write.key
        try:
            parts, write.checksum = self._send_parts(write, buffers, upload_id)
            final: dict[str, Any] = (
                {"ChecksumType": "FULL_OBJECT", "MpuObjectSize": buffers.size_bytes} if checked else {}
            )

            def complete(client: S3Client) -> None:
                answer = client.complete_multipart_upload(
                    Bucket=self._bucket,
                    Key=write.key,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": parts},  # type: ignore[typeddict-item]
                    **final,
                    **write.checksum_header(write.checksum or 0),
                    **write.condition,
                )
                _etag(answer)

            self._requests.call("CompleteMultipartUpload", write.where, complete)
        except BaseException:
            self._abort(write.key, upload_id)
            raise
        finally:
            with self._lock:
                self._open.pop(upload_id, None)

    def _send_parts(self, write: Write, buffers: Buffers, upload_id: str) -> tuple[list[dict[str, Any]], int]:
        """Send all parts from the pool; their entries in order, and the checksum of the whole."""
        size = part_bytes_for(buffers.size_bytes, self._part_bytes)
        parts = [
            _Part(upload_id, number, start, min(start + size, buffers.size_bytes))
            for number, start in enumerate(range(0, buffers.size_bytes, size), 1)
        ]
        futures: list[Future[tuple[dict[str, Any], int]]] = []
        try:
            futures.extend(self._submit(write, buffers, part) for part in parts)
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            wait(futures)
            raise
        checksum, entries = 0, []
        for part, future in zip(parts, futures, strict=True):
            entry, part_checksum = future.result()
            entries.append(entry)
            checksum = combine_crc64nvme(checksum, part_checksum, part.stop - part.start)
        return entries, checksum

    def _submit(self, write: Write, buffers: Buffers, part: _Part) -> Future[tuple[dict[str, Any], int]]:
        try:
            return self._pool.submit(self._send_part, write, buffers, part)
        except RuntimeError:  # the pool ended: the store was closed meanwhile
            self._requests.check_open("UploadPart", write.where)
            raise

    def _send_part(self, write: Write, buffers: Buffers, part: _Part) -> tuple[dict[str, Any], int]:
        """Send one part; its entry for CompleteMultipartUpload, and its checksum."""
        self._requests.check_open("UploadPart", write.where)
        checksum = crc64(buffers.slices(part.start, part.stop))
        header = write.checksum_header(checksum)

        def send(client: S3Client) -> str:
            answer = client.upload_part(
                Bucket=self._bucket,
                Key=write.key,
                UploadId=part.upload_id,
                PartNumber=part.number,
                Body=self._body(write, buffers, part.start, part.stop),
                **header,
            )
            return _etag(answer)

        etag = self._requests.call("UploadPart", write.where, send)
        return {"PartNumber": part.number, "ETag": etag, **header}, checksum

    def _token(self, key: str) -> str | None:
        """The token of the write that made the object; empty where another program did, None where there is no object."""
        try:
            head = self._requests.call(
                "HeadObject",
                f"s3://{self._bucket}/{key}",
                lambda client: client.head_object(Bucket=self._bucket, Key=key),
            )
        except MissingObjectError:
            return None
        return head["Metadata"].get(_TOKEN, "")

    def _abort(self, key: str, upload_id: str) -> None:
        """Tell the server to forget an upload. A failure is only logged: the next start cleans up."""
        try:
            self._requests.connection.client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
        except RequestError as error:
            logger.debug("s3://%s/%s: could not abort an upload: %s", self._bucket, key, type(error).__name__)

    def _body(self, write: Write, buffers: Buffers, start: int, stop: int) -> Any:
        return Body(buffers, start, stop, lambda: self._requests.check_open("UploadPart", write.where))


@dataclass(frozen=True)
class _Part:
    """A part of an upload: the object's bytes from start to stop."""

    upload_id: str
    number: int
    start: int
    stop: int


def _etag(answer: Any) -> str:
    etag = answer.get("ETag")
    if not etag:
        raise UnconfirmedError
    return str(etag)


def _checksum(buffers: Buffers) -> int:
    return crc64(buffers.slices(0, buffers.size_bytes))


def _settings(s3: S3Spec) -> dict[str, Any]:
    """Encryption and storage class, as PutObject and CreateMultipartUpload take them."""
    settings = {
        "ServerSideEncryption": s3.encryption,
        "SSEKMSKeyId": s3.kms_key_id,
        "StorageClass": s3.storage_class,
    }
    return {name: value for name, value in settings.items() if value is not None}
