"""Every fused operation in plain torch: what it means, on any device.

Each function computes in float32 and rounds once, to the dtype of its first argument, as the kernels do. They are the reference of
the kernels' tests, and they stand in for a kernel that was not asked for or did not pass its check.

Shapes: B sequences of T tokens, H heads of D; `packed` is the output [B, T, P] of a merged projection, and `Heads` says at which of
its columns each head begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

L2_EPS = 1e-6  # the epsilon of Transformers' and fla's l2norm of queries and keys


@dataclass(frozen=True)
class Heads:
    """The first column of each head, int32 [H] on the device, and a power of two that divides all of them: kernels load that wide."""

    starts: Tensor
    align: int


def heads_at(starts: Sequence[int], device: torch.device) -> Heads:
    """Heads that begin at these columns."""
    align = next(power for power in (16, 8, 4, 2, 1) if all(start % power == 0 for start in starts))
    return Heads(torch.tensor(starts, dtype=torch.int32, device=device), align)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension of x [..., H], times the float32 gain [H]."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


def add_rms_norm(stream: Tensor, update: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The new residual stream `stream + update`, and its RMSNorm."""
    total = (stream.float() + update.float()).to(stream.dtype)
    return total, rms_norm(total, gain, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; both may be column slices of one merged projection."""
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def rotary(x: Tensor, gain: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Optional per-head RMSNorm of x [B, T, H, D], then rotation of its first R columns by cos, sin [B or 1, T, R].

    Halves are paired (column i with i + R/2) and turn by one angle, so cos and sin repeat after R/2 columns, as in GPT-NeoX and
    Llama; the columns from R on pass through.
    """
    y = x.float()
    if gain is not None:
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * gain
    half = cos.shape[-1] // 2
    first, second, kept = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    c, s = cos[..., :half].float().unsqueeze(2), sin[..., :half].float().unsqueeze(2)
    return torch.cat((first * c - second * s, second * c + first * s, kept), dim=-1).to(x.dtype)


def attention_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [B, T, H, D]; the gate may be a strided slice."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def convolution(
    packed: Tensor, heads: Heads, taps: Tensor, key_heads: int, key_dim: int, value_heads: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal depthwise convolution and SiLU over the query, key and value heads, then l2norm of queries and keys.

    `heads` are those of query, key and value in this order, taps [W, C] has their channels in the same order.
    Returns q, k [B, T, key_heads, key_dim] and v [B, T, value_heads, value_dim], contiguous.
    """
    dims = [key_dim] * (2 * key_heads) + [value_dim] * value_heads
    mixed = torch.cat(
        [packed[..., c : c + d] for c, d in zip(heads.starts.tolist(), dims, strict=True)], dim=-1
    ).float()
    width, channels = taps.shape
    padded = functional.pad(mixed.transpose(1, 2), (width - 1, 0))
    y = functional.silu(functional.conv1d(padded, taps.float().t().unsqueeze(1), groups=channels)).transpose(1, 2)
    q, k, v = y.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], dim=-1)
    q, k = (_l2norm(t.unflatten(-1, (key_heads, key_dim))) for t in (q, k))
    return (
        q.to(packed.dtype),
        k.to(packed.dtype),
        v.unflatten(-1, (value_heads, value_dim)).to(packed.dtype).contiguous(),
    )


def gates(packed: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The log decay and the step of each value head, float32 [B, T, HV]; a and b name their columns.

    -exp(a_log) * softplus(a + dt_bias) and sigmoid(b), after Yang et al., Gated Delta Networks, 2024.
    """
    decay = -a_log.float().exp() * functional.softplus(packed.index_select(-1, a).float() + dt_bias.float())
    return decay, torch.sigmoid(packed.index_select(-1, b).float())


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor, state: Tensor | None = None, *, more: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, one token after the other, from a log decay and a step [B, T, HV]; q and k are normalised already.

    `state` [B, HV, DK, DV] float32 is what tokens before these left, None is zero; the second result is what these leave, for `more` tokens.
    """
    repeats = v.shape[2] // k.shape[2]
    query = q.float().repeat_interleave(repeats, dim=2) * q.shape[-1] ** -0.5
    key, value = k.float().repeat_interleave(repeats, dim=2), v.float()
    kept, step = decay.float().exp(), step.float()
    if state is None:
        state = value.new_zeros(*value.shape[:1], value.shape[2], key.shape[-1], value.shape[-1])
    out = torch.empty_like(value)
    for t in range(value.shape[1]):
        state = state * kept[:, t, :, None, None]
        predicted = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        delta = (value[:, t] - predicted) * step[:, t, :, None]
        state = state + key[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        out[:, t] = torch.einsum("bhkv,bhk->bhv", state, query[:, t])
    return out.to(v.dtype), state if more else None


def gated_norm(x: Tensor, packed: Tensor, heads: Heads, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [B, T, H, D] per head, times the gain [D], times silu of its gate heads in `packed`."""
    z = torch.stack([packed[..., c : c + x.shape[-1]] for c in heads.starts.tolist()], dim=2).float()
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * gain.float()
    return (y * functional.silu(z)).to(x.dtype)


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)
