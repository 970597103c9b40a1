"""A few named tensors out of a model's files, without loading, or even downloading, the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headframe_api.errors import ConfigError
from headframe_api.plan import ModelIdentity
from headframe_api.spec import ModelSpec, S3Spec, is_hub_id
from headframe_worker.model_source import ModelFiles, fetch_weights, locate_model

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class ModelAccess:
    """How the model of a plan is reached now."""

    source: str | None = None
    """Where it lies now; None: where the plan says."""
    s3: S3Spec = field(default_factory=S3Spec)
    trust_remote_code: bool = False


class Checkpoint:
    """The files of a plan's model, checked to be the ones that the states came from. Use it in a `with` block."""

    def __init__(self, identity: ModelIdentity, access: ModelAccess) -> None:
        self._scratch = TemporaryDirectory(prefix="headframe-model-", ignore_cleanup_errors=True)
        source = access.source or identity.source
        pinned = identity.revision if is_hub_id(source) and not Path(source).exists() else None
        self._spec = ModelSpec(source=source, revision=pinned, trust_remote_code=access.trust_remote_code, gpus=0)
        self._s3 = access.s3
        try:
            self.files: ModelFiles = locate_model(
                self._spec, access.s3, scratch=Path(self._scratch.name), weights=False
            )
            _check_revision(identity, self.files)
            self.tensor_files = self._tensor_files()
        except BaseException:
            self._scratch.cleanup()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scratch.cleanup()

    def tensor(self, name: str) -> Tensor:
        """One tensor by its name in the checkpoint, on the CPU, in its stored dtype; only its file is brought here."""
        [path] = fetch_weights(self._spec, self._s3, self.files, self.tensor_files[name])
        try:
            if path.suffix != ".safetensors":
                return _torch_file(path)[name].clone()
            with safe_open(path, framework="pt") as opened:
                return cast("Tensor", opened.get_tensor(name)).clone()
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ConfigError(f"{path}: {name} cannot be read: {error}", reason="DamagedCheckpoint") from error

    def _tensor_files(self) -> dict[str, str]:
        """The file of each tensor; empty for GGUF, which has one file and names of its own."""
        if self.files.gguf_file is not None:
            return {}
        for index in _INDEXES:
            path = self.files.directory / index
            if path.is_file():
                return dict(json.loads(path.read_bytes())["weight_map"])
        found: dict[str, str] = {}
        for path in fetch_weights(self._spec, self._s3, self.files, "*.safetensors"):
            with safe_open(path, framework="pt") as opened:
                found.update(dict.fromkeys(opened.keys(), path.name))
        for path in [] if found else fetch_weights(self._spec, self._s3, self.files, "*.bin"):
            found.update(dict.fromkeys(_torch_file(path), path.name))
        return found


def _check_revision(identity: ModelIdentity, files: ModelFiles) -> None:
    if files.revision != identity.revision:
        raise ConfigError(
            f"{files.source} is not the model that the states came from: its revision is {files.revision}, the plan's is "
            f"{identity.revision}; name the right files with --model",
            reason="OtherModel",
        )


def _torch_file(path: Path) -> Mapping[str, Tensor]:
    loaded: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return loaded
