"""The fused operations as Triton kernels; `twins` holds what each one means.

All are bound by memory: each reads its inputs once, straight from the columns of a merged projection, and writes its output once.
Libraries have most of them for contiguous tensors only, where the copies out of a merged projection cost more than the operation.
Blocks are fixed, not autotuned: nothing here gains from it, and a pod starts sooner.
"""

# ruff: noqa: N803  # Triton writes compile-time constants in capitals
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from headframe_worker.engine.fusion.chunk_sums import any_batch_size
from headframe_worker.engine.fusion.twins import L2_EPS, Heads

_ROWS = 16  # heads a program takes at once in the per-head kernels
_TOKENS = 32  # tokens a program takes at once in the convolution


@triton.jit
def _rms_norm_kernel(x, update, gain, total, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    y = tl.load(x + start + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(update + start + cols, mask=mask, other=0.0).to(tl.float32)
        stored = y.to(total.dtype.element_ty)
        tl.store(total + start + cols, stored, mask=mask)
        y = stored.to(tl.float32)  # the norm sees the stream as stored
    scale = tl.rsqrt(tl.sum(y * y, axis=0) / WIDTH + eps)
    y = y * scale * tl.load(gain + cols, mask=mask, other=0.0)
    tl.store(out + start + cols, y.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    with _device_of(x):
        _rms_norm_kernel[(x.numel() // width,)](
            x, x, gain, out, out, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width), ADD=False, num_warps=8
        )
    return out


def add_rms_norm(stream: Tensor, update: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stream, update = stream.contiguous(), update.contiguous()
    total, out = torch.empty_like(stream), torch.empty_like(stream)
    width = stream.shape[-1]
    with _device_of(stream):
        _rms_norm_kernel[(stream.numel() // width,)](
            stream,
            update,
            gain,
            total,
            out,
            eps,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            ADD=True,
            num_warps=8,
        )
    return total, out


@triton.jit
def _swiglu_kernel(gate, up, out, gate_stride, up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    g = tl.load(gate + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + cols, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=mask)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = _rows(gate), _rows(up)
    width = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block = min(2048, triton.next_power_of_2(width))
    with _device_of(gate):
        _swiglu_kernel[(out.numel() // width, triton.cdiv(width, block))](
            gate, up, out, gate.stride(-2), up.stride(-2), WIDTH=width, BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def _rotary_kernel(
    x, gain, cos, sin, out, eps, rows, length, batch_stride, token_stride, head_stride, cos_batch_stride, cos_token_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    batch, position = token // length, token % length
    alive = (row < rows)[:, None]
    cols = tl.arange(0, HALF_BLOCK)[None, :]
    rest = 2 * HALF + tl.arange(0, TAIL_BLOCK)[None, :]
    turned, kept = alive & (cols < HALF), alive & (rest < DIM)
    base = (x + batch * batch_stride + position * token_stride + head * head_stride)[:, None]
    target = out + row[:, None] * DIM
    first = tl.load(base + cols, mask=turned, other=0.0).to(tl.float32)
    second = tl.load(base + HALF + cols, mask=turned, other=0.0).to(tl.float32)
    if 2 * HALF < DIM:
        tail = tl.load(base + rest, mask=kept, other=0.0).to(tl.float32)
    if NORM:
        total = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if 2 * HALF < DIM:
            total += tl.sum(tail * tail, axis=1)
        scale = tl.rsqrt(total / DIM + eps)[:, None]
        first = first * scale * tl.load(gain + cols, mask=cols < HALF, other=0.0)
        second = second * scale * tl.load(gain + HALF + cols, mask=cols < HALF, other=0.0)
        if 2 * HALF < DIM:
            tail = tail * scale * tl.load(gain + rest, mask=rest < DIM, other=0.0)
    angle = (batch * cos_batch_stride + position * cos_token_stride)[:, None] + cols
    c = tl.load(cos + angle, mask=turned, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    tl.store(target + cols, (first * c - second * s).to(out.dtype.element_ty), mask=turned)
    tl.store(target + HALF + cols, (second * c + first * s).to(out.dtype.element_ty), mask=turned)
    if 2 * HALF < DIM:
        tl.store(target + rest, tail.to(out.dtype.element_ty), mask=kept)


def rotary(x: Tensor, gain: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, heads, dim = x.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, half = batch * length * heads, cos.shape[-1] // 2
    with _device_of(x):
        _rotary_kernel[(triton.cdiv(rows, _ROWS),)](
            x, x if gain is None else gain, cos, sin, out, eps, rows, length, x.stride(0), x.stride(1), x.stride(2),
            cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
            HEADS=heads, DIM=dim, HALF=half, HALF_BLOCK=triton.next_power_of_2(half),
            TAIL_BLOCK=triton.next_power_of_2(max(1, dim - 2 * half)), ROWS=_ROWS, NORM=gain is not None, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _attention_gate_kernel(
    x, gate, out, rows, length, batch_stride, token_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (cols < DIM)[None, :]
    token, head = row // HEADS, row % HEADS
    base = gate + (token // length) * batch_stride + (token % length) * token_stride + head * head_stride
    g = tl.load(base[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    place = row[:, None] * DIM + cols[None, :]
    y = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * tl.sigmoid(g)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


def attention_gate(x: Tensor, gate: Tensor) -> Tensor:
    x = x.contiguous()
    batch, length, heads, dim = x.shape
    out = torch.empty_like(x)
    rows = batch * length * heads
    with _device_of(x):
        _attention_gate_kernel[(triton.cdiv(rows, _ROWS),)](
            x, gate, out, rows, length, gate.stride(0), gate.stride(1), gate.stride(2),
            HEADS=heads, DIM=dim, BLOCK=triton.next_power_of_2(dim), ROWS=_ROWS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _convolution_kernel(
    packed, columns, taps, q, k, v, length, blocks, batch_stride, token_stride, l2_eps,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % (2 * KEY_HEADS + VALUE_HEADS)
    tile = tl.program_id(0) // (2 * KEY_HEADS + VALUE_HEADS)
    batch, position = (tile // blocks).to(tl.int64), (tile % blocks) * TOKENS + tl.arange(0, TOKENS)
    is_key = head < 2 * KEY_HEADS
    # Without these promises every load would be one element wide: Triton sees neither the columns nor which width is meant.
    dim = KEY_DIM if KEY_DIM == VALUE_DIM else tl.where(is_key, KEY_DIM, VALUE_DIM)
    start = tl.multiple_of(tl.load(columns + head), ALIGN)
    channel = tl.where(is_key, head * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM)
    cols = tl.arange(0, BLOCK)
    inside = cols < dim
    base = packed + batch * batch_stride + start
    y = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        at = position + tap - (TAPS - 1)
        seen = ((at >= 0) & (at < length))[:, None] & inside[None, :]
        x = tl.load(base + at[:, None].to(tl.int64) * token_stride + cols[None, :], mask=seen, other=0.0).to(tl.float32)
        y += x * tl.load(taps + tap * CHANNELS + channel + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = y * tl.sigmoid(y)
    mask = (position < length)[:, None] & inside[None, :]
    token = batch * length + position
    if is_key:
        y = y * tl.rsqrt(tl.sum(y * y, axis=1) + l2_eps)[:, None]
        if head < KEY_HEADS:
            place = (token * KEY_HEADS + head)[:, None] * KEY_DIM + cols[None, :]
            tl.store(q + place, y.to(q.dtype.element_ty), mask=mask)
        else:
            place = (token * KEY_HEADS + head - KEY_HEADS)[:, None] * KEY_DIM + cols[None, :]
            tl.store(k + place, y.to(k.dtype.element_ty), mask=mask)
    else:
        place = (token * VALUE_HEADS + head - 2 * KEY_HEADS)[:, None] * VALUE_DIM + cols[None, :]
        tl.store(v + place, y.to(v.dtype.element_ty), mask=mask)


def convolution(
    packed: Tensor, heads: Heads, taps: Tensor, key_heads: int, key_dim: int, value_heads: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, _ = packed.shape
    q = packed.new_empty(batch, length, key_heads, key_dim)
    k = packed.new_empty(batch, length, key_heads, key_dim)
    v = packed.new_empty(batch, length, value_heads, value_dim)
    blocks = triton.cdiv(length, _TOKENS)
    with _device_of(packed):
        _convolution_kernel[(batch * blocks * (2 * key_heads + value_heads),)](
            packed, heads.starts, taps, q, k, v, length, blocks, packed.stride(0), packed.stride(1), L2_EPS,
            KEY_HEADS=key_heads, KEY_DIM=key_dim, VALUE_HEADS=value_heads, VALUE_DIM=value_dim,
            TAPS=taps.shape[0], CHANNELS=taps.shape[1], ALIGN=heads.align,
            BLOCK=triton.next_power_of_2(max(key_dim, value_dim)), TOKENS=_TOKENS, num_warps=4,
        )  # fmt: skip
    return q, k, v


@triton.jit
def _gated_norm_kernel(
    x, packed, columns, gain, out, eps, rows, length, batch_stride, token_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    alive = row < rows
    mask = alive[:, None] & (cols < DIM)[None, :]
    token, head = row // HEADS, row % HEADS
    base = packed + (token // length) * batch_stride + (token % length) * token_stride
    base += tl.multiple_of(tl.load(columns + head, mask=alive, other=0), ALIGN)
    place = row[:, None] * DIM + cols[None, :]
    y = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(base[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, axis=1) / DIM + eps)[:, None]
    y = y * scale * tl.load(gain + cols, mask=cols < DIM, other=0.0).to(tl.float32)[None, :] * z * tl.sigmoid(z)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


def gated_norm(x: Tensor, packed: Tensor, heads: Heads, gain: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    batch, length, count, dim = x.shape
    out = torch.empty_like(x)
    rows = batch * length * count
    with _device_of(x):
        _gated_norm_kernel[(triton.cdiv(rows, _ROWS),)](
            x, packed, heads.starts, gain, out, eps, rows, length, packed.stride(0), packed.stride(1),
            HEADS=count, DIM=dim, ALIGN=heads.align, BLOCK=triton.next_power_of_2(dim), ROWS=_ROWS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _gates_kernel(
    packed, a, b, a_log, dt_bias, decay, step, tokens, length, batch_stride, token_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, BLOCK)
    inside = head < HEADS
    mask = (token < tokens)[:, None] & inside[None, :]
    base = (packed + (token // length) * batch_stride + (token % length) * token_stride)[:, None]
    x = tl.load(base + tl.load(a + head, mask=inside, other=0)[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(base + tl.load(b + head, mask=inside, other=0)[None, :], mask=mask, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)[None, :]
    x = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))  # softplus, linear where exp would overflow
    x *= -tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))[None, :]
    place = token[:, None] * HEADS + head[None, :]
    tl.store(decay + place, x, mask=mask)
    tl.store(step + place, tl.sigmoid(y), mask=mask)


def gates(packed: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, _ = packed.shape
    heads = a.shape[0]
    decay, step = (torch.empty(batch, length, heads, dtype=torch.float32, device=packed.device) for _ in range(2))
    with _device_of(packed):
        _gates_kernel[(triton.cdiv(batch * length, _ROWS),)](
            packed, a, b, a_log, dt_bias, decay, step, batch * length, length, packed.stride(0), packed.stride(1),
            HEADS=heads, BLOCK=triton.next_power_of_2(heads), ROWS=_ROWS, num_warps=4,
        )  # fmt: skip
    return decay, step


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor, state: Tensor | None = None, *, more: bool = False
) -> tuple[Tensor, Tensor | None]:
    """fla's chunked kernel, or FlashQLA's through fla's own dispatch where that package is installed."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: PLC0415  # a dense model needs no fla

    with any_batch_size():
        return chunk_gated_delta_rule(  # type: ignore[no-any-return]
            q, k, v, g=decay, beta=step, initial_state=state, output_final_state=more
        )


def _rows(x: Tensor) -> Tensor:
    """x as it is when its rows lie evenly spaced with unit-stride columns, else a copy."""
    even = all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))
    return x if even and x.stride(-1) == 1 else x.contiguous()


def _device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device; on the CPU its interpreter runs the kernel."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
