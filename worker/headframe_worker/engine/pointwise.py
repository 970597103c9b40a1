"""Long samples piece by piece through the modules that compute each token by itself: norms, feed-forward blocks, experts.

They are found by what they do, whatever they are called: a module that takes one tensor of all tokens, gives one of all tokens,
and gives each token the same in another order of them, and in two pieces. Their intermediate results are several times as large as the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headframe_worker.engine import pieces
from headframe_worker.engine.structure import DecoderStack

_TOKENS, _SEAM = 61, 23
"""A length that is no other dimension of a model, and a place that is no multiple of any kernel's block."""
_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Relative L2 of a token's output: products of other shapes and experts' sums in another order round differently."""


def compute_in_pieces(stack: DecoderStack) -> tuple[str, ...]:
    """Let each such module of the layers compute more than PIECE_TOKENS tokens in pieces; their names."""
    calls: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(_keep(calls, name), with_kwargs=True)
        for name, module in stack.layers.named_modules()
        if type(module) is not nn.Linear  # has nothing but its output
    ]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(stack.vocab_size, (1, _TOKENS), generator=generator).to(stack.device)
    found: list[str] = []
    with torch.inference_mode():
        try:
            stack.forward(ids)
        finally:
            for hook in hooks:
                hook.remove()
        for name, module in stack.layers.named_modules():
            inside_another = any(name.startswith(outer + ".") for outer in found)
            if name in calls and not inside_another and _is_pointwise(module, calls[name]):
                found.append(name)
    for name in found:
        module = stack.layers.get_submodule(name)
        module.__dict__["forward"] = _in_pieces(module.forward)
    return tuple(found)


def _keep(calls: dict[str, Tensor], name: str) -> Callable[..., None]:
    def keep(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if len(args) == 1 and not options and _has_all_tokens(args[0]) and _has_all_tokens(output):
            calls[name] = args[0].clone()

    return keep


def _has_all_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == (1, _TOKENS)


def _is_pointwise(module: nn.Module, x: Tensor) -> bool:
    with torch.cuda.device_of(x):
        whole = module(x.clone()).float()
        turned = module(x.flip(1)).flip(1).float()
        parted = torch.cat([module(x[:, :_SEAM].clone()), module(x[:, _SEAM:].clone())], dim=1).float()
    allowed = _LIMIT[x.dtype] * whole.flatten(2).norm(dim=-1)
    return all(bool(((other - whole).flatten(2).norm(dim=-1) <= allowed).all()) for other in (turned, parted))


def _in_pieces(forward: Callable[..., Any]) -> Callable[..., Any]:
    def piece_by_piece(*args: Any, **options: Any) -> Any:
        if len(args) != 1 or options or args[0].ndim < 3 or args[0].shape[0] * args[0].shape[1] <= pieces.PIECE_TOKENS:
            return forward(*args, **options)
        x = args[0].flatten(0, 1)
        out: Tensor | None = None
        for piece in pieces.pieces(len(x)):
            computed = forward(x[None, piece])[0]
            if out is None:
                out = computed.new_empty((len(x), *computed.shape[1:]))
            out[piece] = computed
        assert out is not None, "there is at least one piece"  # noqa: S101
        return out.unflatten(0, args[0].shape[:2])

    return piece_by_piece
