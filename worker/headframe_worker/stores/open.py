"""From a URI to a store: the one place that knows which kinds there are."""

from __future__ import annotations

from pathlib import Path

from headframe_api.errors import ConfigError
from headframe_api.spec import S3Spec, local_path
from headframe_worker.stores.base import Store
from headframe_worker.stores.local import LocalStore
from headframe_worker.stores.observer import UNOBSERVED, StoreObserver
from headframe_worker.stores.s3.store import S3Store, tuning_from_environment


def open_store(uri: str, s3: S3Spec, *, observer: StoreObserver = UNOBSERVED) -> Store:
    """The store at `s3://bucket/prefix`, `file:///path` or a path. Raises ConfigError for anything else.

    The observer hears when requests must wait for the object store.
    """
    path, scheme = local_path(uri), uri.partition("://")[0]
    if path is not None and uri.startswith("file://") and not path.startswith("/"):
        raise ConfigError(f"{uri}: a file URI gives the path from the root; write file:///path")
    if path is not None:
        return LocalStore(Path(path))
    if scheme == "s3":
        return S3Store(uri, s3, tuning=tuning_from_environment(), observer=observer)
    raise ConfigError(f"{uri}: scheme {scheme!r} is not supported; use s3://bucket/prefix, file:///path or a path")
