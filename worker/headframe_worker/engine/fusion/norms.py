"""Recognising an RMSNorm by what it computes."""

import copy
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headframe_worker.engine.fusion import twins
from headframe_worker.engine.fusion.operations import Operations

NORM = "residual_norm"


@dataclass(frozen=True)
class Norm:
    """RMSNorm as y * gain: the gain [width] in float32, whether the model stores it as w or as w - 1."""

    gain: Tensor
    eps: float


@dataclass(frozen=True)
class FusedNorm:
    """An RMSNorm on its own, in one pass."""

    norm: Norm
    ops: Operations

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return self.ops.rms_norm(hidden_states, self.norm.gain, self.norm.eps)  # type: ignore[no-any-return]


def read_norm(module: nn.Module) -> Norm | None:
    """The gain and epsilon of a module that is an RMSNorm over its last dimension, else None.

    Llama multiplies by w, Qwen3.5 and Gemma by 1 + w: both are tried against what the module computes.
    """
    parameters = list(module.parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if len(parameters) != 1 or parameters[0].dim() != 1 or not isinstance(eps, float) or parameters[0].is_meta:
        return None
    weight = parameters[0].detach().float()
    x = torch.randn(8, weight.shape[0], generator=torch.Generator("cpu").manual_seed(0)).to(weight.device)
    with torch.inference_mode():
        try:
            found = copy.deepcopy(module).float()(x)
        except (TypeError, RuntimeError):  # called with more than one input, or not a norm at all
            return None
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return None
    for gain in (weight, 1.0 + weight):
        wanted = twins.rms_norm(x, gain, eps)
        if float((found - wanted).norm()) <= 1e-5 * float(wanted.norm()):
            return Norm(gain, eps)
    return None


def fusions(norm: Norm) -> tuple[str, ...]:
    """The names of the fusions a norm on its own has a use for."""
    del norm
    return (NORM,)


def build(norm: Norm, names: Set[str], ops: Operations) -> FusedNorm:
    """The fused forward of a module that is this norm."""
    del names
    return FusedNorm(norm, ops)
