"""Finding out, with one small object, whether objects can be written here and what the server makes of our headers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

from headframe_api.errors import ConfigError, TemporaryError
from headframe_worker.stores.s3.body import Buffers
from headframe_worker.stores.s3.errors import UNSPECIFIC_REFUSAL, PreconditionError, UploadLostError
from headframe_worker.stores.s3.retry import Requests
from headframe_worker.stores.s3.upload import Uploader
from headframe_worker.stores.s3.uri import join_key
from headframe_worker.stores.s3.write import Capabilities, Write

logger = logging.getLogger(__name__)

HIDDEN_PREFIX = ".headframe-"
"""Objects whose last name begins so are no results: listings leave them out."""
_ATTEMPTS = 5
_CONTENT = b"Headframe tried whether it can write here; this object may be deleted.\n"


def probe(uploader: Uploader, requests: Requests, prefix: str) -> Capabilities:
    """Write an object as results are written, in both ways, and delete it. Raises ConfigError where it cannot be written."""
    key = join_key(prefix, f"{HIDDEN_PREFIX}probe-{secrets.token_hex(8)}")
    where = f"{requests.uri}/{HIDDEN_PREFIX}probe"
    verified = _verifies_checksums(uploader, key, where)
    if not verified:
        logger.warning("%s: the server verifies no CRC-64/NVME: signed SHA-256 guards uploads instead", requests.uri)
        requests.connection.sign_payloads()
    capabilities = Capabilities(conditional_writes=True, crc64nvme=verified)
    try:
        for write in (uploader.put, uploader.multipart):
            if not _refuses_taken_key(write, Write(key, where, capabilities, conditional=True)):
                capabilities = replace(capabilities, conditional_writes=False)
                break
    finally:
        _delete(requests, key)
    if not capabilities.conditional_writes:
        logger.warning(
            "%s: the server has no conditional writes: each key is looked up before it is written, and of two workers "
            "that write the same object at the same moment the later one wins",
            requests.uri,
        )
    return capabilities


def _verifies_checksums(uploader: Uploader, key: str, where: str) -> bool:
    with_checksum = Write(key, where, Capabilities(conditional_writes=True, crc64nvme=True), conditional=False)
    try:
        return uploader.put(with_checksum, Buffers([memoryview(_CONTENT)]))
    except ConfigError as error:
        if error.reason != UNSPECIFIC_REFUSAL:
            raise
    plain = replace(with_checksum, capabilities=Capabilities(conditional_writes=True, crc64nvme=False))
    uploader.put(plain, Buffers([memoryview(_CONTENT)]))
    return False


def _refuses_taken_key(send: Callable[[Write, Buffers], object], write: Write) -> bool:
    for _ in range(_ATTEMPTS):
        try:
            send(write, Buffers([memoryview(_CONTENT)]))
        except PreconditionError:
            return True
        except UploadLostError:  # another process cleaned up
            continue
        except ConfigError as error:
            if error.reason != UNSPECIFIC_REFUSAL:
                raise
        return False
    raise TemporaryError(f"{write.where}: its upload was lost {_ATTEMPTS} times", reason="WriteConflict")


def _delete(requests: Requests, key: str) -> None:
    try:
        requests.call(
            "DeleteObject",
            f"s3://{requests.bucket}/{key}",
            lambda client: client.delete_object(Bucket=requests.bucket, Key=key),
        )
    except ConfigError as error:
        logger.warning("a small object stays behind: %s", error.message)
