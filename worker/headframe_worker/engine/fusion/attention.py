"""Softmax attention with rotary positions: merged projections around the attention kernel that Transformers was asked to use.

Covers query and key norms per head (Qwen3), biases on the projections (Qwen2), an output gate that the query projection carries
(Qwen3.5, Qwen3-Next), rotation of a part of each head, grouped keys and values, and whatever mask the stack hands in.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headframe_worker.engine.fusion.norms import Norm, read_norm
from headframe_worker.engine.fusion.operations import Operations
from headframe_worker.engine.fusion.packing import Projection, can_pack, pack, separate

PACKED, ROTARY, GATE = "packed_qkv", "rotary", "attention_gate"


@dataclass(frozen=True)
class FusedAttention:
    """The attention block; `kernel` is Transformers' own interface to sdpa or flash attention."""

    plain: Any
    projection: Projection
    ops: Operations
    kernel: Callable[..., tuple[Tensor, Any]]
    head_dim: int
    gated: bool
    query_norm: Norm | None
    key_norm: Norm | None
    sliding_window: int | None

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[B, T, hidden] to [B, T, hidden]; a pair, as Transformers' attention modules return."""
        dim = self.head_dim
        starts = self.projection.starts()
        packed = self.projection(hidden_states)
        query, key, value = (
            packed[..., start : start + part.out_features].unflatten(-1, (-1, dim))
            for start, part in zip(starts, self.projection.parts, strict=True)
        )
        gate = None
        if self.gated:
            query, gate = query[..., 0::2, :], query[..., 1::2, :]
        query, key = (
            self._turn(query, self.query_norm, position_embeddings),
            self._turn(key, self.key_norm, position_embeddings),
        )
        out, _ = self.kernel(
            self.plain,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attention_mask,
            dropout=0.0,
            scaling=self.plain.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        if gate is not None:
            out = self.ops.attention_gate(out, gate)
        return self.plain.o_proj(out.flatten(2)), None

    def _turn(self, x: Tensor, norm: Norm | None, positions: tuple[Tensor, Tensor]) -> Tensor:
        gain, eps = (None, 0.0) if norm is None else (norm.gain, norm.eps)
        return self.ops.rotary(x, gain, eps, *positions)  # type: ignore[no-any-return]


def matches(module: nn.Module) -> bool:
    """Whether the module's projections, head norms and attention implementation are of the kind described above."""
    parts = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    out, dim = getattr(module, "o_proj", None), getattr(module, "head_dim", None)
    if not can_pack(parts) or not isinstance(out, nn.Linear) or not isinstance(dim, int):
        return False
    query, key, value = (part.out_features for part in parts if isinstance(part, nn.Linear))
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    known = [m for m in (*parts, out, *norms) if m is not None]
    return (
        query in (out.in_features, 2 * out.in_features)
        and key == value
        and out.in_features % dim == key % dim == 0
        and _kernel(module) is not None
        and (norms == [None, None] or all(n is not None and _head_norm(n, dim) is not None for n in norms))
        and {id(p) for p in module.parameters()} == {id(p) for m in known for p in m.parameters()}
    )


def fusions(module: Any) -> tuple[str, ...]:
    """The names of the fusions this module has a use for."""
    return (PACKED, ROTARY, GATE) if _gated(module) else (PACKED, ROTARY)


def build(module: Any, names: Set[str], ops: Operations) -> FusedAttention:
    """The fused forward of a module that `matches`."""
    parts = (module.q_proj, module.k_proj, module.v_proj)
    kernel = _kernel(module)
    assert kernel is not None, "a module that matches has a kernel"  # noqa: S101
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if n is None else _head_norm(n, module.head_dim) for n in norms)
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    projection = pack(parts) if PACKED in names else separate(parts)
    return FusedAttention(
        module, projection, ops, kernel, module.head_dim, _gated(module), query_norm, key_norm, window
    )


def _gated(module: Any) -> bool:
    return bool(module.q_proj.out_features == 2 * module.o_proj.in_features)


def _kernel(module: Any) -> Callable[..., Any] | None:
    """Eager attention is each modeling file's own and has no entry here."""
    found: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(getattr(module.config, "_attn_implementation", None))
    return found


def _head_norm(module: nn.Module, dim: int) -> Norm | None:
    norm = read_norm(module)
    return norm if norm is not None and norm.gain.shape == (dim,) else None
