"""Each Triton kernel against its plain twin, on odd sizes and strided views.

Runs on a CUDA device, or anywhere in Triton's interpreter (TRITON_INTERPRET=1), which is how the unit tests call it.
"""

import os
from functools import partial

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from headframe_worker.engine.fusion import kernels, twins  # noqa: E402
from headframe_worker.engine.fusion.chunk_sums import chunk_sums  # noqa: E402

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    torch.manual_seed(0)
    return request.param


def normal(*shape, dtype):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(found, wanted):
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert found.is_contiguous()
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert error <= (1e-6 if found.dtype == torch.float32 else 1e-3), float(error)  # both round the same float32 result


def test_rms_norm(dtype):
    x, gain = normal(3, 5, 96, dtype=dtype), torch.rand(96, device=DEVICE)
    close(kernels.rms_norm(x, gain, 1e-6), twins.rms_norm(x, gain, 1e-6))


def test_add_rms_norm(dtype):
    x, update, gain = normal(2, 7, 80, dtype=dtype), normal(2, 7, 80, dtype=dtype), torch.rand(80, device=DEVICE)
    for found, wanted in zip(
        kernels.add_rms_norm(x, update, gain, 1e-5), twins.add_rms_norm(x, update, gain, 1e-5), strict=True
    ):
        close(found, wanted)


def test_swiglu_reads_halves_of_a_merged_projection(dtype):
    both = normal(2, 9, 2 * 2100, dtype=dtype)
    gate, up = both.split(2100, dim=-1)
    close(kernels.swiglu(gate, up), twins.swiglu(gate, up))


@pytest.mark.parametrize("width", [24, 40])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
def test_rotary(dtype, width, normed, batches):
    packed = normal(2, 11, 3 * 2 * 40, dtype=dtype)
    x = packed.unflatten(-1, (6, 40))[..., 0::2, :]
    angle = torch.rand(batches, 11, width // 2, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    gain = torch.rand(40, device=DEVICE) if normed else None
    close(kernels.rotary(x, gain, 1e-6, cos, sin), twins.rotary(x, gain, 1e-6, cos, sin))


def test_attention_gate(dtype):
    packed = normal(2, 5, 6 * 24, dtype=dtype)
    gate, x = packed.unflatten(-1, (6, 24))[..., 1::2, :], normal(2, 5, 3, 24, dtype=dtype)
    close(kernels.attention_gate(x, gate), twins.attention_gate(x, gate))


@pytest.mark.parametrize("length", [1, 3, 67])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (16, 24)])
def test_convolution(dtype, length, key_dim, value_dim):
    key_heads, value_heads = 2, 4
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    packed, taps = normal(2, length, channels + 10, dtype=dtype), normal(4, channels, dtype=dtype)
    starts = [*range(0, 2 * key_heads * key_dim, key_dim), *range(2 * key_heads * key_dim, channels, value_dim)]
    heads = twins.heads_at([10 + start for start in starts], DEVICE)
    arguments = (packed, heads, taps, key_heads, key_dim, value_heads, value_dim)
    for found, wanted in zip(kernels.convolution(*arguments), twins.convolution(*arguments), strict=True):
        close(found, wanted)


def test_gated_norm(dtype):
    x, packed, gain = normal(2, 5, 3, 24, dtype=dtype), normal(2, 5, 100, dtype=dtype), torch.rand(24, device=DEVICE)
    heads = twins.heads_at([60, 4, 32], DEVICE)
    close(kernels.gated_norm(x, packed, heads, gain, 1e-6), twins.gated_norm(x, packed, heads, gain, 1e-6))


def test_gates(dtype):
    packed = 10 * normal(2, 19, 40, dtype=dtype)  # far into the linear part of softplus too
    a, b = (torch.tensor(columns, dtype=torch.int32, device=DEVICE) for columns in ([3, 30, 7], [1, 2, 39]))
    a_log, dt_bias = torch.rand(3, device=DEVICE).to(dtype), normal(3, dtype=dtype)
    for found, wanted in zip(
        kernels.gates(packed, a, b, a_log, dt_bias), twins.gates(packed, a, b, a_log, dt_bias), strict=True
    ):
        close(found, wanted)


@pytest.mark.parametrize("length", [1, 63, 64, 200])
def test_chunk_sums(length):
    g = torch.randn(3, length, 5, device=DEVICE)
    wanted = torch.cat([part.double().cumsum(1) * 2.0 for part in g.split(64, dim=1)], dim=1)
    found = chunk_sums(g, 64, 2.0)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert (found - wanted).abs().max() <= 1e-4


@pytest.mark.skipif(INTERPRETED, reason="fla's kernels are not ours to interpret")
def test_a_new_batch_size_tunes_nothing(monkeypatch):
    from fla.ops.gated_delta_rule import chunk

    def refuse(*_args, **_options):
        raise AssertionError("fla's own sums, tuned for each batch size")

    monkeypatch.setattr(chunk, "chunk_local_cumsum", refuse)
    q, k, v = (torch.randn(7, 70, 4, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    decay = -torch.rand(7, 70, 4, device=DEVICE)
    assert kernels.delta_rule(q, k, v, decay, decay.exp())[0].isfinite().all()
    assert chunk.chunk_local_cumsum is refuse


@pytest.mark.skipif(INTERPRETED, reason="fla's kernels are not ours to interpret")
@pytest.mark.parametrize("length", [1, 70, 200])
def test_delta_rule(length):
    torch.manual_seed(0)
    draw = partial(normal, dtype=torch.float32)
    q, k = (torch.nn.functional.normalize(draw(2, length, 16, 128), dim=-1).bfloat16() for _ in range(2))
    v, decay, step = draw(2, length, 48, 128).bfloat16(), -draw(2, length, 48).abs(), draw(2, length, 48).sigmoid()
    wanted = twins.delta_rule(q, k, v, decay, step)[0].float()
    found = kernels.delta_rule(q, k, v, decay, step)[0].float()
    assert (found - wanted).norm() <= 0.01 * wanted.norm()
