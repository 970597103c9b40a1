"""The numerical check every fusion must pass on the loaded model before it is used.

Three runs of the same module on the same input: plain in float32 (the reference), plain as loaded, and fused. The fused run may be
at most `RATIO` times as far from the reference as the plain one. The inputs are what the module receives when the model reads random
tokens, so their scale and outliers are the model's own.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headframe_worker.engine.fusion.reference import torch_reference

RATIO = 1.1  # of the plain path's own error
SLACK = 1e-5  # relative L2; float32 models have hardly an error of their own to compare with
_SEQUENCES, _TOKENS = 2, 200  # no multiple of any kernel's block, and longer than the delta rule's chunk


@dataclass(frozen=True)
class Call:
    """The arguments with which a module was called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, module: Callable[..., Any]) -> Any:
        """Make the call again."""
        return module(*self.args, **self.kwargs)

    def in_float32(self) -> "Call":
        """The same call with every floating tensor cast to float32."""
        return Call(
            *tree_map(
                lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, (self.args, self.kwargs)
            )
        )


@dataclass(frozen=True)
class Baseline:
    """One call of a module, what the plain module made of it, and what it makes of it in float32."""

    call: Call
    plain: Tensor
    reference: Tensor

    def reason_against(self, fused: Callable[..., Any]) -> str | None:
        """None when `fused` may stand in for the plain module, else why not."""
        try:
            found = _first(self.call.run(fused))
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises, the plain path is still there
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no message'}"
        if found.shape != self.plain.shape or found.dtype != self.plain.dtype:
            return f"gives {found.dtype} {tuple(found.shape)}, the plain module {self.plain.dtype} {tuple(self.plain.shape)}"
        own, plain = _error(found, self.reference), _error(self.plain, self.reference)
        if own <= RATIO * plain + SLACK:  # false for NaN
            return None
        return f"relative error {own:.2e} against float32, the plain module's is {plain:.2e}"


@dataclass
class Trace:
    """One plain run of a layer: its baseline, those of the modules inside, and the order in which its children were called."""

    layer: Baseline
    output: Any
    inside: dict[str, Baseline] = field(default_factory=dict)
    children: list[tuple[nn.Module, frozenset[str]]] = field(default_factory=list)


def record_calls(stack: nn.Module, modules: Sequence[nn.Module], device: torch.device) -> dict[nn.Module, Call]:
    """The first call each of these modules receives, if any, when the stack reads random tokens: [B, T] without a mask or a cache."""
    calls: dict[nn.Module, Call] = {}

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, Call(args, dict(kwargs)))

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    vocabulary = stack.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(vocabulary, (_SEQUENCES, _TOKENS), generator=generator).to(device)
    try:
        stack(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def run_both(module: nn.Module, call: Call) -> Baseline:
    """Run a plain module once as loaded and once in float32."""
    return Baseline(call, _first(call.run(module)), _first(call.in_float32().run(copy.deepcopy(module).float())))


def trace(layer: nn.Module, call: Call, watched: Mapping[str, nn.Module]) -> Trace:
    """Run the plain layer once as loaded and once in float32, and keep the calls of the `watched` modules inside it."""
    seen: dict[str, Call] = {}
    children: list[tuple[nn.Module, frozenset[str]]] = []

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, args, kwargs: seen.__setitem__(name, Call(args, dict(kwargs)))

    def note(module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        children.append((module, frozenset(kwargs)))

    hooks = [module.register_forward_pre_hook(keep(name), with_kwargs=True) for name, module in watched.items()]
    hooks += [child.register_forward_pre_hook(note, with_kwargs=True) for child in layer.children()]
    try:
        output = call.run(layer)
    finally:
        for hook in hooks:
            hook.remove()
    exact = copy.deepcopy(layer).float()
    with torch_reference(exact):
        whole = Baseline(call, _first(output), _first(call.in_float32().run(exact)))
        inside = {
            name: Baseline(c, _first(c.run(watched[name])), _first(c.in_float32().run(exact.get_submodule(name))))
            for name, c in seen.items()
        }
    return Trace(whole, output, inside, children)


def _error(found: Tensor, reference: Tensor) -> float:
    return float((found.float() - reference).norm() / reference.norm())


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]
