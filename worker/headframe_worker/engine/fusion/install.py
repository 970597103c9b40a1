"""How a fused forward takes a module's place: an attribute of the instance, nothing else.

The module keeps its class, its place in the tree, its parameters and its hooks, and taking the attribute away gives the plain
module back. A call that a fused forward does not cover (a cache, packed sequences, autograd) goes to the plain forward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_MARK = "_headframe_fused"
_PLAIN_ONLY = ("cache", "cache_params", "past_key_values", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def install(module: nn.Module, fused: Callable[..., Any]) -> None:
    """Let `module.forward` be `fused` wherever autograd is off and no cache or packing is asked for."""
    slot = _slot(module)
    plain = getattr(module, slot)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or any(kwargs.get(name) is not None for name in _PLAIN_ONLY):
            return plain(*args, **kwargs)
        return fused(*args, **kwargs)

    module.__dict__[_MARK] = (fused, module.__dict__.get(slot))
    module.__dict__[slot] = forward


def remove(module: nn.Module) -> None:
    """Undo `install`; nothing happens to a module without a fusion."""
    if _MARK not in module.__dict__:
        return
    slot = _slot(module)
    _, before = module.__dict__.pop(_MARK)
    if before is None:
        del module.__dict__[slot]
    else:
        module.__dict__[slot] = before


def installed(module: nn.Module) -> Any | None:
    """The fused forward of this module, or None."""
    return module.__dict__.get(_MARK, (None,))[0]


def is_installed(module: nn.Module) -> bool:
    """Whether this module has a fused forward."""
    return _MARK in module.__dict__


def _slot(module: nn.Module) -> str:
    """accelerate wraps `forward` and calls `_old_forward` between its moves across devices."""
    return "_old_forward" if "_hf_hook" in module.__dict__ else "forward"
