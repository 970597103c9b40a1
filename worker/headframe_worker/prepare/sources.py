"""Which files `spec.dataset.source` means, in a stable order, and what they were when the plan was made."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from headframe_api.errors import ConfigError, TemporaryError
from headframe_api.spec import DatasetSpec, S3Spec, is_hub_id, local_path
from headframe_worker.stores.base import ObjectInfo, Store
from headframe_worker.stores.local import LocalStore
from headframe_worker.stores.observer import UNOBSERVED, StoreObserver
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


def find_source(spec: DatasetSpec, s3: S3Spec, *, observer: StoreObserver = UNOBSERVED) -> DataSource:
    """Resolve a path, glob, directory, hub id or S3 URI. Raises ConfigError where nothing is there."""
    source = spec.source
    if source.startswith("s3://"):
        return _from_s3(spec, s3, observer)
    path = Path(local_path(source) or source).expanduser()
    if path.is_file():
        store = LocalStore(path.parent)
        return _from_files(spec, store, [store.info(path.name)])
    if path.is_dir():
        return _from_directory(spec, LocalStore(path))
    if _WILD.search(source):
        base, pattern = _split_wild(str(path))
        store = LocalStore(root := Path(base or "."))
        found = glob.glob(pattern, root_dir=root, recursive=True)  # noqa: PTH207  (pathlib has no sorted relative names)
        return _from_files(spec, store, [store.info(name) for name in found if (root / name).is_file()])
    if is_hub_id(source) and not source.endswith(SUFFIXES):
        return _from_hub(spec)
    raise ConfigError(f"spec.dataset.source: {source}: no such file or directory", reason="DatasetNotFound")


def _split_wild(path: str) -> tuple[str, str]:
    """The directory that a glob has in common, and the pattern below it."""
    parts = path.split("/")
    wild = next(index for index, part in enumerate(parts) if _WILD.search(part))
    base = "/".join(parts[:wild])
    return ("/" if path.startswith("/") and not base else base), "/".join(parts[wild:])


def _from_s3(spec: DatasetSpec, s3: S3Spec, observer: StoreObserver) -> DataSource:
    uri = spec.source.rstrip("/")
    if _WILD.search(uri):
        base, pattern = _split_wild(uri)
        store, common = open_store(base, s3, observer=observer), _WILD.split(pattern)[0]
        return _from_files(spec, store, [info for info in store.list(common) if _matches(info.key, pattern)])
    if uri.endswith(SUFFIXES):
        base, _, key = uri.rpartition("/")
        store = open_store(base, s3, observer=observer)
        return _from_files(spec, store, [info for info in store.list(key) if info.key == key])
    return _from_directory(spec, open_store(uri, s3, observer=observer))


def _matches(key: str, pattern: str) -> bool:
    """A shell's glob on a key: `*` stays within one level, `**` crosses them."""
    if "**" in pattern:
        return fnmatchcase(key, pattern.replace("**/", "*"))
    parts, patterns = key.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _from_directory(spec: DatasetSpec, store: Store) -> DataSource:
    infos = {info.key: info for info in store.list()}
    if _SAVED_SPLITS in infos:
        splits = json.loads(store.read(_SAVED_SPLITS))["splits"]
        if spec.split not in splits:
            raise ConfigError(
                f"spec.dataset.split: {spec.split} is not in {spec.source}; it has {', '.join(splits)}",
                reason="DatasetNotFound",
            )
        return _from_files(spec, store, _saved_files(spec, store, infos, f"{spec.split}/"), ordered=True)
    if all(name in infos for name in _SAVED_DATASET):
        return _from_files(spec, store, _saved_files(spec, store, infos, ""), ordered=True)
    return _from_files(spec, store, list(infos.values()))


def _saved_files(spec: DatasetSpec, store: Store, infos: Mapping[str, ObjectInfo], prefix: str) -> list[ObjectInfo]:
    """The Arrow files of a `save_to_disk` directory, in its own order."""
    state = json.loads(store.read(f"{prefix}state.json"))
    keys = [prefix + entry["filename"] for entry in state["_data_files"]]
    if missing := [key for key in keys if key not in infos]:
        raise ConfigError(
            f"spec.dataset.source: {spec.source}: {missing[0]} is missing, which {prefix}state.json names",
            reason="DatasetNotFound",
        )
    return [infos[key] for key in keys]


def _from_files(spec: DatasetSpec, store: Store, infos: Sequence[ObjectInfo], *, ordered: bool = False) -> DataSource:
    visible = [info for info in infos if not any(part.startswith(".") for part in PurePosixPath(info.key).parts)]
    chosen = [info for info in visible if info.key.endswith(SUFFIXES)]
    if not chosen:
        others = f"; it has {', '.join(sorted(info.key for info in visible)[:5])}" if visible else ""
        raise ConfigError(
            f"spec.dataset.source: {spec.source}: no file of {', '.join(SUFFIXES)} there{others}",
            reason="DatasetNotFound",
        )
    if not ordered:
        chosen.sort(key=lambda info: info.key)
    facts = [[info.key, info.size_bytes, info.version] for info in chosen]
    digest = "sha256:" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return DataSource(tuple(DataFile(store, info.key, info.key) for info in chosen), digest, name=spec.source)


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
