"""The decoder layer around mixer and feed-forward block: h + mixer(norm(h)), then that plus mlp(norm(that)).

The layer's output stays the residual stream after it, a tensor of its own, so hooks see what they see on the plain layer. That is
why nothing is fused across layers: what is left to gain there is one pass over the stream, and the last matrix product of the
feed-forward block takes it instead, by adding into the stream that the middle of the layer made.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headframe_worker.engine.fusion.install import installed
from headframe_worker.engine.fusion.mlp import FusedMLP
from headframe_worker.engine.fusion.norms import NORM, Norm, read_norm
from headframe_worker.engine.fusion.operations import Operations

MATMUL = "residual_matmul"


@dataclass(frozen=True)
class Structure:
    """The direct children of a layer in the order in which its plain forward calls them, and what it hands to the mixer."""

    mixer: nn.Module
    feed_forward: nn.Module
    input_norm: Norm
    middle_norm: Norm
    mixer_arguments: frozenset[str]
    returns_tuple: bool


@dataclass(frozen=True)
class FusedLayer:
    """The layer with each residual addition and the norm that follows it in one pass."""

    structure: Structure
    ops: Operations
    accumulator: FusedMLP | None

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """The residual stream [B, T, hidden] before the layer to the one after it."""
        s = self.structure
        arguments = {name: kwargs.get(name) for name in s.mixer_arguments}
        normed = self.ops.rms_norm(hidden_states, s.input_norm.gain, s.input_norm.eps)
        update = _first(s.mixer(hidden_states=normed, **arguments))
        stream, normed = self.ops.add_rms_norm(hidden_states, update, s.middle_norm.gain, s.middle_norm.eps)
        stream = self._feed_forward(stream, normed)
        return (stream,) if s.returns_tuple else stream

    def _feed_forward(self, stream: Tensor, normed: Tensor) -> Tensor:
        if self.accumulator is not None:
            return self.accumulator.add_to(stream, normed)
        return stream + _first(self.structure.feed_forward(normed))


def read_structure(layer: nn.Module, called: Sequence[tuple[nn.Module, Set[str]]], output: object) -> Structure | str:
    """The layer's structure from a trace of its plain forward, or the reason why it is another.

    `called` lists the direct children in call order, each with the names of its keyword arguments.
    """
    del layer
    if len(called) != 4:
        return f"the layer calls {len(called)} children, not norm, mixer, norm, feed-forward"
    (first, _), (mixer, arguments), (second, _), (feed_forward, _) = called
    norms = read_norm(first), read_norm(second)
    if norms[0] is None or norms[1] is None:
        return "the layer's norms are not RMSNorm"
    if "hidden_states" not in arguments:
        return "the layer's mixer does not take hidden_states by name"
    return Structure(
        mixer, feed_forward, norms[0], norms[1], frozenset(arguments - {"hidden_states"}), isinstance(output, tuple)
    )


def fusions(structure: Structure) -> tuple[str, ...]:
    """The names of the fusions this layer has a use for."""
    fused = installed(structure.feed_forward)
    accumulates = (
        isinstance(fused, FusedMLP) and type(fused.plain.down_proj) is nn.Linear and fused.plain.down_proj.bias is None
    )
    return (NORM, MATMUL) if accumulates else (NORM,)


def build(structure: Structure, names: Set[str], ops: Operations) -> FusedLayer:
    """The fused forward of a layer of this structure."""
    return FusedLayer(structure, ops, installed(structure.feed_forward) if MATMUL in names else None)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]
