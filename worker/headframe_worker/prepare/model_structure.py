"""What can be known of a model without its weights: sizes, final norm, and how much work a token is."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from headframe_api.errors import ConfigError
from headframe_api.plan import ModelIdentity
from headframe_api.spec import ModelSpec
from headframe_worker.engine.placement import expert_share, is_expert, layer_costs, place, refuse_shared_weights
from headframe_worker.model_source import ModelFiles

NormGain = Literal["weight", "1+weight", "none"]


@dataclass(frozen=True)
class ModelSize:
    """Of the decoder stack with its embeddings."""

    parameters: int
    active_parameters: int
    """Those that one token goes through: of a mixture's experts only the chosen ones."""


@dataclass(frozen=True)
class FinalNorm:
    """The norm after the decoder layers, in a model without weights."""

    layers_name: str
    """Of the list of decoder layers, as the model names its modules."""
    name: str
    norm: nn.Module


def describe_model(files: ModelFiles, spec: ModelSpec) -> tuple[ModelIdentity, ModelSize]:
    """Build the model on the meta device and read off what the plan states of it.

    Of a multimodal checkpoint the text model counts. Raises ConfigError where it is no decoder-only text model, and where
    it cannot be spread over as many GPUs as the spec asks for.
    """
    whole = files.config()
    config = whole.get_text_config()
    if getattr(whole, "is_encoder_decoder", False):
        raise ConfigError(
            f"spec.model.source: {spec.source} is an encoder-decoder ({whole.model_type}); only decoder-only models are read",
            reason="ModelNotSupported",
        )
    model = build_on_meta(config, files)
    layers = int(config.num_hidden_layers)
    final = find_final_norm(model, layers, int(config.hidden_size))
    norm, size = final.norm, _size(model, config)
    if spec.gpus > 1:
        _check_spread(model.get_submodule(final.layers_name), config, spec.gpus, type(model).__name__)
    identity = ModelIdentity(
        source=spec.source,
        revision=files.revision,
        architecture=_architecture(config, whole, model),
        model_type=config.model_type,
        num_layers=layers,
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        context_length=_context_length(config),
        dtype=spec.dtype,
        norm_type=type(norm).__name__,
        norm_gain=_norm_gain(norm, int(config.hidden_size)),
        norm_epsilon=_norm_epsilon(norm),
        embeddings_in_hidden_states=_gives_embeddings(model, final.layers_name),
    )
    return identity, size


def build_on_meta(config: Any, files: ModelFiles) -> nn.Module:
    """The text model without its head and its weights. Raises ConfigError where its class refuses the configuration."""
    from transformers import AutoModel  # noqa: PLC0415

    try:
        with torch.device("meta"):
            build: Any = AutoModel.from_config
            model: nn.Module = build(config, trust_remote_code=files.trust_remote_code)
    except Exception as error:  # whatever a model's class makes of its configuration
        raise ConfigError(
            f"spec.model.source: {files.source}: no model can be built of its configuration: {' '.join(str(error).split())[:500]}",
            reason="ModelNotLoadable",
        ) from error
    return model


def _architecture(config: Any, whole: Any, model: nn.Module) -> str:
    """As the checkpoint states it; GGUF and inner text configurations state none, then Transformers' class for the type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    stated = config.architectures or whole.architectures
    return str(stated[0] if stated else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, type(model).__name__))


def _context_length(config: Any) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def find_final_norm(model: nn.Module, layers: int, hidden_size: int) -> FinalNorm:
    """The norm beside the stack of decoder layers: of the stack's siblings the last one that is shaped like a norm over H."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            parent = name.rpartition(".")[0]
            children = list(model.get_submodule(parent).named_children())
            norms = [child for child in children if _is_norm(child[1], hidden_size)]
            if norms:
                return FinalNorm(name, f"{parent}.{norms[-1][0]}".lstrip("."), norms[-1][1])
    raise ConfigError(
        f"spec.model.source: no final norm beside a stack of {layers} decoder layers in {type(model).__name__}: "
        "this is not a decoder-only model that Headframe knows how to read",
        reason="ModelNotSupported",
    )


def _is_norm(module: nn.Module, hidden_size: int) -> bool:
    if "norm" not in type(module).__name__.lower() or any(True for _ in module.children()):
        return False
    return all(parameter.shape == (hidden_size,) for parameter in module.parameters())


def _norm_gain(norm: nn.Module, hidden_size: int) -> NormGain:
    """Run the norm's own code with a weight of zeros: what is left tells how it uses its weight."""
    if not any(True for _ in norm.parameters()):
        return "none"
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.zero_()
        try:
            output = probe(torch.linspace(-1.0, 1.0, hidden_size).reshape(1, 1, -1))
        except (RuntimeError, ValueError, AssertionError):
            # A fused kernel without a CPU path. Those of fla, apex and Liger multiply by the weight itself.
            return "weight"
    return "1+weight" if bool(output.abs().max() > 1e-3) else "weight"


def _norm_epsilon(norm: nn.Module) -> float | None:
    values = [value for name, value in vars(norm).items() if "eps" in name and isinstance(value, float)]
    return values[0] if values else None


def _gives_embeddings(model: nn.Module, layers_name: str) -> bool:
    """Run one layer without weights, and see whether Transformers' `hidden_states` begin with its output."""
    from headframe_worker.engine.fusion import nothing_packed, torch_reference  # noqa: PLC0415

    stack: Any = model.get_submodule(layers_name.rpartition(".")[0])
    layers: Any = model.get_submodule(layers_name)
    del layers[1:]
    stack.config.num_hidden_layers = 1
    outputs: list[Any] = []
    hook = layers[0].register_forward_hook(lambda _module, _args, output: outputs.append(output))
    ids = torch.zeros((1, 2), dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), torch_reference(model), nothing_packed():
            states = stack(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    except Exception:  # noqa: BLE001  # code that cannot run without weights; nearly every model gives them
        return True
    finally:
        hook.remove()
    first = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    return not states or states[0] is not first


def _size(model: nn.Module, config: Any) -> ModelSize:
    total = experts = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        experts += parameter.numel() if is_expert(name) else 0
    return ModelSize(total, int(total - experts * (1 - expert_share(config))))


def _check_spread(layers: nn.Module, config: Any, gpus: int, model_name: str) -> None:
    """Before a GPU is taken: whether the layers can be spread at all."""
    assert isinstance(layers, nn.ModuleList)  # noqa: S101  # find_final_norm looked for one
    placement = place(layer_costs(layers, config), [torch.device("meta")] * gpus)
    refuse_shared_weights(layers, placement, model_name)
