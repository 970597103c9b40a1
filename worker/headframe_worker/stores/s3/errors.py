"""What a failed request means: which faults pass, which never will, and how a user is told."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
    SSLError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

RequestError = (ClientError, BotoCoreError)
"""What a request of boto3 raises by rights."""
StrayError = (HTTPError, ResponseParserError)
"""What comes through boto3 as it is: a connection that broke while a body was read, an answer that is not S3's."""
UNSPECIFIC_REFUSAL = "StoreRefused"
"""Reason of a ConfigError where the server's code says no more than that."""


OF_ANOTHER_SERVER = ("InvalidAccessKeyId", "NoSuchBucket", "NoCredentialsError")
"""Codes of AWS for a key or a bucket that another server knows."""


class Fault(Enum):
    """What to do about a failed request."""

    TRANSIENT = auto()
    """Try again until the budget is spent."""
    BRIEF = auto()
    """Try again a few times: it passes soon or not at all."""
    EXPIRED = auto()
    """Ask for new credentials, then try again."""
    MISSING = auto()
    SHORTER = auto()
    """The object ends before the range that was asked for."""
    PRECONDITION = auto()
    """The key is taken (If-None-Match), or the object changed (If-Match)."""
    UPLOAD_LOST = auto()
    """The upload must begin anew: it is gone, or it met another writer."""
    PERMANENT = auto()


class PreconditionError(Exception):
    """The server refused a conditional request."""


class UploadLostError(Exception):
    """The server no longer knows the upload."""


class RangeError(Exception):
    """The object ends before the range."""


class TruncatedError(BotoCoreError):
    """A body ended early although the server said it was whole."""

    fmt = "the body ended after {got} of {wanted} bytes"


class UnconfirmedError(BotoCoreError):
    """Something between us and the server said yes in its place."""

    fmt = "the answer has no ETag, so it is not the object store's"


_BY_CODE = {
    "NoSuchKey": Fault.MISSING,
    "NotFound": Fault.MISSING,
    "404": Fault.MISSING,
    "InvalidRange": Fault.SHORTER,
    "416": Fault.SHORTER,
    "PreconditionFailed": Fault.PRECONDITION,
    "412": Fault.PRECONDITION,
    "NoSuchUpload": Fault.UPLOAD_LOST,
    "ConditionalRequestConflict": Fault.UPLOAD_LOST,
    "ExpiredToken": Fault.EXPIRED,
    "ExpiredTokenException": Fault.EXPIRED,
    "TokenRefreshRequired": Fault.EXPIRED,
    "InvalidToken": Fault.EXPIRED,
    "400": Fault.EXPIRED,  # a HEAD has no body that would say so
    "RequestTimeTooSkewed": Fault.BRIEF,
    "BadDigest": Fault.BRIEF,
    "XAmzContentSHA256Mismatch": Fault.BRIEF,
    "XAmzContentChecksumMismatch": Fault.BRIEF,
    "IncompleteBody": Fault.TRANSIENT,
    "OperationAborted": Fault.TRANSIENT,
    "RequestTimeout": Fault.TRANSIENT,
    "SlowDown": Fault.TRANSIENT,
    "Throttling": Fault.TRANSIENT,
    "ThrottlingException": Fault.TRANSIENT,
    "TooManyRequests": Fault.TRANSIENT,
    "InternalError": Fault.TRANSIENT,
    "ServiceUnavailable": Fault.TRANSIENT,
}
_PASSING_STATUSES = (408, 425, 429)


def fault_of(error: ClientError | BotoCoreError) -> Fault:
    """What to do about this error."""
    if isinstance(error, ClientError):
        known = _BY_CODE.get(code_of(error))
        if known is not None:
            return known
        status = _status(error)
        # Some servers and proxies answer an error with 200 and a broken body, or with a status of their own.
        passing = status in _PASSING_STATUSES or (status >= 500 and status != 501) or status < 300
        return Fault.TRANSIENT if passing else Fault.PERMANENT
    if isinstance(error, FlexibleChecksumError | CredentialRetrievalError):
        return Fault.BRIEF
    if isinstance(error, SSLError):
        verification = any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error))
        stays = verification or "CERTIFICATE_VERIFY_FAILED" in str(error) or _speaks_no_tls(error)
        return Fault.PERMANENT if stays else Fault.TRANSIENT
    passing_errors = (
        BotoConnectionError,
        HTTPClientError,
        IncompleteReadError,
        ResponseStreamingError,
        TruncatedError,
        UnconfirmedError,
    )
    return Fault.TRANSIENT if isinstance(error, passing_errors) else Fault.PERMANENT


def code_of(error: ClientError | BotoCoreError) -> str:
    """The server's error code, or the name of boto3's own error."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code") or _status(error))
    return type(error).__name__


def words_of(error: ClientError | BotoCoreError) -> str:
    """The error in one line."""
    if not isinstance(error, ClientError):
        return " ".join(str(error).split()).rstrip(".")
    message = str(error.response.get("Error", {}).get("Message") or "").strip().rstrip(".")
    status, code = _status(error), code_of(error)
    name = str(status) if code == str(status) else f"{status} {code}"
    return f"{name}: {message}" if message and message not in (code, "Unknown") else name


_ADVICE: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "Forbidden", "MethodNotAllowed"),
        "AccessDenied",
        "check that this identity may {action} on bucket {bucket} and that no policy denies it",
    ),
    (
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidClientTokenId", "XAdminUserNotFound"),
        "BadCredentials",
        "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the Secret, profile or role they come from)",
    ),
    (
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"),
        "ExpiredCredentials",
        "the token is no longer valid and nothing renewed it: provide new credentials",
    ),
    (
        ("NoSuchBucket",),
        "NoSuchBucket",
        "check the bucket's name, create {bucket}, or check spec.s3.endpoint",
    ),
    (
        ("PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
        "WrongRegion",
        "check spec.s3.region",
    ),
    (
        ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
        "NoCredentials",
        (
            "provide credentials as boto3 finds them: the environment, a profile, a role; on Kubernetes "
            "spec.s3.credentialsSecret names a Secret that holds AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ),
    ),
    (
        ("SSLError",),
        "UntrustedCertificate",
        "name the authority of the server's certificate by AWS_CA_BUNDLE, or by spec.s3.caSecret on Kubernetes",
    ),
)


def advice_for(error: ClientError | BotoCoreError, *, bucket: str, action: str) -> tuple[str, str]:
    """(reason, what to check) of an error that stays."""
    code = code_of(error)
    if _speaks_no_tls(error):
        return "NoTls", "the server speaks no TLS there: use http:// in spec.s3.endpoint, or the port of its TLS"
    for codes, reason, advice in _ADVICE:
        if code in codes:
            return reason, advice.format(bucket=bucket, action=action)
    if code.startswith("KMS") or "Encryption" in code:
        return "Encryption", "check spec.s3.encryption and spec.s3.kmsKeyId, and that this identity may use the key"
    return UNSPECIFIC_REFUSAL, "check spec.s3 and the URI"


def skew_advice(error: ClientError | BotoCoreError) -> str:
    """By how much the clocks differ, where the answer says so; empty for other errors."""
    if code_of(error) != "RequestTimeTooSkewed" or not isinstance(error, ClientError):
        return ""
    date = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if not date:
        return "; this machine's clock is wrong: check its time synchronisation"
    skew = (datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds()
    ahead = "ahead of" if skew > 0 else "behind"
    return f"; this machine's clock is {abs(skew):.0f} s {ahead} the server's: check its time synchronisation"


def is_unknown_host(error: BaseException) -> bool:
    """Whether the endpoint's name could not be resolved."""
    return any(type(cause).__name__ in ("NameResolutionError", "gaierror") for cause in _causes(error))


def _speaks_no_tls(error: ClientError | BotoCoreError) -> bool:
    """OpenSSL's words for an answer that is not TLS at all."""
    return isinstance(error, SSLError) and any(
        word in str(error) for word in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was made of: botocore keeps the cause in its keyword arguments, urllib3 in `reason`."""
    pending: list[object] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        kwargs = getattr(current, "kwargs", None)
        pending += [current.__cause__, current.__context__, getattr(current, "reason", None), *current.args]
        pending.append(kwargs.get("error") if isinstance(kwargs, dict) else None)


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
