"""The gated delta net of Qwen3.5 and Qwen3-Next: one projection, one convolution, fla's chunked delta rule, one gated norm."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headframe_worker.engine import pieces
from headframe_worker.engine.fusion.operations import Operations
from headframe_worker.engine.fusion.packing import Projection, can_pack, pack, separate
from headframe_worker.engine.fusion.twins import Heads, heads_at

PACKED, CONVOLUTION, DELTA_RULE, GATED_NORM = "packed_delta_net", "convolution", "delta_rule", "gated_norm"
_SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_GROUPED = ("in_proj_qkvz", "in_proj_ba")
_CHUNK = 64  # tokens that the delta rule's kernels take at once: pieces of whole chunks round as one piece does
_NUMBERS = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")


@dataclass(frozen=True)
class Columns:
    """Where the projections' output has the heads of q, k and v, the gate's heads z, and the columns of b and a (int32 [HV])."""

    qkv: Heads
    z: Heads
    b: Tensor
    a: Tensor


@dataclass(frozen=True)
class FusedDeltaNet:
    """The whole mixer, from the normed stream to its output projection."""

    plain: Any
    projection: Projection
    columns: Columns
    ops: Operations
    taps: Tensor

    def __call__(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """[B, T, hidden] to [B, T, hidden], long samples in pieces. A 2D padding mask zeroes the padded inputs, as the plain module does."""
        del kwargs
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[:, :, None].to(hidden_states.dtype)
        batch, length, _ = hidden_states.shape
        if batch * length <= pieces.PIECE_TOKENS:
            return self._tokens(hidden_states)[0]
        out = torch.empty_like(hidden_states)
        size = max(1, pieces.PIECE_TOKENS // batch // _CHUNK) * _CHUNK
        state = None
        for start in range(0, length, size):
            reach = min(start, self.taps.shape[0] - 1)
            stop = min(start + size, length)
            x = hidden_states[:, start - reach : stop]
            out[:, start:stop], state = self._tokens(x, reach=reach, state=state, more=stop < length)
        return out

    def _tokens(
        self, x: Tensor, *, reach: int = 0, state: Tensor | None = None, more: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The mixer's output for x [B, T, hidden] without its first `reach` tokens, which only the convolution needs.

        `state` is that of the delta rule before the first token of the output; returned is that after the last, if `more` come.
        """
        m = self.plain
        packed = self.projection(x)
        heads = (m.num_k_heads, m.head_k_dim, m.num_v_heads, m.head_v_dim)
        q, k, v = (t[:, reach:] for t in self.ops.convolution(packed, self.columns.qkv, self.taps, *heads))
        packed = packed[:, reach:]
        decay, step = self.ops.gates(packed, self.columns.a, self.columns.b, m.A_log, m.dt_bias)
        out, state = self.ops.delta_rule(q, k, v, decay, step, state, more=more)
        out = self.ops.gated_norm(out, packed, self.columns.z, m.norm.weight, m.norm.variance_epsilon)
        return m.out_proj(out.flatten(2)), state


def matches(module: nn.Module) -> bool:
    """Whether the module has the parts of a gated delta net, with its input projections separate or grouped by key head."""
    parts = _parts(module)
    convolution, norm, out = (getattr(module, name, None) for name in ("conv1d", "norm", "out_proj"))
    own = [getattr(module, name, None) for name in ("A_log", "dt_bias")]
    if (
        parts is None
        or not isinstance(convolution, nn.Conv1d)
        or not isinstance(norm, nn.Module)
        or not isinstance(out, nn.Linear)
    ):
        return False
    if not all(isinstance(getattr(module, name, None), int) for name in _NUMBERS) or not all(
        isinstance(p, Tensor) for p in own
    ):
        return False
    known = {id(p) for m in (*parts, convolution, norm, out) for p in m.parameters()} | {id(p) for p in own}
    return (
        convolution.bias is None
        and convolution.groups == convolution.in_channels == convolution.out_channels
        and isinstance(getattr(norm, "variance_epsilon", None), float)
        and {id(p) for p in module.parameters()} == known
    )


def fusions(module: nn.Module) -> tuple[str, ...]:
    """The names of the fusions this module has a use for; the delta rule comes first, without it the others are no gain."""
    del module
    return (DELTA_RULE, PACKED, CONVOLUTION, GATED_NORM)


def build(module: Any, names: Set[str], ops: Operations) -> FusedDeltaNet:
    """The fused forward of a module that `matches`."""
    parts = _parts(module)
    assert parts is not None, "a module that matches has its parts"  # noqa: S101
    projection = pack(parts) if PACKED in names else separate(parts)
    taps = module.conv1d.weight.detach().squeeze(1).t().contiguous()
    return FusedDeltaNet(module, projection, _columns(module, projection), ops, taps)


def _parts(module: nn.Module) -> list[nn.Linear] | None:
    for names in (_SEPARATE, _GROUPED):
        parts = [getattr(module, name, None) for name in names]
        if can_pack(parts):
            return [part for part in parts if isinstance(part, nn.Linear)]
    return None


def _columns(module: Any, projection: Projection) -> Columns:
    key_heads, value_heads, key_dim, value_dim = (getattr(module, name) for name in _NUMBERS)
    starts = projection.starts()
    if len(starts) == len(_SEPARATE):
        qk = [head * key_dim for head in range(2 * key_heads)]
        v = [2 * key_heads * key_dim + head * value_dim for head in range(value_heads)]
        z = [starts[1] + head * value_dim for head in range(value_heads)]
        b, a = ([start + head for head in range(value_heads)] for start in starts[2:])
    else:  # for each key head: its query, its key, its values, their gates; and its b, its a
        each = value_heads // key_heads
        group = 2 * key_dim + 2 * each * value_dim
        groups = [head * group for head in range(key_heads)]
        qk = [*groups, *(start + key_dim for start in groups)]
        v = [start + 2 * key_dim + i * value_dim for start in groups for i in range(each)]
        z = [start + each * value_dim for start in v]
        b = [starts[1] + head * 2 * each + i for head in range(key_heads) for i in range(each)]
        a = [column + each for column in b]
    device = module.conv1d.weight.device
    gates = (torch.tensor(columns, dtype=torch.int32, device=device) for columns in (b, a))
    return Columns(heads_at(qk + v, device), heads_at(z, device), *gates)
