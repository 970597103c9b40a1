"""verify finds each kind of damage, says where it is, and finds nothing in a sound dataset of any dtype."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_output import SyntheticOutput, write_extracted, write_finished, write_shard

from headframe_api.errors import ConfigError
from headframe_api.names import (
    MANIFEST_KEY,
    PLAN_KEY,
    SAMPLES_KEY,
    SUCCESS_KEY,
    part_key,
    quarantine_key,
    shard_manifest_key,
    tokens_key,
)
from headframe_worker.checksum import crc64, digest_text
from headframe_worker.finalize.stage import finalize
from headframe_worker.finalize.verify import Verification, verify
from headframe_worker.format.part import header_bytes
from headframe_worker.meter import Meter
from headframe_worker.prepare.tokens_file import DATASET_INFO_KEY, STATE_KEY
from headframe_worker.reader.stored_part import read_header
from headframe_worker.stores.local import LocalStore


def run(output: SyntheticOutput) -> Verification:
    return verify(
        output.store,
        scratch=output.directory.parent / "scratch",
        on_size=lambda size: None,
        on_bytes=lambda size: None,
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_a_sound_dataset_has_no_faults(tmp_path: Path, dtype: str) -> None:
    output = write_finished(tmp_path, dtype=dtype)
    result = run(output)
    assert result.faults == []
    assert result.samples == len(output.kept)
    assert result.parts == sum(shard.parts for shard in output.plan.shards)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_a_part_whose_samples_were_all_refused_is_sound(tmp_path: Path, dtype: str) -> None:
    output = write_extracted(LocalStore(tmp_path / "output"), lengths=[3], shards=1, dtype=dtype)  # type: ignore[arg-type]
    output.refused = {0}
    output.store.delete([key.key for key in output.store.list("states/")])
    write_shard(output, output.plan.shards[0])
    spec = output.job.spec
    policy = spec.failure_policy.model_copy(update={"max_quarantined_fraction": 1.0})
    job = output.job.model_copy(update={"spec": spec.model_copy(update={"failure_policy": policy})})
    finalize(job, output.store, scratch=tmp_path / "scratch", meter=Meter("finalize"))
    result = run(output)
    assert (result.faults, result.parts) == ([], 1)


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    output = write_finished(tmp_path)
    sizes: list[int] = []
    read: list[int] = []
    verify(output.store, scratch=tmp_path / "scratch", on_size=sizes.append, on_bytes=read.append)
    parts = sum(path.stat().st_size for path in output.directory.glob("states/*/*.safetensors"))
    assert sum(read) == parts
    assert sizes == [parts]


def path_of(output: SyntheticOutput, shard: int, part: int) -> Path:
    return output.directory / part_key(shard, part)


def change_tensor(
    output: SyntheticOutput, name: str, change: Callable[[bytearray], object], *, reseal: bool = False
) -> None:
    """Change the bytes of one tensor of shard 1's first part; `reseal` makes its digest right again, everywhere."""
    path = path_of(output, 1, 0)
    place = read_header(output.store, part_key(1, 0), at_least_bytes=100).tensors[name]
    data = bytearray(path.read_bytes())
    values = data[place.start : place.start + place.size_bytes]
    change(values)
    data[place.start : place.start + place.size_bytes] = values
    if reseal:
        _reseal(output, data)
    path.write_bytes(data)


def _reseal(output: SyntheticOutput, data: bytearray) -> None:
    end = header_bytes(bytes(data[:8]))
    manifest = output.directory / shard_manifest_key(1)
    document = json.loads(manifest.read_bytes())
    old = document["parts"][0]["digest"]
    new = digest_text(crc64([memoryview(data)[end:]]))
    data[:end] = bytes(data[:end]).replace(old.encode(), new.encode())
    document["parts"][0]["digest"] = new
    manifest.write_text(json.dumps(document))


def write_value(pattern: bytes) -> Callable[[bytearray], object]:
    def change(values: bytearray) -> None:
        values[: len(pattern)] = pattern

    return change


def zero_a_sample(values: bytearray) -> None:
    values[:] = bytes(len(values))


def flip(values: bytearray) -> None:
    values[len(values) // 2] ^= 0x10


def swap(output: SyntheticOutput) -> None:
    one, other = path_of(output, 1, 0), path_of(output, 1, 1)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def truncate(output: SyntheticOutput) -> None:
    path = path_of(output, 1, 0)
    path.write_bytes(path.read_bytes()[:-100])


def change_manifest(output: SyntheticOutput, *, reseal: bool) -> None:
    path = output.directory / MANIFEST_KEY
    document = json.loads(path.read_bytes())
    document["loss_tokens"] += 1
    path.write_text(json.dumps(document))
    if reseal:
        import hashlib

        (output.directory / SUCCESS_KEY).write_text(f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n")


def spoil_list_offsets(output: SyntheticOutput) -> None:
    """Make the first sample of a tokens file end far outside the file: Arrow itself reads that without a look."""
    path = output.directory / tokens_key(1)
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    first = table.column("input_ids").chunk(0).offsets[:4].to_numpy().tobytes()
    assert first in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(first, first[:4] + b"\xff\xff\xff\x7f" + first[8:]))


def spoil_mask(output: SyntheticOutput) -> None:
    """A value of the mask in tokens/ that is 1 only in its lowest byte."""
    path = output.directory / tokens_key(1)
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    mask = table.column("loss_mask").chunk(0).values.to_numpy().tobytes()
    at = path.read_bytes().rindex(mask) + mask.index(b"\x01")
    data = bytearray(path.read_bytes())
    data[at + 3] = 1
    path.write_bytes(data)


def replace(output: SyntheticOutput, key: str, old: str, new: str) -> None:
    path = output.directory / key
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def change_index(output: SyntheticOutput, change: Callable[[pa.Table], pa.Table]) -> None:
    path = output.directory / SAMPLES_KEY
    pq.write_table(change(pq.read_table(path)), path)


def double_a_row(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table[:4], table[3:]])


DAMAGE: dict[str, tuple[Callable[[SyntheticOutput], object], list[tuple[str, str]]]] = {
    "a bit of the states": (lambda o: change_tensor(o, "hidden_states", flip), [(part_key(1, 0), "has the digest")]),
    "a bit of the tokens": (
        lambda o: change_tensor(o, "token_ids", flip),
        [(part_key(1, 0), "has the digest"), (f"{part_key(1, 0)} row", "token_ids differs from tokens/")],
    ),
    "a bit of the masks": (
        lambda o: change_tensor(o, "loss_mask", flip),
        [(f"{part_key(1, 0)} row", "loss_mask differs from tokens/")],
    ),
    "NaN, with a right digest": (
        lambda o: change_tensor(o, "hidden_states", write_value(b"\xc0\x7f"), reseal=True),
        [(f"{part_key(1, 0)} row", "NaN or infinite, first at token 0")],
    ),
    "infinity, with a right digest": (
        lambda o: change_tensor(o, "hidden_states", write_value(b"\x80\x7f"), reseal=True),
        [(f"{part_key(1, 0)} row", "NaN or infinite")],
    ),
    "zeros, with a right digest": (
        lambda o: change_tensor(o, "hidden_states", zero_a_sample, reseal=True),
        [(f"{part_key(1, 0)} row", "states of layer.1 are all zero"), (part_key(1, 0), "sum of layer.1 is 0, was")],
    ),
    "one large value, with a right digest": (
        lambda o: change_tensor(o, "hidden_states", write_value(b"\x00\x44"), reseal=True),
        [(part_key(1, 0), "norm_max of embeddings is 512")],
    ),
    "a truncated part": (truncate, [(part_key(1, 0), "bytes, the shard's manifest says")]),
    "a deleted part": (lambda o: path_of(o, 1, 0).unlink(), [(part_key(1, 0), "is missing")]),
    "swapped parts": (swap, [(part_key(1, 0), ""), (part_key(1, 1), "")]),
    "a changed manifest": (lambda o: change_manifest(o, reseal=False), [(MANIFEST_KEY, "_SUCCESS says sha256:")]),
    "a changed manifest with a right digest": (
        lambda o: change_manifest(o, reseal=True),
        [(MANIFEST_KEY, "loss_tokens is")],
    ),
    "a row doubled in the index": (
        lambda o: change_index(o, double_a_row),
        [(SAMPLES_KEY, "has 60 lines, the shards 59"), (f"{SAMPLES_KEY} line 4", "says {'row': 3")],
    ),
    "an index of something else": (
        lambda o: (o.directory / SAMPLES_KEY).write_bytes(b"PAR1"),
        [(SAMPLES_KEY, "cannot be read")],
    ),
    "no index": (lambda o: (o.directory / SAMPLES_KEY).unlink(), [(SAMPLES_KEY, "is missing")]),
    "a deleted shard manifest": (
        lambda o: (o.directory / shard_manifest_key(1)).unlink(),
        [(shard_manifest_key(1), "is missing")],
    ),
    "a changed plan": (
        lambda o: (o.directory / PLAN_KEY).write_text((o.directory / PLAN_KEY).read_text().replace("made/up", "else")),
        [(PLAN_KEY, "was changed after it was made")],
    ),
    "offsets of a tokens file that point outside it": (
        spoil_list_offsets,
        [(tokens_key(1), "cannot be read as a file of tokens")],
    ),
    "a loss mask in tokens/ other than 0 and 1": (spoil_mask, [(tokens_key(1), "values other than 0 and 1")]),
    "a tokens directory without its list": (
        lambda o: (o.directory / STATE_KEY).unlink(),
        [(STATE_KEY, "is missing")],
    ),
    "a tokens directory with other columns": (
        lambda o: replace(o, DATASET_INFO_KEY, "seq_len", "length"),
        [(DATASET_INFO_KEY, "names other files or columns")],
    ),
    "a refused row forgotten": (
        lambda o: (o.directory / quarantine_key("prepare")).write_text(""),
        [(quarantine_key("prepare"), "lists {}, the plan counts {'InvalidJson': 1}")],
    ),
    "no list of what extract refused": (
        lambda o: (o.directory / quarantine_key("extract", 0)).unlink(),
        [(quarantine_key("extract", 0), "names 1 refused samples")],
    ),
    "a list of other refused samples": (
        lambda o: replace(o, quarantine_key("extract", 0), '"row":5', '"row":6'),
        [(quarantine_key("extract", 0), "lists other samples")],
    ),
    "a broken manifest": (lambda o: (o.directory / MANIFEST_KEY).write_text("{}"), [(MANIFEST_KEY, "cannot be read")]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_where_it_is(tmp_path: Path, damage: str) -> None:
    output = write_finished(tmp_path)
    act, expected = DAMAGE[damage]
    act(output)
    faults = run(output).faults
    for place, problem in expected:
        assert any(fault.place.startswith(place) and problem in fault.problem for fault in faults), faults
    touched = {place.split()[0] for place, _ in expected}
    assert {fault.place.split()[0] for fault in faults} <= touched | {MANIFEST_KEY}


def test_a_fault_in_one_part_does_not_hide_another(tmp_path: Path) -> None:
    output = write_finished(tmp_path)
    truncate(output)
    path = path_of(output, 0, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert {fault.place.split()[0] for fault in run(output).faults} == {part_key(1, 0), part_key(0, 1)}


def test_an_unfinished_dataset_is_not_verified(tmp_path: Path) -> None:
    output = write_finished(tmp_path)
    (output.directory / SUCCESS_KEY).unlink()
    with pytest.raises(ConfigError, match="not finished"):
        run(output)


def test_a_small_error_in_every_value_is_found(tmp_path: Path) -> None:
    """The statistics are of the values before they were stored, so a systematic error of 2 % in the states shows."""
    output = write_finished(tmp_path, dtype="float32")

    def scale(values: bytearray) -> None:
        values[:] = (np.frombuffer(values, np.float32) * np.float32(1.02)).tobytes()

    change_tensor(output, "hidden_states", scale, reseal=True)
    assert any("norm_mean of layer.4" in fault.problem for fault in run(output).faults)
