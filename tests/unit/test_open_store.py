"""From a URI to a store: what names a directory, and what names nothing."""

from pathlib import Path

import pytest

from headframe_api.errors import ConfigError
from headframe_api.spec import S3Spec
from headframe_worker.stores.local import LocalStore
from headframe_worker.stores.open import open_store


@pytest.mark.parametrize(
    ("uri", "directory"),
    [
        ("/data/out", "/data/out"),
        ("file:///data/out", "/data/out"),
        ("file:///data/out%20put", "/data/out put"),
        ("file:///data/out?#1", "/data/out?#1"),
        ("out%20put", str(Path.cwd() / "out%20put")),
        ("file", str(Path.cwd() / "file")),
        ("~/out", str(Path.home() / "out")),
    ],
)
def test_a_path_and_a_file_uri_name_a_directory(uri: str, directory: str) -> None:
    store = open_store(uri, S3Spec())
    assert isinstance(store, LocalStore)
    assert str(store.directory) == directory


@pytest.mark.parametrize("uri", ["file://", "file://data/out", "file://~/out", "gs://bucket/out", "S3://bucket/out"])
def test_what_names_no_store_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="file:///path"):
        open_store(uri, S3Spec())
