"""Finding the decoder stack inside any Transformers model by its shape alone, so that a new architecture needs no entry in a table.

In every decoder-only model the layers are the one ModuleList whose length is ``num_hidden_layers`` of the text
configuration, and the innermost PreTrainedModel around it turns token ids into the residual stream. All else (language
head, vision tower, projector, extra prediction layers) is dead weight here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headframe_api.errors import ConfigError
from headframe_worker.engine.placement import Placement


@dataclass(frozen=True)
class DecoderStack:
    """A loaded model without its head: token ids [B, L] in, the residual stream [B, L, H] through `layers`."""

    model: PreTrainedModel
    layers: nn.ModuleList
    num_layers: int
    """Decoder layers of the checkpoint; `layers` holds fewer where the last ones are not needed."""
    placement: Placement | None = None
    """Where the layers lie; None where all is on one device."""

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.model.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: every token id is below it."""
        return int(cast("nn.Embedding", self.model.get_input_embeddings()).weight.shape[0])

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return cast("nn.Embedding", self.model.get_input_embeddings()).weight.device

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        """Run the stack without a cache and without a mask; returns Transformers' output object."""
        return self.model(input_ids=input_ids, use_cache=False, **options)


def find_stack(model: PreTrainedModel) -> DecoderStack:
    """The decoder stack in a model. Raises ConfigError where there is none, or more than one that fits."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or config.is_encoder_decoder:
        raise ConfigError(
            f"spec.model.source: {name} is an encoder-decoder; only decoder-only models have one residual stream",
            reason="UnsupportedModel",
        )
    count = config.num_hidden_layers
    found = [
        DecoderStack(owner, layers, count)
        for owner, layers in _outermost_lists(model, count)
        if isinstance(owner.get_input_embeddings(), nn.Embedding)
    ]
    if len(found) != 1:
        raise ConfigError(
            f"spec.model.source: {name} has {len(found)} lists of {count} layers behind a token embedding, not one: "
            "its decoder stack cannot be told",
            reason="UnsupportedModel",
        )
    return found[0]


def prune(model: PreTrainedModel, *, last_layer: int | None = None) -> DecoderStack:
    """Replace what the states do not depend on by nothing, before any weight is loaded; the stack that is left.

    Gone are the head, a vision tower, and the layers after `last_layer` (0-based, the last that is needed; None keeps all).
    """
    stack = find_stack(model)
    inside = set(stack.model.modules())
    around = {parent for parent in model.modules() if stack.model in parent.modules()} - inside
    for parent in around:
        for name, child in parent.named_children():
            if child not in inside and child not in around:
                setattr(parent, name, nn.Identity())
    # Whatever was tied to the embedding is gone with the head.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.all_tied_weights_keys = {}
    if last_layer is not None:
        del stack.layers[last_layer + 1 :]
        stack.model.config.num_hidden_layers = len(stack.layers)
    return stack


def _outermost_lists(model: nn.Module, count: int) -> Iterator[tuple[PreTrainedModel, nn.ModuleList]]:
    """(innermost PreTrainedModel around it, list) for each ModuleList of `count` modules that lies in no other such list."""

    def walk(module: nn.Module, owner: PreTrainedModel | None) -> Iterator[tuple[PreTrainedModel, nn.ModuleList]]:
        if isinstance(module, nn.ModuleList) and len(module) == count and owner is not None:
            yield owner, module
            return
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child in module.children():
            yield from walk(child, owner)

    return walk(model, None)
