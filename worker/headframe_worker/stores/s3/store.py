"""A prefix of a bucket as a store: the pieces of this package put together, anew in every process that uses it."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from headframe_api.errors import ConfigError, TemporaryError
from headframe_api.names import S3_RETRY_SECONDS_ENVIRONMENT
from headframe_api.spec import S3Spec
from headframe_worker.stores.base import ObjectInfo, Written
from headframe_worker.stores.observer import UNOBSERVED, StoreObserver
from headframe_worker.stores.s3.body import Buffers
from headframe_worker.stores.s3.client import Connection
from headframe_worker.stores.s3.delete import delete_objects
from headframe_worker.stores.s3.download import fetch_object, object_exists, read_into, read_object, read_range
from headframe_worker.stores.s3.listing import list_abandoned_probes, list_abandoned_uploads, list_objects
from headframe_worker.stores.s3.probe import HIDDEN_PREFIX, probe
from headframe_worker.stores.s3.retry import Requests, RetryPolicy
from headframe_worker.stores.s3.upload import Uploader
from headframe_worker.stores.s3.uri import SCHEME, join_key, split_s3_uri
from headframe_worker.stores.s3.write import Capabilities

logger = logging.getLogger(__name__)

_DELETE_BATCH = 1000


@dataclass(frozen=True)
class S3Tuning:
    """What of the store may differ from one use to the next without changing what it writes."""

    part_bytes: int = 16 << 20
    """Objects up to this size are written by one request; parts and downloaded ranges of larger ones have it."""
    threads: int = 8
    """Parts in flight, over all objects of one process."""
    abandoned_after_seconds: float = 3600.0
    """Age at which an unfinished upload is nobody's: older than any pause for an outage."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)


class S3Store:
    """Objects are those of one bucket below one prefix.

    May be pickled, and used after a fork: each process opens connections of its own. The observer stays behind.
    """

    def __init__(
        self, uri: str, s3: S3Spec, *, tuning: S3Tuning | None = None, observer: StoreObserver = UNOBSERVED
    ) -> None:
        self._bucket, self._prefix = split_s3_uri(uri)
        self.uri = f"{SCHEME}{join_key(self._bucket, self._prefix)}".rstrip("/")
        self._s3 = s3
        self._tuning = tuning or S3Tuning()
        self._observer = observer
        self._process: _Process | None = None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See Store. One request for each 1,000 objects."""
        top = f"{self._prefix}/" if self._prefix else ""
        return list_objects(self._here().requests, top + prefix, skip=len(top))

    def exists(self, key: str) -> bool:
        """See Store."""
        return object_exists(self._here().requests, self._key(key))

    def read(self, key: str) -> bytes:
        """See Store."""
        return read_object(self._here().requests, self._key(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See Store."""
        return read_range(self._here().requests, self._key(key), start, length)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """See Store."""
        read_into(self._here().requests, self._key(key), start, buffer)

    def fetch(self, key: str, directory: Path) -> Path:
        """See Store. The file lies in directory under the object's key."""
        here, target = self._here(), directory / key
        if ".." in target.parts:
            raise ConfigError(f"{self.uri}/{key}: a key with '..' in it is not written to a file")
        try:
            return fetch_object(here.requests, self._key(key), target, here.pool, part_bytes=self._tuning.part_bytes)
        except OSError as error:
            raise TemporaryError(f"{target}: cannot hold a copy of {self.uri}/{key}: {error.strerror}") from error

    def write(self, key: str, buffers: Sequence[memoryview], *, exclusive: bool = False) -> Written:
        """See Store."""
        here = self._here()
        return here.uploader.write(self._key(key), Buffers(buffers), self._capabilities(here), exclusive=exclusive)

    def write_file(self, key: str, path: Path, *, exclusive: bool = False) -> Written:
        """See Store. The file is mapped, not read into memory."""
        if path.stat().st_size == 0:
            return self.write(key, [], exclusive=exclusive)
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self.write(key, [memoryview(content)], exclusive=exclusive)

    def delete(self, keys: Iterable[str]) -> None:
        """See Store."""
        pending = [self._key(key) for key in keys]
        requests = self._here().requests
        for start in range(0, len(pending), _DELETE_BATCH):
            delete_objects(requests, pending[start : start + _DELETE_BATCH])

    def clean_up(self, prefix: str = "", *, settled: bool = False) -> int:
        """See Store. Without permission to list or abort uploads this says so in the log, and removes nothing."""
        here, removed = self._here(), 0
        top = f"{self._prefix}/" if self._prefix else ""
        age = self._tuning.abandoned_after_seconds
        try:
            for below in {top + prefix, top + HIDDEN_PREFIX} if settled else {top + prefix}:
                uploads = list_abandoned_uploads(here.requests, below, older_than_seconds=None if settled else age)
                removed += sum(here.uploader.abandon(key, upload_id) for key, upload_id in uploads)
            if probes := list_abandoned_probes(here.requests, top, older_than_seconds=age):
                delete_objects(here.requests, probes)
                removed += len(probes)
        except ConfigError as error:
            logger.warning("interrupted uploads are not cleaned up: %s", error.message)
        return removed

    def check_writable(self) -> None:
        """See Store."""
        self._capabilities(self._here())

    def close(self) -> None:
        """See Store. Requests in flight stop at their next byte; a store that was closed stays so."""
        here = self._here()
        here.requests.closing.set()
        here.uploader.abort_open()
        here.pool.shutdown(wait=False)
        here.requests.connection.close()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_process": None, "_observer": UNOBSERVED}

    def _here(self) -> _Process:
        """What this process has open. Two threads that are first at once may both open it; one of the two is dropped."""
        process = self._process
        if process is None or process.pid != os.getpid():
            process = self._process = self._open()
        return process

    def _open(self) -> _Process:
        requests = Requests(self.uri, self._bucket, Connection(self._s3), self._tuning.retry, self._observer)
        pool = ThreadPoolExecutor(self._tuning.threads, "s3")
        uploader = Uploader(requests, self._s3, pool, part_bytes=self._tuning.part_bytes)
        return _Process(os.getpid(), requests, pool, uploader)

    def _capabilities(self, here: _Process) -> Capabilities:
        with here.lock:
            if here.capabilities is None:
                here.capabilities = probe(here.uploader, here.requests, self._prefix)
            return here.capabilities

    def _key(self, key: str) -> str:
        return join_key(self._prefix, key)


@dataclass
class _Process:
    """Everything that must not be shared between processes."""

    pid: int
    requests: Requests
    pool: ThreadPoolExecutor
    uploader: Uploader
    capabilities: Capabilities | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def tuning_from_environment() -> S3Tuning:
    """The defaults, with the retry budget out of HEADFRAME_S3_RETRY_SECONDS where it is set."""
    text = os.environ.get(S3_RETRY_SECONDS_ENVIRONMENT)
    if text is None:
        return S3Tuning()
    try:
        return S3Tuning(retry=RetryPolicy(budget_seconds=float(text)))
    except ValueError:
        raise ConfigError(f"{S3_RETRY_SECONDS_ENVIRONMENT}: {text!r} is not a number of seconds") from None
