"""The gated feed-forward block: down(silu(gate(x)) * up(x))."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headframe_worker.engine.fusion.operations import Operations
from headframe_worker.engine.fusion.packing import Projection, can_pack, pack, separate
from headframe_worker.engine.pieces import pieces

PACKED, SWIGLU = "packed_gate_up", "swiglu"


@dataclass(frozen=True)
class FusedMLP:
    """The block with one projection for gate and up, and one pass over their output."""

    plain: Any
    projection: Projection
    ops: Operations

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.plain.down_proj(self._activation(x))  # type: ignore[no-any-return]

    def add_to(self, stream: Tensor, x: Tensor) -> Tensor:
        """The block's output added into `stream` by the last matrix product itself; the stream is overwritten and returned."""
        weight = self.plain.down_proj.weight
        rows, sums = x.view(-1, weight.shape[0]), stream.view(-1, weight.shape[0])
        for piece in pieces(len(rows)):
            sums[piece].addmm_(self._activation(rows[piece]), weight.t())
        return stream

    def _activation(self, x: Tensor) -> Tensor:
        both = self.projection(x)
        width = both.shape[-1] // 2
        return self.ops.swiglu(both[..., :width], both[..., width:])  # type: ignore[no-any-return]


def matches(module: nn.Module) -> bool:
    """Whether the module has plain gate, up and down projections of fitting shapes, and nothing else with weights."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not can_pack(parts[:2]) or not can_pack(parts[2:]):
        return False
    gate, up, down = parts
    return (
        gate.out_features == up.out_features == down.in_features  # type: ignore[union-attr]
        and gate.in_features == down.out_features  # type: ignore[union-attr]
        and {id(p) for p in module.parameters()} == {id(p) for part in parts for p in part.parameters()}  # type: ignore[union-attr]
    )


def fusions(module: nn.Module) -> tuple[str, ...]:
    """The names of the fusions this module has a use for."""
    del module
    return (PACKED, SWIGLU)


def build(module: Any, names: Set[str], ops: Operations) -> FusedMLP:
    """The fused forward of a module that `matches`."""
    parts = (module.gate_proj, module.up_proj)
    return FusedMLP(module, pack(parts) if PACKED in names else separate(parts), ops)
