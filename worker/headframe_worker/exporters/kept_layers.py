"""Which layers a trainer can use: those that it, and the server which later runs its drafter, take from the same place."""

from __future__ import annotations

import torch
from torch import Tensor

from headframe_api.errors import ConfigError
from headframe_api.plan import StatesLayout
from headframe_worker.exporters.samples import Sample


def need_ascending(states: StatesLayout, trainer: str) -> None:
    """Raise ConfigError for layers out of order, or none.

    SGLang and vLLM put a drafter's layers side by side as the forward reaches them, whatever order its configuration names:
    a drafter trained on another order would be served wrong inputs.
    """
    if not states.layers or states.layers != sorted(states.layers):
        raise _refused(states, f"{trainer} wants layers in ascending order, the order in which they are served")


def need_decoder_layers(states: StatesLayout, trainer: str) -> None:
    """Raise ConfigError unless the layers ascend from 0 or later, and end before the last decoder layer."""
    need_ascending(states, trainer)
    if states.layers[0] < 0:
        raise _refused(states, f"{trainer} takes outputs of decoder layers only, and -1 is the embeddings")
    need_no_last_layer(states, trainer)


def need_no_last_layer(states: StatesLayout, trainer: str) -> None:
    """Raise ConfigError where the last decoder layer is kept among the layers: Transformers gives it after the norm."""
    if states.last_layer in states.layers:
        raise _refused(
            states,
            f"{trainer} evaluates by Transformers' hidden_states, which hold the last decoder layer ({states.last_layer}) after "
            "the final norm, and this dataset before it",
        )


def layers_side_by_side(sample: Sample, count: int, dtype: torch.dtype) -> Tensor:
    """[T, count * H]: the first `count` slots of a token one after the other."""
    return sample.decoded(dtype)[:, :count].flatten(1).contiguous()


def _refused(states: StatesLayout, why: str) -> ConfigError:
    return ConfigError(f"{why}; this dataset keeps spec.states.layers: {states.layers}", reason="NotRepresentable")
