"""The states of one sample by plain Transformers, and nothing of our engine: what `verify --deep` holds the dataset against.

One sample at a time, no padding, no batch, no early stop, Transformers' own modules untouched; hooks only look on. The
stack of decoder layers is the one ModuleList as long as the configuration says. Conventions are those of
headframe_api.layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headframe_api.errors import ConfigError
from headframe_api.plan import Plan
from headframe_worker.engine.gguf_files import gguf_read_once
from headframe_worker.model_source import ModelFiles

_TORCH_DTYPE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class PlainStates:
    """A model that gives the states of a plan's slots, sample by sample."""

    def __init__(self, plan: Plan, files: ModelFiles, *, attention: str, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM, GgufConfig  # noqa: PLC0415  (seconds to import; only --deep needs it)

        arguments: dict[str, Any] = files.loading_arguments()
        if files.gguf_file is not None:
            arguments["quantization_config"] = GgufConfig(dequantize=True)  # the weights that extract computes with
        if attention != "auto":
            arguments["attn_implementation"] = attention
        with gguf_read_once(files.gguf_file):
            model = AutoModelForCausalLM.from_pretrained(
                files.directory, config=files.config(), dtype=_TORCH_DTYPE[plan.model.dtype], **arguments
            )
        self._plan = plan
        self._device = device
        self._decoder = model.base_model.eval().to(device)
        self._layers = _decoder_layers(self._decoder, plan.model.num_layers)
        self._seen: dict[int, torch.Tensor] = {}
        self._layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
        for number, layer in enumerate(self._layers):
            layer.register_forward_hook(lambda _layer, _input, output, number=number: self._keep(number, output))

    @torch.inference_mode()
    def states(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, S, H] in float32 on the CPU, for token ids [T]."""
        self._seen.clear()
        output = self._decoder(input_ids=token_ids[None].to(self._device), use_cache=False)
        slots = [self._seen[layer] for layer in self._plan.states.layers]
        if self._plan.states.last == "preNorm":
            slots.append(self._seen[self._plan.states.last_layer])
        elif self._plan.states.last == "postNorm":
            slots.append(output.last_hidden_state)
        return torch.stack([slot.reshape(-1, slot.shape[-1]).float().cpu() for slot in slots], dim=1)

    def _keep_input(self, _layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._keep(-1, positional[0] if positional else named["hidden_states"])

    def _keep(self, number: int, output: Any) -> None:
        # A copy: some models change the residual stream in place in the next layer.
        self._seen[number] = (output[0] if isinstance(output, tuple) else output).clone()


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(
        f"{type(decoder).__name__}: no list of {count} decoder layers in it; verify --deep cannot recompute this model",
        reason="UnknownModelStructure",
    )
