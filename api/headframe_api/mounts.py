"""Which paths of a spec are local, and whether a volume of the spec carries them: pods have no other disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from headframe_api.names import CACHE_PATH
from headframe_api.spec import ExtractionJobSpec, is_hub_id, local_path

_DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet", ".arrow")
_GLOB = frozenset("*?[")


@dataclass(frozen=True)
class LocalPath:
    """A path that a field of the spec names; ``written`` where the job writes to it."""

    field: str
    path: str
    written: bool = False


def local_paths(spec: ExtractionJobSpec) -> Iterator[LocalPath]:
    """The fields of a spec that name a path of the machine, not a hub id or an `s3://` URI."""
    model, dataset = spec.model.source, spec.dataset.source
    if (path := local_path(model)) is not None and not is_hub_id(model):
        yield LocalPath("spec.model.source", path)
    if (path := local_path(dataset)) is not None and (not is_hub_id(dataset) or _names_files(dataset)):
        yield LocalPath("spec.dataset.source", path)
    template = spec.dataset.chat_template
    if template is not None and "\n" not in template and template.startswith(("/", ".")):
        yield LocalPath("spec.dataset.chatTemplate", template)
    if (path := local_path(spec.output.uri)) is not None:
        yield LocalPath("spec.output.uri", path, written=True)


def unmounted_paths(spec: ExtractionJobSpec) -> list[str]:
    """One sentence for each local path that no volume of the spec carries; empty where pods can reach them all."""
    mounts = {mount.mount_path: bool(mount.read_only) for mount in spec.worker.volume_mounts}
    if spec.worker.cache is not None:
        mounts[CACHE_PATH] = False
    faults = []
    for local in local_paths(spec):
        where = [path for path in mounts if _lies_in(local.path, path)]
        if not where:
            faults.append(
                f"{local.field}: {local.path} is a local path, and no volume is mounted there; mount one with "
                f"spec.worker.volumes and spec.worker.volumeMounts, or use s3://"
            )
        elif local.written and mounts[max(where, key=len)]:
            faults.append(f"{local.field}: {local.path} lies on a read-only mount; mount it without readOnly")
    return faults


def _names_files(source: str) -> bool:
    return source.endswith(_DATA_SUFFIXES) or bool(_GLOB & set(source))


def _lies_in(path: str, mount: str) -> bool:
    pure, root = PurePosixPath(path), PurePosixPath(mount)
    return ".." not in pure.parts and pure.is_relative_to(root)
