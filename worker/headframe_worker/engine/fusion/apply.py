"""Find what can be fused in a loaded decoder stack, check each piece on the model itself, and put it in place."""

from collections.abc import Hashable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from headframe_worker.engine.fusion import attention, delta_net, layer, mlp, norms
from headframe_worker.engine.fusion.install import install, is_installed, remove
from headframe_worker.engine.fusion.operations import operations
from headframe_worker.engine.fusion.reference import torch_reference
from headframe_worker.engine.fusion.verify import Baseline, Call, record_calls, run_both, trace

FUSIONS: Mapping[str, str] = {
    attention.PACKED: "one matrix product for queries, keys and values",
    attention.ROTARY: "query and key norms and rotary positions in one pass",
    attention.GATE: "attention output times the sigmoid of its gate in one pass",
    mlp.PACKED: "one matrix product for gate and up",
    mlp.SWIGLU: "silu(gate) * up in one pass",
    delta_net.DELTA_RULE: "fla's chunked gated delta rule with its gates inside",
    delta_net.PACKED: "one matrix product for all inputs of a gated delta net",
    delta_net.CONVOLUTION: "depthwise convolution, SiLU, split and l2norm in one pass",
    delta_net.GATED_NORM: "the gated delta net's output norm and gate in one pass",
    norms.NORM: "residual addition and RMSNorm in one pass",
    layer.MATMUL: "the last matrix product of a layer adds into the residual stream",
}
_KINDS: tuple[ModuleType, ...] = (attention, delta_net, mlp)


@dataclass(frozen=True)
class FusionReport:
    """What was fused, and why the rest was not; both by the names in `FUSIONS`.

    A name can stand in both: applied on most layers, refused on those that the reason names.
    """

    applied: tuple[str, ...]
    skipped: dict[str, str]


@dataclass
class _Progress:
    wanted: frozenset[str]
    device: torch.device
    applied: set[str] = field(default_factory=set)
    refused: dict[str, list[str]] = field(default_factory=dict)
    chosen: dict[Hashable, frozenset[str]] = field(default_factory=dict)

    def refuse(self, name: str, where: str, reason: str) -> None:
        self.refused.setdefault(name, []).append(f"{where}: {reason}")

    def report(self) -> FusionReport:
        skipped = {}
        for name in FUSIONS:
            if name not in self.wanted:
                skipped[name] = "not asked for"
            elif reasons := self.refused.get(name):
                more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
                skipped[name] = reasons[0] + more
            elif name not in self.applied:
                skipped[name] = "no module of this structure"
        return FusionReport(tuple(name for name in FUSIONS if name in self.applied), skipped)


def apply_fusions(stack: nn.Module, *, device: torch.device, only: Set[str] | None = None) -> FusionReport:
    """Replace the slow parts of a loaded stack in place, each after it has passed its check on the loaded weights.

    `stack` is the inner Transformers model, in eval mode, all on its device(s): its decoder layers are the ModuleList whose length
    is `config.num_hidden_layers`. `device` is where token ids go. `only` names the fusions to try (keys of `FUSIONS`), None all.

    The fused forward serves calls without cache, packing or autograd; others take the plain one. Hooks on layers keep working, and a
    layer's output is still the residual stream after it. Merged weights replace the separate ones, which become views of them.
    On the CPU the fused modules compute with plain torch twins of the kernels: the same wiring, no gain.

    Raises ValueError for an unknown name in `only`.
    """
    unknown = set(only or ()) - set(FUSIONS)
    if unknown:
        raise ValueError(f"unknown fusions {sorted(unknown)}: choose from {sorted(FUSIONS)}")
    layers = _decoder_layers(stack)
    progress = _Progress(frozenset(FUSIONS if only is None else only), device)
    on_cpu = torch_reference(stack) if device.type == "cpu" else nullcontext()
    with torch.inference_mode(), on_cpu:
        after = [child for child in stack.children() if norms.read_norm(child) is not None]
        calls = record_calls(stack, [*layers, *after], device)
        for index, module in enumerate(layers):
            if module in calls and not is_installed(module):
                _fuse_layer(module, calls[module], f"layer {index}", progress)
        for module in after:
            if module in calls and not is_installed(module):
                measured = run_both(module, calls[module])
                _fuse(norms, module, norms.read_norm(module), measured, "norm after the layers", progress)
    return progress.report()


def remove_fusions(stack: nn.Module) -> None:
    """Give every module of the stack its plain forward back; merged weights stay merged, which changes no result's meaning."""
    for module in stack.modules():
        remove(module)


def _decoder_layers(stack: nn.Module) -> nn.ModuleList:
    count = stack.config.num_hidden_layers  # type: ignore[union-attr]
    found = [module for module in stack.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not found:
        raise ValueError(f"{type(stack).__name__} has no list of {count} modules: it is no decoder stack")
    return found[0]  # the outermost: a list of experts may happen to be as long


def _fuse_layer(module: nn.Module, call: Call, where: str, progress: _Progress) -> None:
    targets = {name: (kind, inner) for name, inner in module.named_modules() for kind in _KINDS if kind.matches(inner)}
    traced = trace(module, call, {name: inner for name, (_, inner) in targets.items()})
    for name, (kind, inner) in targets.items():
        if name in traced.inside:
            _fuse(kind, inner, inner, traced.inside[name], f"{where} {name}", progress)
    structure = layer.read_structure(module, traced.children, traced.output)
    if isinstance(structure, str):
        for name in (norms.NORM, layer.MATMUL):
            if name in progress.wanted:
                progress.refuse(name, where, structure)
        return
    _fuse(layer, module, structure, traced.layer, where, progress)


def _fuse(
    kind: ModuleType, module: nn.Module, subject: Any, measured: Baseline, where: str, progress: _Progress
) -> None:
    """Choose the fusions of this kind on the first module of its shape, then check and install the choice on each."""
    candidates = [name for name in kind.fusions(subject) if name in progress.wanted]
    key = (kind.__name__, tuple(candidates), *((name, p.shape, p.dtype) for name, p in module.named_parameters()))
    if key not in progress.chosen:
        progress.chosen[key] = _choose(kind, subject, candidates, measured, where, progress)
    names = progress.chosen[key]
    if not names:
        return
    fused = kind.build(subject, names, operations(names, progress.device))
    reason = measured.reason_against(fused)
    if reason is None:
        install(module, fused)
        progress.applied.update(names)
    else:
        for name in names:
            progress.refuse(name, where, reason)


def _choose(
    kind: ModuleType, subject: Any, candidates: Sequence[str], measured: Baseline, where: str, progress: _Progress
) -> frozenset[str]:
    """The candidates that pass, each tried on top of those before it."""
    chosen: frozenset[str] = frozenset()
    if kind is delta_net and delta_net.DELTA_RULE not in candidates:
        for name in candidates:
            progress.refuse(name, where, f"needs {delta_net.DELTA_RULE}")
        return chosen
    for name in candidates:
        if kind is delta_net and name != delta_net.DELTA_RULE and delta_net.DELTA_RULE not in chosen:
            progress.refuse(name, where, f"needs {delta_net.DELTA_RULE}")
            continue
        trial = chosen | {name}
        reason = measured.reason_against(kind.build(subject, trial, operations(trial, progress.device)))
        if reason is None:
            chosen = trial
        else:
            progress.refuse(name, where, reason)
    return chosen
