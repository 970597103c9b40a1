"""The final norm and the language head of a model, as its own classes compute them.

Trainers that want the last state after the norm get it from the model's own norm module, so that no gain convention
(w, 1 + w, with bias) has to be known here.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from headframe_api.errors import ConfigError
from headframe_api.plan import ModelIdentity
from headframe_worker.model_ends.checkpoint import Checkpoint, ModelAccess
from headframe_worker.prepare.model_structure import build_on_meta, find_final_norm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OLD_HEADS = ("lm_head", "embed_out")
"""Spellings of older checkpoints, which Transformers renames as it loads them."""


@dataclass(frozen=True)
class Head:
    """The language head: logits are the normed state times `weight` transposed, plus `bias`, scaled and capped."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    """[V]"""
    scale: float
    """Granite and Cohere multiply their logits by a constant."""
    cap: float | None
    """Gemma 2 squeezes its logits into -cap to cap by tanh."""

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        """[T, V] float32 of normed states [T, H]."""
        logits = nn.functional.linear(normed, self.weight, self.bias).float() * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@dataclass(frozen=True)
class ModelEnds:
    """What turns the last decoder layer's output into logits."""

    norm: nn.Module
    """States [..., H] before the norm in, after it out, in the model's own dtype."""
    head: Head | None
    """None where only the norm was asked for."""
    dtype: torch.dtype

    @torch.inference_mode()
    def normed(self, last: Tensor) -> Tensor:
        """The state after the final norm, rounded as the model itself rounds it; [..., H] in the model's dtype."""
        return cast("Tensor", self.norm(last.to(self.dtype)))


def load_ends(identity: ModelIdentity, access: ModelAccess, *, head: bool) -> ModelEnds:
    """The final norm, and with `head` the language head, of the model that a plan names.

    Raises ConfigError where the model is another one, or the weights cannot be told.
    """
    dtype = cast("torch.dtype", getattr(torch, identity.dtype))
    with Checkpoint(identity, access) as checkpoint:
        config = checkpoint.files.config().get_text_config(decoder=True)
        bare, names = _built(checkpoint, config, head=head)
        norm = copy.deepcopy(bare).to_empty(device="cpu")
        if checkpoint.files.gguf_file is not None:
            weights, matrix, bias = _gguf_ends(checkpoint, identity, head=head)
        else:
            prefix = _stack_prefix(checkpoint, names, identity)
            own = {key: f"{prefix}{names.norm}.{key}" for key in norm.state_dict()}
            weights = {key: checkpoint.tensor(name) for key, name in own.items() if name in checkpoint.tensor_files}
            matrix, bias = None, None
            if head:
                matrix, bias = _head_weights(checkpoint, identity, names, prefix, tied=config.tie_word_embeddings)
    missing, _ = norm.load_state_dict(weights, strict=False)
    if missing:
        raise _unknown(identity, f"lacks {', '.join(missing)} of its final norm")
    whole = None
    if matrix is not None:
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        cap = getattr(config, "final_logit_softcapping", None)
        whole = Head(matrix.to(dtype), None if bias is None else bias.to(dtype), scale, cap)
    return ModelEnds(norm.to(dtype).requires_grad_(False).eval(), whole, dtype)


@dataclass(frozen=True)
class _Names:
    """Of modules, in the model as Transformers builds it without its head."""

    layers: str
    norm: str
    embedding: str
    head: str
    """In the model with its head."""


def _built(checkpoint: Checkpoint, config: Any, *, head: bool) -> tuple[nn.Module, _Names]:
    """(the final norm on the meta device, the names to look for in the checkpoint)."""
    model = cast("PreTrainedModel", build_on_meta(config, checkpoint.files))
    found = find_final_norm(model, config.num_hidden_layers, config.hidden_size)
    names = _Names(
        found.layers_name,
        found.name,
        _name_of(model, model.get_input_embeddings()),
        _head_name(checkpoint, config) if head else "",
    )
    return found.norm, names


def _head_name(checkpoint: Checkpoint, config: Any) -> str:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (seconds to import)

    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        model = build(config, trust_remote_code=checkpoint.files.trust_remote_code)
    return _name_of(model, model.get_output_embeddings())


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is wanted)


def _stack_prefix(checkpoint: Checkpoint, names: _Names, identity: ModelIdentity) -> str:
    """What the checkpoint's names put before those of the module that owns the layers, such as `model.language_model.`."""
    last = re.compile(rf"(.*?){re.escape(names.layers)}\.{identity.num_layers - 1}\.")
    prefixes = {match[1] for name in checkpoint.tensor_files if (match := last.match(name))}
    found = [prefix for prefix in prefixes if f"{prefix}{names.embedding}.weight" in checkpoint.tensor_files]
    if len(found) != 1:
        raise _unknown(identity, f"has {len(found)} stacks of {identity.num_layers} layers with an embedding, not one")
    return found[0]


def _head_weights(
    checkpoint: Checkpoint, identity: ModelIdentity, names: _Names, prefix: str, *, tied: bool
) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of the head; the embedding's weight where the checkpoint has no own, because they are tied."""
    spellings = tuple(f".{name}.weight" for name in (names.head, *_OLD_HEADS))
    own = [name for name in checkpoint.tensor_files if f".{name}".endswith(spellings)]
    if own:
        name = min(own, key=len)
        bias = f"{name.removesuffix('weight')}bias"
        return checkpoint.tensor(name), checkpoint.tensor(bias) if bias in checkpoint.tensor_files else None
    if tied:
        return checkpoint.tensor(f"{prefix}{names.embedding}.weight"), None
    raise _unknown(identity, f"has no {names.head}.weight, and its configuration ties it to no embedding")


def _gguf_ends(
    checkpoint: Checkpoint, identity: ModelIdentity, *, head: bool
) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
    """(the norm's weights, the head's weight, its bias).

    llama.cpp's converters store the norm's gain itself, also where the model's own weights are the gain less one.
    """
    from gguf import GGUFReader, dequantize  # noqa: PLC0415

    path = checkpoint.files.directory / str(checkpoint.files.gguf_file)
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}

    def read(*names: str) -> Tensor | None:
        found = next((stored[name] for name in names if name in stored), None)
        return None if found is None else torch.from_numpy(dequantize(found.data, found.tensor_type).copy())

    norm = {key: tensor for key in ("weight", "bias") if (tensor := read(f"output_norm.{key}")) is not None}
    if "weight" in norm and identity.norm_gain == "1+weight":
        norm["weight"] -= 1
    matrix = read("output.weight", "token_embd.weight") if head else None
    if head and matrix is None:
        raise _unknown(identity, "holds neither output.weight nor token_embd.weight")
    return norm, matrix, read("output.bias") if head else None


def _unknown(identity: ModelIdentity, what: str) -> ConfigError:
    return ConfigError(f"{identity.source}: the checkpoint {what}", reason="UnsupportedModel")
