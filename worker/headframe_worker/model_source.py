"""From `spec.model` to files on this machine and to the exact revision they have."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from headframe_api.errors import ConfigError, TemporaryError
from headframe_api.spec import ModelSpec, S3Spec, is_hub_id, local_path
from headframe_worker.stores.base import ObjectInfo, Store
from headframe_worker.stores.observer import UNOBSERVED, StoreObserver
from headframe_worker.stores.open import open_store

_CONFIGURATION = "config.json"
_DESCRIPTION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")

_READ_WHOLE_BYTES = 64 << 20
_SAMPLES_PER_FILE = 16
_SAMPLE_BYTES = 4096
_GGUF_HEADER_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000
_PARALLEL_READS = 8


@dataclass(frozen=True)
class ModelFiles:
    """A model's files in one local directory."""

    directory: Path
    gguf_file: str | None
    """The weights' file name where they are GGUF; then configuration and tokenizer come out of it too."""
    revision: str
    """As `plan.ModelIdentity.revision` defines it."""
    source: str
    """As in the spec, for messages."""
    trust_remote_code: bool = False

    def loading_arguments(self) -> dict[str, Any]:
        """What every `from_pretrained(directory, ...)` needs to load exactly these files."""
        arguments: dict[str, Any] = {"trust_remote_code": self.trust_remote_code, "local_files_only": True}
        if self.gguf_file is not None:
            arguments["gguf_file"] = self.gguf_file
        return arguments

    def config(self) -> Any:
        """The checkpoint's PretrainedConfig, whole; for multimodal checkpoints `get_text_config()` is the text model's.

        Raises ConfigError where Transformers does not know the model, or its code would have to run without leave.
        """
        from headframe_worker.engine.model_config import read_config  # noqa: PLC0415  (seconds to import)

        with self._loading("configuration"):
            return read_config(self.directory, self.gguf_file, trust_remote_code=self.trust_remote_code)

    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises ConfigError where there is none that Transformers can load."""
        from transformers import AutoTokenizer  # noqa: PLC0415  (seconds to import; only those who need it wait)

        with self._loading("tokenizer"):
            return AutoTokenizer.from_pretrained(self.directory, **self.loading_arguments())

    @contextmanager
    def _loading(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a checkpoint's files make Transformers raise
            text = " ".join(str(error).split())
            if not self.trust_remote_code and "trust_remote_code" in text:
                raise ConfigError(
                    f"spec.model.source: {self.source} needs code of its own repository to load its {what}; read that code, "
                    f"and set spec.model.trustRemoteCode: true if you trust it",
                    reason="RemoteCodeNotTrusted",
                ) from error
            raise ConfigError(
                f"spec.model.source: {self.source}: its {what} cannot be loaded: {text[:500]}",
                reason="ModelNotLoadable",
            ) from error


def locate_model(
    spec: ModelSpec, s3: S3Spec, *, scratch: Path, weights: bool, observer: StoreObserver = UNOBSERVED
) -> ModelFiles:
    """Find the model and bring what is needed of it into a local directory.

    Without `weights` only configuration and tokenizer are downloaded; the revision is the same either way. Local files are
    used where they lie. A hub id honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. Raises ConfigError where there is no such
    model, TemporaryError where it cannot be reached now.
    """
    path = Path(local_path(spec.source) or spec.source).expanduser()
    if spec.source.startswith("s3://"):
        uri, _, name = spec.source.rpartition("/") if spec.source.endswith(".gguf") else (spec.source, "", None)
        store = open_store(uri, s3, observer=observer)
        return _from_store(spec, store, scratch / "model", gguf_file=name, weights=weights)
    if path.is_dir():
        return _from_store(spec, open_store(str(path), s3), path, gguf_file=None, weights=weights)
    if path.suffix == ".gguf" and path.is_file():
        return _from_store(spec, open_store(str(path.parent), s3), path.parent, gguf_file=path.name, weights=weights)
    if is_hub_id(spec.source):
        return _from_hub(spec, weights=weights)
    raise ConfigError(
        f"spec.model.source: {spec.source}: no such file or directory; name a hub id, a directory, a .gguf file or s3://bucket/prefix",
        reason="ModelNotFound",
    )


def fetch_weights(spec: ModelSpec, s3: S3Spec, files: ModelFiles, pattern: str) -> list[Path]:
    """Bring only the files of weights whose names match a glob beside the others of a located model; where they are, by name."""
    if is_hub_id(spec.source) and not Path(spec.source).expanduser().is_dir():
        _snapshot(spec.model_copy(update={"revision": files.revision}), [pattern])
    elif spec.source.startswith("s3://"):
        store = open_store(spec.source, s3)
        for info in store.list():
            if "/" not in info.key and fnmatchcase(info.key, pattern):
                _bring(store, info, files.directory)
    return sorted(files.directory.glob(pattern))


def _from_hub(spec: ModelSpec, *, weights: bool) -> ModelFiles:
    directory = _snapshot(spec, [f"*{suffix}" for suffix in _DESCRIPTION_SUFFIXES])
    # A hub snapshot lies in a directory that is named by its commit.
    pinned = spec.model_copy(update={"revision": directory.name})
    if weights:
        _snapshot(pinned, ["*.safetensors"])
        if not any(directory.glob("*.safetensors")):
            _snapshot(pinned, ["*.bin"])
    return ModelFiles(directory, None, directory.name, spec.source, spec.trust_remote_code)


def _snapshot(spec: ModelSpec, patterns: list[str]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download  # noqa: PLC0415

    try:
        path = snapshot_download(
            spec.source, revision=spec.revision, allow_patterns=patterns, ignore_patterns=["*/*", "*.onnx", "*.h5"]
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"spec.model.source: {spec.source} is gated: accept its terms on the hub and give a token in HF_TOKEN",
            reason="ModelGated",
        ) from error
    except (errors.RevisionNotFoundError, errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        revision = f" at revision {spec.revision}" if spec.revision else ""
        raise ConfigError(
            f"spec.model.source: {spec.source}{revision}: not on the hub, or not visible with this HF_TOKEN, and no such directory here",
            reason="ModelNotFound",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.CacheNotFound) as error:
        message = f"spec.model.source: {spec.source} is not in the local cache ({constants.HF_HUB_CACHE})"
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"{message}, and HF_HUB_OFFLINE forbids to download it", reason="ModelNotFound"
            ) from error
        raise TemporaryError(f"{message}, and the hub cannot be reached: {error}", reason="HubUnreachable") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise TemporaryError(
            f"spec.model.source: {spec.source} cannot be downloaded: {error}", reason="HubUnreachable"
        ) from error
    return Path(path)


def _from_store(spec: ModelSpec, store: Store, directory: Path, *, gguf_file: str | None, weights: bool) -> ModelFiles:
    """A model that lies in a directory or under an S3 prefix; `directory` is where its files are, or are to be brought."""
    files = {info.key: info for info in store.list(gguf_file or "") if "/" not in info.key}
    if gguf_file is None and _CONFIGURATION not in files:
        gguf_file = _only_gguf(spec.source, sorted(files))
    elif gguf_file is not None and gguf_file not in files:
        raise ConfigError(f"spec.model.source: {spec.source}: no such object", reason="ModelNotFound")
    weight_files = [files[gguf_file]] if gguf_file else _weight_files(list(files.values()))
    if not weight_files:
        raise ConfigError(
            f"spec.model.source: {spec.source} holds {_CONFIGURATION} but no weights (*.safetensors or *.bin)",
            reason="ModelNotFound",
        )
    described = [] if gguf_file else [name for name in files if name.endswith(_DESCRIPTION_SUFFIXES)]
    needed = [*described, *(info.key for info in weight_files if weights or gguf_file)]
    directory.mkdir(parents=True, exist_ok=True)
    for name in needed:
        _bring(store, files[name], directory)
    deciding = [
        name for name in described if name == _CONFIGURATION or (spec.trust_remote_code and name.endswith(".py"))
    ]
    revision = _files_revision(store, deciding, weight_files)
    return ModelFiles(directory, gguf_file, revision, spec.source, spec.trust_remote_code)


def _only_gguf(source: str, names: Sequence[str]) -> str:
    found = [name for name in names if name.endswith(".gguf")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"spec.model.source: {source} holds {len(found)} .gguf files; name one of them: {', '.join(found[:5])}",
            reason="ModelNotFound",
        )
    raise ConfigError(
        f"spec.model.source: {source} holds no {_CONFIGURATION} and no .gguf file: not a model", reason="ModelNotFound"
    )


def _weight_files(files: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """The safetensors files, or where there are none the PyTorch ones, by name."""
    for suffix in (".safetensors", ".bin"):
        found = sorted((info for info in files if info.key.endswith(suffix)), key=lambda info: info.key)
        if found:
            return found
    return []


def _bring(store: Store, info: ObjectInfo, directory: Path) -> None:
    target = directory / info.key
    if target.is_file() and target.stat().st_size == info.size_bytes:
        return
    store.fetch(info.key, directory)


def _files_revision(store: Store, deciding: Sequence[str], weight_files: Sequence[ObjectInfo]) -> str:
    """`sha256:` over the configuration (and the code, where it is run) and over what identifies each file of weights.

    Reading all weights would take minutes, and the header alone is the same for every fine-tune of a model. So each file
    counts with its name, size, header and 16 evenly spaced samples of 4 KiB; one of at most 64 MiB with all its bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(deciding):
        digest.update(json.dumps([name, hashlib.sha256(store.read(name)).hexdigest()]).encode())
    with ThreadPoolExecutor(_PARALLEL_READS) as threads:
        for info, fingerprint in zip(
            weight_files, threads.map(partial(_fingerprint, store), weight_files), strict=True
        ):
            digest.update(json.dumps([info.key, info.size_bytes, fingerprint]).encode())
    return f"sha256:{digest.hexdigest()}"


def _fingerprint(store: Store, info: ObjectInfo) -> str:
    if info.size_bytes <= _READ_WHOLE_BYTES:
        return hashlib.sha256(store.read(info.key)).hexdigest()
    header_bytes = min(info.size_bytes, _header_bytes(store, info))
    digest = hashlib.sha256(store.read_range(info.key, 0, header_bytes))
    rest = info.size_bytes - header_bytes
    for index in range(_SAMPLES_PER_FILE):
        start = header_bytes + index * max(0, rest - _SAMPLE_BYTES) // max(1, _SAMPLES_PER_FILE - 1)
        digest.update(store.read_range(info.key, start, min(_SAMPLE_BYTES, info.size_bytes - start)))
    return digest.hexdigest()


def _header_bytes(store: Store, info: ObjectInfo) -> int:
    """How much of a file describes its tensors: safetensors states it; of the others the start is taken."""
    if PurePosixPath(info.key).suffix != ".safetensors":
        return _GGUF_HEADER_BYTES
    length = int(struct.unpack("<Q", store.read_range(info.key, 0, 8))[0])
    if length > _MAX_HEADER_BYTES:
        raise ConfigError(
            f"spec.model.source: {info.key}: not a safetensors file: its header would have {length} bytes"
        )
    return 8 + length
