"""The backend `headframe` of speculators: its trainer reads the packed dataset as it lies, on a disk or on S3, without an export.

Importing this module registers it (speculators 0.9.0 has no entry points for backends), before speculators' command line
is built: `python -m headframe_worker.trainers.speculators_train` does both. speculators' loader processes each hold one
transfer; how far they read ahead is its `--num-workers` times `--prefetch-factor`.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hs_connectors.transfer import HiddenStatesBackend, HiddenStatesTransfer
from packaging.version import Version

from headframe_api.errors import ConfigError
from headframe_api.manifests import DatasetManifest
from headframe_api.spec import S3Spec
from headframe_worker.exporters.speculators import need_representable
from headframe_worker.reader import StatesDataset
from headframe_worker.trainers.numbers import speculators_default_layer_ids

BACKEND = "headframe"
_WITHOUT_LAYERS = ("mtp",)
_PLAIN_NORM = ("eagle3", "peagle")
"""Their verifier norm multiplies by the weight, whatever the model does; checked with 0.9.0."""


class HeadframeTransfer(HiddenStatesTransfer):  # type: ignore[misc]
    """Rows of a dataset by their number in tokens/. Pickles without connections, for loader processes that are spawned."""

    def __init__(self, dataset: StatesDataset) -> None:
        self._dataset = dataset

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """hidden_states [T, L + 1, H], the last slot before the final norm, and token_ids [T] int64; None for a row in quarantine."""
        rows = self._dataset.rows
        position = int(np.searchsorted(rows, file_idx))
        if position == len(rows) or rows[position] != file_idx:
            return None
        sample = self._dataset[position]
        if sample.last is None:
            raise ConfigError("the dataset holds no last state")
        states = torch.cat([sample.hidden_states, sample.last.unsqueeze(1)], dim=1)
        return {"hidden_states": states, "token_ids": sample.token_ids}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Nothing is generated: a dataset of Headframe is finished."""
        raise ConfigError(
            f"the backend {BACKEND} generates no states ({sorted(hs_transfer_params)}); pass --on-missing skip"
        )


@HiddenStatesBackend.register(BACKEND)
class HeadframeBackend(HiddenStatesBackend):  # type: ignore[misc]
    """How speculators' command line makes a HeadframeTransfer."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """The backend's own flags of `speculators train`."""
        parser.add_argument(
            "--headframe-dataset",
            help="Output of Headframe: s3://bucket/prefix or a directory. Default: the folder above --data-path.",
        )
        parser.add_argument(
            "--headframe-s3-endpoint", help="URL of an S3-compatible server. Default: as boto3 finds it."
        )
        parser.add_argument("--headframe-s3-region", help="Region of the bucket. Default: as boto3 finds it.")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """None: vLLM is not launched."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> HeadframeTransfer:
        """Open the dataset, and refuse a training that would read its layers or its norm wrongly."""
        uri = args.headframe_dataset or str(Path(data_path).absolute().parent)
        s3 = S3Spec(endpoint=args.headframe_s3_endpoint, region=args.headframe_s3_region)
        dataset = StatesDataset(uri, s3)
        check_training(dataset.manifest, args.speculator_type, args.target_layer_ids)
        return HeadframeTransfer(dataset)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Not for vLLM."""
        raise ConfigError(f"the backend {BACKEND} is for training only ({args}); vLLM cannot write to it")


def check_training(manifest: DatasetManifest, speculator_type: str, target_layer_ids: list[int] | None) -> None:
    """Raise ConfigError where speculators would take the dataset's slots for other layers, or norm them wrongly."""
    need_representable(manifest.states)
    mine = list(manifest.states.layers_from_one)
    theirs = target_layer_ids or speculators_default_layer_ids(manifest.model.num_layers)
    if speculator_type not in _WITHOUT_LAYERS and theirs != mine:
        raise ConfigError(
            f"--target-layer-ids: {'' if target_layer_ids else 'not given, so '}{theirs}, but this dataset's layers are "
            f"{mine} in speculators' numbering; pass --target-layer-ids {' '.join(map(str, mine))}",
            reason="OtherLayers",
        )
    if (
        speculator_type in _PLAIN_NORM
        and manifest.model.norm_gain == "1+weight"
        and Version(version("speculators")) <= Version("0.9.0")
    ):
        raise ConfigError(
            f"{speculator_type} of speculators {version('speculators')} multiplies by w in the verifier's final norm, and "
            f"{manifest.model.norm_type} by 1 + w: it would train on wrong targets; dflash and dspark get it right",
            reason="OtherNorm",
        )
