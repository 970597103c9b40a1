"""Which files `spec.dataset.source` means, in a stable order, and what they were when the plan was made."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from headframe_api.errors import ConfigError, TemporaryError
from headframe_api.spec import DatasetSpec, S3Spec, is_hub_id
from headframe_worker.stores.base import Store
from headframe_worker.stores.local import LocalStore
from headframe_worker.stores.open import open_store

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet", ".arrow")
_WILD = re.compile(r"[*?\[]")
_SAVED_DATASET = ("state.json", "dataset_info.json")
_SAVED_SPLITS = "dataset_dict.json"


@dataclass(frozen=True)
class DataFile:
    """One file of the dataset."""

    store: Store
    key: str
    name: str
    """As errors, quarantine and default sample ids name it: relative to what the source has in common."""


@dataclass(frozen=True)
class DataSource:
    """The whole dataset: files, or a table that `datasets` loaded from the hub's cache."""

    files: tuple[DataFile, ...]
    digest: str
    hub: Any = None
    """A datasets.Dataset; then there are no files."""
    name: str = ""


def find_source(spec: DatasetSpec, s3: S3Spec) -> DataSource:
    """Resolve a path, glob, directory, hub id or S3 URI. Raises ConfigError where nothing is there."""
    source = spec.source
    if source.startswith("s3://"):
        return _from_s3(spec, s3)
    path = Path(source.removeprefix("file://")).expanduser()
    if path.is_file():
        return _from_files(spec, LocalStore(path.parent), [path.name])
    if path.is_dir():
        return _from_directory(spec, LocalStore(path))
    if _WILD.search(source):
        base, pattern = _split_wild(str(path))
        root = Path(base or ".")
        found = glob.glob(pattern, root_dir=root, recursive=True)  # noqa: PTH207  (pathlib has no sorted relative names)
        return _from_files(spec, LocalStore(root), [name for name in found if (root / name).is_file()])
    if is_hub_id(source) and not source.endswith(SUFFIXES):
        return _from_hub(spec)
    raise ConfigError(f"spec.dataset.source: {source}: no such file or directory", reason="DatasetNotFound")


def _split_wild(path: str) -> tuple[str, str]:
    """The directory that a glob has in common, and the pattern below it."""
    parts = path.split("/")
    wild = next(index for index, part in enumerate(parts) if _WILD.search(part))
    base = "/".join(parts[:wild])
    return ("/" if path.startswith("/") and not base else base), "/".join(parts[wild:])


def _from_s3(spec: DatasetSpec, s3: S3Spec) -> DataSource:
    uri = spec.source.rstrip("/")
    if _WILD.search(uri):
        base, pattern = _split_wild(uri)
        store = open_store(base, s3)
        return _from_files(spec, store, [info.key for info in store.list() if _matches(info.key, pattern)])
    if uri.endswith(SUFFIXES):
        base, _, key = uri.rpartition("/")
        store = open_store(base, s3)
        return _from_files(spec, store, [info.key for info in store.list(key) if info.key == key])
    return _from_directory(spec, open_store(uri, s3))


def _matches(key: str, pattern: str) -> bool:
    """A shell's glob on a key: `*` stays within one level, `**` crosses them."""
    if "**" in pattern:
        return fnmatchcase(key, pattern.replace("**/", "*"))
    parts, patterns = key.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _from_directory(spec: DatasetSpec, store: Store) -> DataSource:
    names = [info.key for info in store.list()]
    if _SAVED_SPLITS in names:
        splits = json.loads(store.read(_SAVED_SPLITS))["splits"]
        if spec.split not in splits:
            raise ConfigError(
                f"spec.dataset.split: {spec.split} is not in {spec.source}; it has {', '.join(splits)}",
                reason="DatasetNotFound",
            )
        return _from_files(spec, store, _saved_files(store, f"{spec.split}/"), ordered=True)
    if all(name in names for name in _SAVED_DATASET):
        return _from_files(spec, store, _saved_files(store, ""), ordered=True)
    return _from_files(spec, store, names)


def _saved_files(store: Store, prefix: str) -> list[str]:
    """The Arrow files of a `save_to_disk` directory, in its own order."""
    state = json.loads(store.read(f"{prefix}state.json"))
    return [prefix + entry["filename"] for entry in state["_data_files"]]


def _from_files(spec: DatasetSpec, store: Store, keys: Sequence[str], *, ordered: bool = False) -> DataSource:
    visible = [key for key in keys if not any(part.startswith(".") for part in PurePosixPath(key).parts)]
    chosen = [key for key in visible if key.endswith(SUFFIXES)]
    if not chosen:
        others = f"; it has {', '.join(sorted(visible)[:5])}" if visible else ""
        raise ConfigError(
            f"spec.dataset.source: {spec.source}: no file of {', '.join(SUFFIXES)} there{others}",
            reason="DatasetNotFound",
        )
    files = [DataFile(store, key, key) for key in (chosen if ordered else sorted(chosen))]
    return DataSource(tuple(files), _digest(store, files), name=spec.source)


def _digest(store: Store, files: Sequence[DataFile]) -> str:
    """Names, sizes and, for local files, modification times."""
    if isinstance(store, LocalStore):
        stats = [(store.directory / file.key).stat() for file in files]
        facts = [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, stats, strict=True)]
    else:
        sizes = {info.key: info.size_bytes for info in store.list()}
        facts = [[file.name, sizes[file.key]] for file in files]
    return "sha256:" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _from_hub(spec: DatasetSpec) -> DataSource:
    """Through `datasets`: downloaded once, then from its cache, memory-mapped; honours HF_HOME and HF_HUB_OFFLINE."""
    import datasets  # noqa: PLC0415
    from huggingface_hub import constants  # noqa: PLC0415

    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(spec.source, split=spec.split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ConfigError(
            f"spec.dataset.source: {spec.source}: no such file, and not on the hub or not visible with this HF_TOKEN: {error}",
            reason="DatasetNotFound",
        ) from error
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"spec.dataset: {spec.source}: {error}", reason="DatasetNotFound") from error
    except OSError as error:
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"spec.dataset.source: {spec.source} is not in the local cache, and HF_HUB_OFFLINE forbids to download it",
                reason="DatasetNotFound",
            ) from error
        raise TemporaryError(
            f"spec.dataset.source: {spec.source} cannot be downloaded: {error}", reason="HubUnreachable"
        ) from error
    # The cache remembers the URLs it was made from, which hold the commit, also when offline.
    urls = sorted(table.info.download_checksums or {})
    commits = {match[1] for url in urls if (match := re.search(r"@([0-9a-f]{40})/", url))}
    return DataSource((), commits.pop() if len(commits) == 1 else table._fingerprint, table, spec.source)  # noqa: SLF001
