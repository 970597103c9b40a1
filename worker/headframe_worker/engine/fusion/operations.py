"""The choice between an operation's kernel and its plain twin, one by one."""

import dataclasses
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch

from headframe_worker.engine.fusion import twins


@dataclass(frozen=True)
class Operations:
    """The functions that fused modules call; `twins` documents each."""

    rms_norm: Callable[..., Any] = twins.rms_norm
    add_rms_norm: Callable[..., Any] = twins.add_rms_norm
    swiglu: Callable[..., Any] = twins.swiglu
    rotary: Callable[..., Any] = twins.rotary
    attention_gate: Callable[..., Any] = twins.attention_gate
    convolution: Callable[..., Any] = twins.convolution
    gates: Callable[..., Any] = twins.gates
    delta_rule: Callable[..., Any] = twins.delta_rule
    gated_norm: Callable[..., Any] = twins.gated_norm


# Which operations each fusion's name switches.
SWITCHES = {
    "residual_norm": ("rms_norm", "add_rms_norm"),
    "swiglu": ("swiglu",),
    "rotary": ("rotary",),
    "attention_gate": ("attention_gate",),
    "convolution": ("convolution",),
    "delta_rule": ("gates", "delta_rule"),
    "gated_norm": ("gated_norm",),
}


def operations(names: Set[str], device: torch.device) -> Operations:
    """Kernels for the fusions in `names` on a CUDA device; twins for all others, and for everything elsewhere."""
    if device.type != "cuda":
        return Operations()
    from headframe_worker.engine.fusion import kernels  # noqa: PLC0415  # Triton exists for GPUs only

    wanted = {op: getattr(kernels, op) for name in names for op in SWITCHES.get(name, ())}
    return dataclasses.replace(Operations(), **wanted)
