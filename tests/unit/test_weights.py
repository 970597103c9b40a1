"""Loading safetensors: every dtype, selection, casting, and what a broken file says."""

import json
import struct
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file

from headframe_api.errors import ConfigError
from headframe_worker.engine.weights import load_safetensors, read_entries

CPU = torch.device("cpu")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
KEPT = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    first = {f"float.{i}": torch.randn(3, 5).to(dtype) for i, dtype in enumerate(FLOATS)}
    first |= {f"kept.{i}": torch.randint(0, 2, (4, 2)).to(dtype) for i, dtype in enumerate(KEPT)}
    second = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 7, dtype=torch.bfloat16)}
    files = [tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00002-of-00002.safetensors"]
    save_file(first, files[0], metadata={"format": "pt"})
    save_file(second, files[1])
    return files, first | second


def same(found, wanted):
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(bits(found), bits(wanted))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_every_dtype_comes_back_bit_for_bit(checkpoint):
    files, wanted = checkpoint
    found = dict(load_safetensors(files, device=CPU, dtype=None))
    assert found.keys() == wanted.keys()
    assert all(same(found[name], wanted[name]) for name in wanted)


def test_a_dtype_casts_floats_and_leaves_float8_and_integers(checkpoint):
    files, wanted = checkpoint
    found = dict(load_safetensors(files, device=CPU, dtype=torch.bfloat16))
    for name, tensor in wanted.items():
        assert same(found[name], tensor if name.startswith("kept") else tensor.to(torch.bfloat16)), name


def test_only_wanted_tensors_are_read(checkpoint):
    files, _ = checkpoint
    found = dict(load_safetensors(files, device=CPU, dtype=None, wanted=lambda name: name.startswith("kept")))
    assert found.keys() == {f"kept.{i}" for i in range(len(KEPT))}


def test_entries_are_in_the_order_of_their_bytes(checkpoint):
    files, _ = checkpoint
    entries = read_entries(files[0])
    assert entries[-1].end == files[0].stat().st_size
    assert all(before.end == after.start for before, after in pairwise(entries))


@pytest.mark.parametrize("kept_bytes", [0, 7, 40, -1])
def test_a_truncated_file_is_named_with_both_sizes(checkpoint, kept_bytes):
    file = checkpoint[0][0]
    whole = file.read_bytes()
    file.write_bytes(whole[:kept_bytes])
    with pytest.raises(ConfigError, match=r"model-00001-of-00002.*(truncated|promises)"):
        list(load_safetensors([file], device=CPU, dtype=None))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "dtype F4"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fill bytes"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path, fields, message):
    header = json.dumps({"w": fields}).encode()
    file = tmp_path / "bad.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ConfigError, match=message):
        list(load_safetensors([file], device=CPU, dtype=None))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.safetensors: No such file"):
        list(load_safetensors([tmp_path / "absent.safetensors"], device=CPU, dtype=None))
