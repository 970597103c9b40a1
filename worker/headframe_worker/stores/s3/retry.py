"""Trying again: full jitter, a budget that outlives an outage, and word to whoever waits for it."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, HTTPClientError

from headframe_api.errors import ConfigError, StoppedError, TemporaryError
from headframe_worker.stores.missing import MissingObjectError
from headframe_worker.stores.observer import StoreObserver
from headframe_worker.stores.s3.client import Connection
from headframe_worker.stores.s3.errors import (
    OF_ANOTHER_SERVER,
    Fault,
    PreconditionError,
    RangeError,
    RequestError,
    StrayError,
    UploadLostError,
    advice_for,
    code_of,
    fault_of,
    is_unknown_host,
    skew_advice,
    words_of,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_EVERY_SECONDS = 0.5


@dataclass(frozen=True)
class RetryPolicy:
    """How long a request is tried again. A delay is drawn from 0 to a bound that doubles from the first to the longest."""

    budget_seconds: float = 1500.0
    """From a request's first failure: outlives an outage of a quarter of an hour by far."""
    first_delay_seconds: float = 0.2
    longest_delay_seconds: float = 20.0
    brief_attempts: int = 5
    """Attempts where the fault passes soon or never, such as a wrong checksum."""
    unknown_host_seconds: float = 60.0
    """Budget while the endpoint's name was never resolved: more likely misspelt than down."""
    stopping_seconds: float = 5.0
    """Budget once the process is to end."""

    def delay_seconds(self, failures: int) -> float:
        """How long to wait after so many failures."""
        bound = min(self.longest_delay_seconds, self.first_delay_seconds * 2.0 ** min(failures - 1, 30))
        return random.uniform(0, bound)


class Requests:
    """Every request of one store in one process goes through `call`."""

    def __init__(
        self, uri: str, bucket: str, connection: Connection, policy: RetryPolicy, observer: StoreObserver
    ) -> None:
        self.uri = uri
        self.bucket = bucket
        self.connection = connection
        self.closing = threading.Event()
        self._policy = policy
        self._waits = _Waits(observer)
        self._observer = observer
        self._reached = False

    def call(self, operation: str, where: str, attempt: Callable[[S3Client], T]) -> T:
        """What `attempt` returns, called with a client until it succeeds. It must be safe to repeat.

        `operation` is S3's name of it and `where` the URI, for errors. Raises ConfigError for what stays wrong,
        TemporaryError when the budget is spent or the store was closed, StoppedError, MissingObjectError, and the three
        exceptions of `errors` that callers decide on.
        """
        failures, first_failure = 0, 0.0
        error: ClientError | BotoCoreError
        try:
            while True:
                self.check_open(operation, where)
                client = self.connection.client
                try:
                    result = attempt(client)
                except RequestError as failed:
                    error = failed
                except StrayError as failed:
                    error = HTTPClientError(error=failed)
                else:
                    self._reached = True
                    return result
                failures += 1
                first_failure = first_failure or time.monotonic()
                elapsed = time.monotonic() - first_failure
                self._decide(_Failure(error, operation, where, client, failures, elapsed))
                if self._observer.stopping() and elapsed > self._policy.stopping_seconds:
                    raise StoppedError(f"stopped while {operation} of {where} waited for the object store") from error
                if failures > 1:
                    self._waits.begin(threading.get_ident(), f"{where}: {operation}: {self._words(error)}")
                self._observer.retried()
                self._pause(self._policy.delay_seconds(failures))
        finally:
            self._waits.end(threading.get_ident())

    def _pause(self, seconds: float) -> None:
        """Wait so long, or until the store is closed, or the process is to end."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.closing.wait(min(left, _LOOK_EVERY_SECONDS)) or self._observer.stopping():
                return

    def check_open(self, operation: str, where: str) -> None:
        """Raise TemporaryError once the store is being closed."""
        if self.closing.is_set():
            raise TemporaryError(f"{where}: {operation} was abandoned: the store was closed", reason="Closed")

    def _decide(self, failure: _Failure) -> None:
        """Return where another attempt is worth it, else raise."""
        error, where = failure.error, failure.where
        fault = fault_of(error)
        self._raise_outcome(fault, error, where)
        if fault is Fault.PERMANENT or (fault is Fault.EXPIRED and not self.connection.renew(failure.client)):
            raise self._config_error(failure) from error
        brief = fault in (Fault.BRIEF, Fault.EXPIRED) and failure.count >= self._policy.brief_attempts
        budget = self._policy.budget_seconds
        if not self._reached and is_unknown_host(error):
            budget = min(budget, self._policy.unknown_host_seconds)
        if not brief and failure.elapsed_seconds < budget:
            return
        if isinstance(error, CredentialRetrievalError) or fault is Fault.EXPIRED:
            raise self._config_error(failure) from error
        raise TemporaryError(
            f"{where}: {failure.operation} failed {failure.count} times over {failure.elapsed_seconds:.0f} s, last with "
            f"{self._words(error)}{skew_advice(error)}{self._asked_aws(error)}; run it again, it goes on from here",
            reason="StoreUnavailable",
        ) from error

    @staticmethod
    def _raise_outcome(fault: Fault, error: ClientError | BotoCoreError, where: str) -> None:
        if fault is Fault.MISSING:
            raise MissingObjectError(f"{where}: no such object") from error
        if fault is Fault.PRECONDITION:
            raise PreconditionError(where) from error
        if fault is Fault.UPLOAD_LOST:
            raise UploadLostError(where) from error
        if fault is Fault.SHORTER:
            raise RangeError(where) from error

    def _config_error(self, failure: _Failure) -> ConfigError:
        action = f"s3:{_ACTIONS.get(failure.operation, failure.operation)}"
        reason, advice = advice_for(failure.error, bucket=self.bucket, action=action)
        return ConfigError(
            f"{failure.where}: {failure.operation} was refused: {self._words(failure.error)}; "
            f"asked with {self.connection.identity}; {advice}{self._asked_aws(failure.error)}",
            reason=reason,
        )

    def _asked_aws(self, error: ClientError | BotoCoreError) -> str:
        """A hint where another server's bucket or key may be meant, and its endpoint was forgotten."""
        forgotten = code_of(error) in OF_ANOTHER_SERVER or is_unknown_host(error)
        hint = (
            "; no endpoint is set, so AWS was asked: set spec.s3.endpoint or AWS_ENDPOINT_URL if it is another server"
        )
        return hint if forgotten and self.connection.is_aws else ""

    def _words(self, error: ClientError | BotoCoreError) -> str:
        return self.connection.redact(words_of(error))


_ACTIONS = {
    "HeadObject": "GetObject",
    "ListObjectsV2": "ListBucket",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "DeleteObjects": "DeleteObject",
}


@dataclass(frozen=True)
class _Failure:
    """A failed attempt of one request."""

    error: ClientError | BotoCoreError
    operation: str
    where: str
    client: S3Client
    count: int
    """How often it failed by now."""
    elapsed_seconds: float
    """Since it first failed."""


class _Waits:
    """Which threads try again now: the observer hears of the first that begins and the last that ends."""

    def __init__(self, observer: StoreObserver) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._since = 0.0

    def begin(self, thread: int, message: str) -> None:
        with self._lock:
            if not self._threads:
                self._since = time.monotonic()
                logger.warning("waiting for the object store: %s", message)
                self._observer.waiting(message)
            self._threads.add(thread)

    def end(self, thread: int) -> None:
        with self._lock:
            if thread in self._threads:
                self._threads.discard(thread)
                if not self._threads:
                    logger.warning("no longer waiting, after %.0f s", time.monotonic() - self._since)
                    self._observer.waiting(None)
