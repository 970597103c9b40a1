"""What each trainer must be told of a dataset: layers in its own numbering, norm, mask. Printed by `headframe inspect --for`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from headframe_api.errors import ConfigError
from headframe_api.manifests import DatasetManifest

Trainer = Literal["speculators", "specforge", "modelopt", "deepspec", "torch"]
TRAINERS: tuple[Trainer, ...] = get_args(Trainer)
SPECFORGE_EAGLE3_LAYERS = 3
"""specforge/algorithms/model_providers.py: no more, no fewer."""


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
        eagle3 = len(states.layers) == SPECFORGE_EAGLE3_LAYERS
        settings = {"draft config, dflash_config.target_layer_ids": _listed(states.layers)}
        if eagle3:
            settings["draft config, eagle_config.eagle_aux_hidden_state_layer_ids"] = _listed(states.layers)
        settings |= {
            "run config, data.max_length": f"{manifest.lengths.maximum} or more",
            "headframe export": f"--to specforge --strategy {'eagle3 | ' if eagle3 else ''}dflash | domino | dspark",
        }
        return TrainerNumbers(
            trainer, settings, (last, "SpecForge wants the last state after the norm: the export applies it")
        )
    if trainer == "modelopt":
        return _modelopt(manifest, last)
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


def _modelopt(manifest: DatasetManifest, last: str) -> TrainerNumbers:
    layers, drafter = manifest.states.layers, "dflash.dflash_architecture_config.num_hidden_layers"
    dflash = _modelopt_dflash_layers(manifest.model.num_layers, len(layers))
    fits = dflash == layers
    settings = {
        "--aux-layers": ",".join(map(str, layers)),
        "eagle.eagle_architecture_config.eagle_aux_hidden_state_layer_ids": _listed(layers),
        **({drafter: str(len(layers))} if fits else {}),
        "training.training_seq_len": f"{manifest.lengths.maximum} or more",
        "headframe export": "--to modelopt",
    }
    notes = (last, "the export holds the last state after the norm, as its HF script does")
    other = f"for its EAGLE-3 only: its DFlash reads layers {_listed(dflash)}, and no setting changes that"
    return TrainerNumbers("modelopt", settings, notes if fits else (*notes, other))


def _modelopt_dflash_layers(num_layers: int, draft_layers: int) -> list[int]:
    """What ModelOpt's DFlash reads, whatever was dumped (modelopt/torch/speculative/plugins/hf_dflash.py: modify)."""
    if draft_layers <= 1:
        return [num_layers // 2] * draft_layers
    first, last = min(1, num_layers - 1), max(min(1, num_layers - 1), num_layers - 3)
    return [round(first + i * (last - first) / (draft_layers - 1)) for i in range(draft_layers)]


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
