"""Which layers a preset means, and each layer in both numberings of the field: the trap that this project exists to avoid.

Headframe's layer k is the OUTPUT of decoder layer k, 0-based, on the residual stream, before any final norm; -1 is the
embeddings. Hugging Face's ``hidden_states[k + 1]`` is the same tensor, except for its last entry, which holds the
post-norm state. speculators and vLLM number layers as Hugging Face's tuple does (k + 1); z-lab's DFlash, SpecForge and
DeepSpec as Headframe does (k).
"""

from __future__ import annotations

from collections.abc import Sequence

from headframe_api.errors import ConfigError

EMBEDDINGS = -1
DFLASH_LAYERS = 5


def preset_layers(preset: str, num_layers: int) -> tuple[int, ...]:
    """0-based layers of a preset for a model of ``num_layers`` decoder layers.

    dflash: ``round(1 + i * (n - 4) / 4)`` for i in 0..4, with Python's round (z-lab/dflash, SpecForge, ModelOpt).
    eagle3: ``[1, n // 2 - 1, n - 4]`` (SpecForge, TorchSpec; speculators' ``[2, n // 2, n - 3]`` names the same tensors).

    Raises ConfigError where a small model would make layers coincide or leave the model.
    """
    if preset == "none":
        return ()
    if preset == "dflash":
        span = DFLASH_LAYERS - 1
        layers = tuple(round(1 + i * (num_layers - 4) / span) for i in range(DFLASH_LAYERS))
    elif preset == "eagle3":
        layers = (1, num_layers // 2 - 1, num_layers - 4)
    else:
        raise ConfigError(f"spec.states.preset: {preset!r} is not a preset; use dflash, eagle3 or none")
    if (
        len(set(layers)) != len(layers)
        or list(layers) != sorted(layers)
        or not 0 <= layers[0] <= layers[-1] < num_layers
    ):
        raise ConfigError(
            f"spec.states.preset: {preset} on a model of {num_layers} layers gives layers {list(layers)}, which are not "
            f"{len(layers)} different layers in order; name the layers in spec.states.layers"
        )
    return layers


def resolve_layers(preset: str, layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """The layers to keep, in the order they are stored: explicit ones win over the preset.

    Raises ConfigError that names every layer outside -1..n-1.
    """
    if layers is None:
        return preset_layers(preset, num_layers)
    outside = [layer for layer in layers if not EMBEDDINGS <= layer < num_layers]
    if outside:
        raise ConfigError(
            f"spec.states.layers: {outside} not in a model of {num_layers} layers; allowed are 0 to {num_layers - 1} "
            f"(the output of that decoder layer) and -1 (the embeddings)"
        )
    return tuple(layers)


def hugging_face_indexes(layers: Sequence[int], *, with_embeddings: bool = True) -> tuple[int | None, ...]:
    """The same layers as indexes into Hugging Face's ``hidden_states``: k + 1.

    A model that leaves the embeddings out of them (Mamba2) has layer k at k, and no index for the embeddings.
    """
    if with_embeddings:
        return tuple(layer + 1 for layer in layers)
    return tuple(None if layer == EMBEDDINGS else layer for layer in layers)
