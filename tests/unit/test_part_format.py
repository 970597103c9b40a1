"""A part is a safetensors file that safetensors' own library reads, whatever its dtype and number of tokens."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from headframe_api.errors import DataError
from headframe_api.manifests import PartMetadata, QuarantinedRow
from headframe_worker.checksum import crc64, digest_text
from headframe_worker.format.cut import cut_parts
from headframe_worker.format.part import PartArrays, decode_header, encode_part, header_bytes

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
QUARANTINED = QuarantinedRow(row=3, sample_id="ü", where="a.jsonl:4", reason="NonFinite", message="NaN at layer 2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[3, 1, 1], [7], []])
def test_a_part_reads_back_by_safetensors_and_by_one_range_a_sample(
    tmp_path: Path, dtype: Any, lengths: list[int]
) -> None:
    tokens, slots, hidden = sum(lengths), 2, 5
    states = torch.randn(tokens, slots, hidden).to(DTYPES[dtype])
    arrays = PartArrays(
        hidden_states=states.contiguous().view(torch.uint8).numpy().reshape(-1),
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, dtype=np.uint8),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rows=np.arange(len(lengths), dtype=np.int64) + 40,
        scales=np.ones((tokens, slots), np.float32) if dtype == "float8_e4m3fn" else None,
    )
    metadata = PartMetadata(
        plan="sha256:0", shard=1, part=2, layers=[4], last="preNorm", model="m", revision="1", quarantined=[QUARANTINED]
    )
    path = tmp_path / "part.safetensors"
    path.write_bytes(b"".join(encode_part(arrays, metadata, slots=slots, hidden_size=hidden, dtype=dtype)))

    with safe_open(path, framework="pt") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["plan"] == "sha256:0"
    assert torch.equal(read["hidden_states"].view(torch.uint8), states.view(torch.uint8))
    assert read["rows"].tolist() == list(arrays.rows)
    assert read["offsets"].tolist() == list(arrays.offsets)
    assert read["token_ids"].dtype == torch.int32

    raw = path.read_bytes()
    header = decode_header(raw[: header_bytes(raw[:8])], where=str(path))
    digest = digest_text(crc64([memoryview(raw)[header_bytes(raw[:8]) :]]))
    assert header.metadata == metadata.model_copy(update={"digest": digest})
    assert header.size_bytes == len(raw)
    assert (header.entry.samples, header.entry.tokens, header.entry.digest) == (len(lengths), tokens, digest)
    for index, length in enumerate(lengths):
        start, size = header.sample_range(int(arrays.offsets[index]), length)
        first = int(arrays.offsets[index])
        assert raw[start : start + size] == states[first : first + length].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x05" + b"\0" * 7 + b"{}   ", b"\x02" + b"\0" * 7 + b"{}"])
def test_what_is_no_part_is_refused(content: bytes) -> None:
    with pytest.raises(DataError):
        decode_header(content[: header_bytes(content)], where="here")


@pytest.mark.parametrize("said", [{}, {"plan": "sha256:0", "layers": "[1"}, {"plan": 5}, []])
def test_a_part_that_does_not_say_what_it_is_is_refused_when_asked(said: Any) -> None:
    text = json.dumps({"__metadata__": said}).encode()
    header = decode_header(struct.pack("<Q", len(text)) + text, where="here")
    with pytest.raises(DataError, match="here: not a part of format version 1"):
        header.metadata  # noqa: B018


def test_parts_follow_from_lengths_alone_and_hold_every_row_once() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 1000)
    parts = cut_parts(lengths, bytes_per_token=10, target_bytes=2000)
    assert sorted(np.concatenate([part.rows for part in parts]).tolist()) == list(range(1000))
    assert all(part.tokens >= 200 for part in parts[:-1])
    assert all(part.tokens - part.lengths[-1] < 200 for part in parts)
    assert np.all(np.diff(np.concatenate([part.lengths for part in parts])) <= 0)


def test_a_sample_larger_than_a_part_is_a_part_of_its_own() -> None:
    parts = cut_parts([5, 1000, 5, 900], bytes_per_token=1, target_bytes=10)
    assert [part.rows.tolist() for part in parts] == [[1], [3], [0, 2]]
