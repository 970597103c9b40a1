"""The GPU loader against safetensors' own, with tensors smaller and larger than its buffers."""

import pytest
import torch

from headframe_worker.engine import weights
from headframe_worker.engine.weights import load_safetensors

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from safetensors.torch import load_file, save_file  # noqa: E402


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "large": torch.randn(3, (5 << 20) + 3, dtype=torch.float32),  # 63 MB: eight buffers, the last one partly filled
        "float8": torch.randn(1000, 7).to(torch.float8_e4m3fn),
        "half": torch.randn(17, 33).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "mask": torch.rand(100) < 0.5,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("threads", [1, 8])
def test_bytes_are_those_of_safetensors(checkpoint, threads):
    device = torch.device("cuda", 0)
    wanted = load_file(checkpoint)
    for _ in range(3):
        found = dict(load_safetensors([checkpoint], device=device, dtype=None, threads=threads))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(bits(found[name]).cpu(), bits(wanted[name])) for name in wanted)


def test_reading_ahead_is_bounded(checkpoint, monkeypatch):
    monkeypatch.setattr(weights, "_AHEAD_BYTES", 1 << 20)
    loaded = load_safetensors([checkpoint], device=torch.device("cuda", 0), dtype=torch.bfloat16)
    found = {name: tensor.dtype for name, tensor in loaded}
    assert found["large"] == torch.bfloat16
    assert found["float8"] == torch.float8_e4m3fn


def test_a_caller_may_stop_early(checkpoint):
    loaded = load_safetensors([checkpoint], device=torch.device("cuda", 0), dtype=None)
    next(loaded)
    loaded.close()
    torch.cuda.synchronize()
