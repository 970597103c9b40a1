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
from transformers.modeling_outputs import BaseModelOutputWithPast

from headframe_api.errors import ConfigError
from headframe_api.plan import ModelIdentity
from headframe_worker.engine.gguf_files import gguf_read_once
from headframe_worker.model_ends.checkpoint import Checkpoint, ModelAccess
from headframe_worker.prepare.model_structure import build_on_meta, find_final_norm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OLD_HEADS = ("lm_head", "embed_out")
"""Spellings of older checkpoints, which Transformers renames as it loads them."""


class Head:
    """The language head, by the forward of the model's own class: whatever it scales, caps or adds is done (Gemma, Granite, Cohere, ...)."""

    def __init__(self, model: PreTrainedModel, identity: ModelIdentity) -> None:
        self._model = model
        self._vocabulary = int(model.config.vocab_size)
        self._source = identity.source

    @property
    def weight(self) -> Tensor:
        """[V, H]"""
        return _head_of(self._model).get_parameter("weight")

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        """[T, V] float32 of normed states [T, H]. Raises ConfigError where the class gives something else."""
        answer = _StackAnswer(last_hidden_state=normed.unsqueeze(0))
        stacks = [module for module in _stacks(self._model) if module is not self._model]
        for stack in stacks:
            stack.forward = lambda *_args, **_options: answer
        tokens = torch.zeros((1, len(normed)), dtype=torch.long)
        found = self._model(input_ids=tokens, use_cache=False).logits
        if found.shape != (1, len(normed), self._vocabulary):
            raise ConfigError(
                f"{self._source}: {type(self._model).__name__} gives logits of shape {tuple(found.shape)}, not one row of "
                f"{self._vocabulary} a token",
                reason="UnsupportedModel",
            )
        return cast("Tensor", found[0].float())


class _StackAnswer(BaseModelOutputWithPast):
    """What a decoder stack returns; what a class wants beside the states (router logits, caches) is None."""

    def __getattr__(self, _name: str) -> None:
        return None


def _stacks(model: PreTrainedModel) -> list[PreTrainedModel]:
    from transformers import PreTrainedModel  # noqa: PLC0415

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


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
    with Checkpoint(identity, access) as checkpoint, gguf_read_once(checkpoint.files.gguf_file):
        config = checkpoint.files.config().get_text_config(decoder=True)
        causal = _with_head(checkpoint, config, identity) if head else None
        bare, names = _built(checkpoint, config, causal)
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
    if causal is not None and matrix is not None:
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(matrix.to(dtype), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        causal.set_submodule(names.head, linear)
        whole = Head(causal, identity)
    return ModelEnds(norm.to(dtype).requires_grad_(False).eval(), whole, dtype)


@dataclass(frozen=True)
class _Names:
    """Of modules, in the model as Transformers builds it without its head."""

    layers: str
    norm: str
    embedding: str
    head: str
    """In the model with its head."""


def _built(checkpoint: Checkpoint, config: Any, causal: PreTrainedModel | None) -> tuple[nn.Module, _Names]:
    """(the final norm on the meta device, the names to look for in the checkpoint)."""
    model = cast("PreTrainedModel", build_on_meta(config, checkpoint.files))
    found = find_final_norm(model, config.num_hidden_layers, config.hidden_size)
    names = _Names(
        found.layers_name,
        found.name,
        _name_of(model, model.get_input_embeddings()),
        "" if causal is None else _name_of(causal, _head_of(causal)),
    )
    return found.norm, names


def _with_head(checkpoint: Checkpoint, config: Any, identity: ModelIdentity) -> PreTrainedModel:
    """The model with its head, without weights."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (seconds to import)

    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        model = cast("PreTrainedModel", build(config, trust_remote_code=checkpoint.files.trust_remote_code))
    if not isinstance(_head_of(model), nn.Linear):
        raise ConfigError(
            f"{identity.source}: {type(model).__name__} has no single language head", reason="UnsupportedModel"
        )
    model.train(False)
    return model


def _head_of(model: Any) -> nn.Module:
    return cast("nn.Module", model.get_output_embeddings())


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
    import gguf  # noqa: PLC0415

    path = checkpoint.files.directory / str(checkpoint.files.gguf_file)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def read(*names: str) -> Tensor | None:
        found = next((stored[name] for name in names if name in stored), None)
        return None if found is None else torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy())

    norm = {key: tensor for key in ("weight", "bias") if (tensor := read(f"output_norm.{key}")) is not None}
    if "weight" in norm and identity.norm_gain == "1+weight":
        norm["weight"] -= 1
    matrix = read("output.weight", "token_embd.weight") if head else None
    if head and matrix is None:
        raise _unknown(identity, "holds neither output.weight nor token_embd.weight")
    return norm, matrix, read("output.bias") if head else None


def _unknown(identity: ModelIdentity, what: str) -> ConfigError:
    return ConfigError(f"{identity.source}: the checkpoint {what}", reason="UnsupportedModel")
