"""Reading `s3://bucket/key`: the one place that knows how such a URI splits."""

from __future__ import annotations

import re

from headframe_api.errors import ConfigError

SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


def split_s3_uri(uri: str) -> tuple[str, str]:
    """(bucket, key or prefix without slashes at its ends). Raises ConfigError where there is no valid bucket."""
    bucket, _, key = uri.removeprefix(SCHEME).partition("/")
    if not uri.startswith(SCHEME) or "@" in bucket:
        # Not repeated: what stands before an @ may be a password.
        raise ConfigError(
            "an S3 URI must be s3://bucket/prefix, without credentials in it; set them in the environment"
        )
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{uri}: {bucket!r} is not a bucket's name; use s3://bucket/prefix")
    return bucket, key.strip("/")


def join_key(prefix: str, key: str) -> str:
    """The key in the bucket of a key relative to a prefix; both may be empty."""
    return f"{prefix}/{key}" if prefix else key
