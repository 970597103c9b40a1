"""What each trainer must be told of a dataset: layers in its own numbering, norm, mask. Printed by `headframe inspect --for`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from headframe_api.errors import ConfigError
from headframe_api.manifests import DatasetManifest

Trainer = Literal["speculators", "specforge", "modelopt", "deepspec", "torch"]
TRAINERS: tuple[Trainer, ...] = get_args(Trainer)


@dataclass(frozen=True)
class TrainerNumbers:
    """One trainer's view of a dataset."""

    trainer: Trainer
    settings: dict[str, str]
    """Flag or configuration key, in the trainer's spelling, to its value."""
    notes: tuple[str, ...]
    """What a flag cannot say."""


def speculators_default_layer_ids(num_layers: int) -> list[int]:
    """What speculators 0.9.0 takes where `--target-layer-ids` is not given (speculators/models/utils.py)."""
    return [2, num_layers // 2, num_layers - 3]


def trainer_numbers(manifest: DatasetManifest, trainer: Trainer) -> TrainerNumbers:
    """The exact numbers for one trainer. Raises ConfigError where it cannot use the dataset at all."""
    states, model = manifest.states, manifest.model
    zero_based = _spaced(states.layers)
    last = f"last state stored: {states.last}; final norm {model.norm_type}, gain {model.norm_gain}, epsilon {model.norm_epsilon}"
    missing = _missing(manifest)
    if trainer == "speculators":
        if states.last != "preNorm":
            raise ConfigError(
                f"speculators wants the last state before the final norm; this dataset's is {states.last}",
                reason="NotRepresentable",
            )
        settings = {
            "--verifier-name-or-path": model.source,
            "--target-layer-ids": _spaced(states.layers_from_one),
            "--on-missing": "skip" if missing else "raise",
        }
        return TrainerNumbers(trainer, settings, (last, "speculators applies the norm itself", *missing))
    if trainer == "specforge":
        settings = {
            "draft config, dflash_config.target_layer_ids": _listed(states.layers),
            "draft config, eagle_config.eagle_aux_hidden_state_layer_ids": _listed(states.layers),
            "headframe export": "--to specforge --strategy eagle3 | dflash | domino | dspark",
        }
        return TrainerNumbers(
            trainer, settings, (last, "SpecForge wants the last state after the norm: the export applies it")
        )
    if trainer == "modelopt":
        settings = {"--aux-layers": zero_based.replace(" ", ","), "headframe export": "--to modelopt"}
        return TrainerNumbers(
            trainer, settings, (last, "the export holds the last state after the norm, as its HF script does")
        )
    if trainer == "deepspec":
        settings = {
            "model.target_layer_ids": _listed(states.layers),
            "model.target_model_name_or_path": model.source,
            "headframe export": "--to deepspec",
        }
        return TrainerNumbers(trainer, settings, (last, "the export holds the last state after the norm"))
    settings = {
        "layers (0-based outputs of decoder layers)": zero_based,
        "hidden_states[k] of Hugging Face": _spaced(states.hugging_face_indexes),
    }
    return TrainerNumbers(trainer, settings, (last, *missing))


def _missing(manifest: DatasetManifest) -> tuple[str, ...]:
    refused = manifest.rows_in - manifest.samples
    return (
        (f"{refused:,} of {manifest.rows_in:,} input rows have no states (quarantine, failed shards)",)
        if refused
        else ()
    )


def _spaced(numbers: Sequence[int | None]) -> str:
    return " ".join("none" if number is None else str(number) for number in numbers)


def _listed(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"
