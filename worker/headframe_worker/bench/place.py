"""A temporary place on the medium of a job's output, and never inside that output."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headframe_api.errors import ConfigError
from headframe_api.spec import S3Spec
from headframe_worker.stores.base import Store
from headframe_worker.stores.local import LocalStore
from headframe_worker.stores.observer import StoreObserver
from headframe_worker.stores.open import open_store

_NAME = "headframe-bench"


@contextmanager
def temporary_place(job_output: str, chosen: str | None, s3: S3Spec, observer: StoreObserver) -> Iterator[Store]:
    """A store that is empty, can be written, and is gone afterwards with all that is in it.

    It lies beside the job's output (`out/qwen` -> `out/qwen.headframe-bench-1f2e`), or below `chosen`. Raises ConfigError
    where nothing can be beside the output, or where it cannot be written.
    """
    store = open_store(_beside(job_output, s3) if chosen is None else _below(chosen), s3, observer=observer)
    missing = _missing_parents(store)
    try:
        store.check_writable()
        yield store
    finally:
        try:
            store.delete([info.key for info in store.list()])
        finally:
            store.close()
        if isinstance(store, LocalStore):
            shutil.rmtree(store.directory, ignore_errors=True)
            for folder in missing:
                with suppress(OSError):  # someone else put something there meanwhile
                    folder.rmdir()


def free_bytes(store: Store) -> int | None:
    """Room on a local store's disk; None where there is no telling."""
    return shutil.disk_usage(store.directory).free if isinstance(store, LocalStore) else None


def _below(chosen: str) -> str:
    return f"{chosen.rstrip('/')}/{_NAME}-{secrets.token_hex(4)}"


def _beside(job_output: str, s3: S3Spec) -> str:
    output = open_store(job_output, s3)
    output.close()
    name = f".{_NAME}-{secrets.token_hex(4)}"
    if isinstance(output, LocalStore):
        folder = output.directory.resolve()
        if folder == folder.parent or folder.is_mount():
            raise ConfigError(
                f"{folder}: is where a file system is mounted, so what lies beside it is another medium; "
                "name a place to measure with --output, such as a directory in it"
            )
        return str(folder.with_name(folder.name + name))
    if "/" not in output.uri.partition("://")[2]:
        raise ConfigError(
            f"{output.uri}: is a whole bucket, so nothing lies beside it; name a place to measure with --output"
        )
    return output.uri + name


def _missing_parents(store: Store) -> list[Path]:
    """Directories above the store that writing to it will create, the innermost first."""
    if not isinstance(store, LocalStore):
        return []
    return [folder for folder in store.directory.parents if not folder.exists()]
