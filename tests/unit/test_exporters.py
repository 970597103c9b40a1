"""Each trainer's files hold exactly what its reader documents, and an export goes on where it was interrupted.

Where a trainer installs on this machine its own reader is asked (test_speculators.py); the others' are written down here
as tables, from the source files that each exporter names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from synthetic_output import SyntheticOutput, encode, write_extracted, write_finished

from headframe_api.errors import ConfigError, TemporaryError
from headframe_worker.exporters.deepspec import DeepSpec
from headframe_worker.exporters.export import Exported, Exporter, export
from headframe_worker.exporters.modelopt import ModelOpt
from headframe_worker.exporters.samples import SourceDataset
from headframe_worker.exporters.specforge import SpecForge, Strategy
from headframe_worker.exporters.speculators import Speculators
from headframe_worker.exporters.torch_files import TorchFiles
from headframe_worker.model_ends.checkpoint import ModelAccess
from headframe_worker.stores.base import Written
from headframe_worker.stores.local import LocalStore

NOWHERE = ModelAccess()
"""No model is needed where the dataset holds the last state as the trainer wants it."""


def finished(directory: Path, **options: Any) -> SyntheticOutput:
    return write_finished(directory, **{"layers": (1, 2, 4), "shards": 3, **options})


def run(output: SyntheticOutput, exporter: Exporter, target: Path, share: tuple[int, int] = (0, 1)) -> Exported:
    source = SourceDataset.open(output.store)
    return export(source, LocalStore(target), exporter, share=share, advance=lambda *_: None)


def stored(output: SyntheticOutput, row: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[T, S, H] as the dataset holds them, in a dtype."""
    states, scales = encode(output.states[row], output.plan.states.dtype)
    return states.to(dtype) if scales is None else (states.float() * scales[..., None]).to(dtype)


def same(found: torch.Tensor, values: Sequence[int], dtype: torch.dtype = torch.int64) -> bool:
    return found.dtype == dtype and found.tolist() == list(values)


@pytest.fixture(scope="module")
def post_norm(tmp_path_factory: pytest.TempPathFactory) -> SyntheticOutput:
    return finished(tmp_path_factory.mktemp("post"), last="postNorm")


@pytest.fixture(scope="module")
def pre_norm(tmp_path_factory: pytest.TempPathFactory) -> SyntheticOutput:
    return finished(tmp_path_factory.mktemp("pre"))


@pytest.mark.parametrize(
    ("strategy", "layers_key", "last_key"),
    [
        ("eagle3", "aux_hidden_state", "hidden_state"),
        ("dflash", "hidden_states", None),
        ("domino", "hidden_states", None),
        ("dspark", "hidden_states", "target_last_hidden_states"),
    ],
)
def test_specforge(
    post_norm: SyntheticOutput, tmp_path: Path, strategy: Strategy, layers_key: str, last_key: str | None
) -> None:
    run(post_norm, SpecForge(post_norm.plan, NOWHERE, strategy=strategy), tmp_path)
    usable = [row for row in post_norm.kept if strategy == "eagle3" or int(post_norm.masks[row].sum()) >= 2]
    assert 0 < len(usable) < len(post_norm.tokens)
    files = sorted(tmp_path.rglob("*.ckpt"))
    assert {path.relative_to(tmp_path).as_posix() for path in files} == {
        f"rows_0-2000/data_{row}.ckpt" for row in usable
    }
    for row in usable:
        features = torch.load(tmp_path / f"rows_0-2000/data_{row}.ckpt", weights_only=True)
        assert set(features) == {"input_ids", "loss_mask", layers_key} | ({last_key} if last_key else set())
        states = stored(post_norm, row)
        assert same(features["input_ids"], post_norm.tokens[row])
        assert same(features["loss_mask"], post_norm.masks[row])
        assert torch.equal(features[layers_key], states[:, :3].flatten(1).unsqueeze(0))
        if last_key:
            assert torch.equal(features[last_key], states[:, 3].unsqueeze(0))


def test_rows_that_the_trainer_would_refuse_are_listed(post_norm: SyntheticOutput, tmp_path: Path) -> None:
    result = run(post_norm, SpecForge(post_norm.plan, NOWHERE, strategy="dflash"), tmp_path)
    done = json.loads((tmp_path / "headframe-export/done.json").read_bytes())
    left_out = [row for row in post_norm.kept if int(post_norm.masks[row].sum()) < 2]
    assert done["left_out"] == left_out
    assert result.left_out == len(left_out)
    assert result.samples == len(post_norm.kept) - len(left_out)


def test_modelopt(post_norm: SyntheticOutput, tmp_path: Path) -> None:
    run(post_norm, ModelOpt(post_norm.plan, NOWHERE), tmp_path)
    assert len(list(tmp_path.rglob("*.pt"))) == len(post_norm.kept)
    for row in post_norm.kept:
        sample = torch.load(tmp_path / f"rows_0-2000/{row}.pt", weights_only=True)
        states = stored(post_norm, row)
        assert same(sample["input_ids"], post_norm.tokens[row])
        assert same(sample["loss_mask"], post_norm.masks[row])
        assert torch.equal(sample["hidden_states"], states[:, 3])
        assert torch.equal(sample["aux_hidden_states"], states[:, :3].flatten(1))
        assert sample["hidden_states_prenorm"] is False
        assert sample["conversation_id"] == f"sample-{row}"


def test_deepspec(post_norm: SyntheticOutput, tmp_path: Path) -> None:
    run(post_norm, DeepSpec(post_norm.plan, NOWHERE, min_loss_tokens=3), tmp_path)
    rows = [row for row in post_norm.kept if int(post_norm.masks[row].sum()) >= 3]
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    size = post_norm.plan.model.hidden_size
    assert manifest | {"shards": None} == manifest | {
        "version": 2,
        "num_samples": len(rows),
        "target_layer_ids": [1, 2, 4],
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": size,
        "shards": None,
    }
    assert [shard["shard_id"] for shard in manifest["shards"]] == list(range(manifest["num_shards"]))
    index = (tmp_path / "samples.idx").read_bytes()
    assert len(index) == 56 * len(rows)
    for number, row in enumerate(rows):
        identity, shard, tokens, ids, attention, mask, layers, last = struct.unpack_from(
            "<QIIQQQQQ", index, 56 * number
        )
        data = (tmp_path / manifest["shards"][shard]["file_name"]).read_bytes()
        assert (identity, tokens) == (number, len(post_norm.tokens[row]))
        assert np.frombuffer(data, "<i4", tokens, ids).tolist() == post_norm.tokens[row].tolist()
        assert set(data[attention : attention + tokens]) == {1}
        assert list(data[mask : mask + tokens]) == post_norm.masks[row].tolist()
        states = stored(post_norm, row)
        for place, expected in ((layers, states[:, :3]), (last, states[:, 3])):
            found = torch.frombuffer(bytearray(data), dtype=torch.bfloat16, count=expected.numel(), offset=place)
            assert torch.equal(found, expected.flatten())


def test_torch_files(tmp_path: Path) -> None:
    output = finished(tmp_path, layers=(4, -1), last="none", dtype="float16")
    run(output, TorchFiles(output.plan, dtype="float32"), tmp_path / "files")
    for row in output.kept:
        sample = torch.load(tmp_path / f"files/rows_0-2000/row_{row}.pt", weights_only=True)
        assert torch.equal(sample["hidden_states"], stored(output, row, torch.float32))
        assert same(sample["input_ids"], output.tokens[row])
        assert same(sample["loss_mask"], output.masks[row])
        assert (sample["row"], sample["layers"], sample["last"]) == (row, [4, -1], "none")


def test_speculators(pre_norm: SyntheticOutput, tmp_path: Path) -> None:
    run(pre_norm, Speculators(pre_norm.plan), tmp_path)
    rows = datasets.load_from_disk(str(tmp_path))
    assert len(rows) == len(pre_norm.tokens)
    for row in pre_norm.kept:
        sample = load_file(tmp_path / f"hidden_states/hs_{row}.safetensors")
        assert torch.equal(sample["hidden_states"], stored(pre_norm, row))
        assert torch.equal(sample["token_ids"], rows[row]["input_ids"])
        assert rows[row]["loss_mask"].tolist() == pre_norm.masks[row].tolist()
    assert len(list((tmp_path / "hidden_states").iterdir())) == len(pre_norm.kept)
    arrow = next((pre_norm.directory / "tokens").glob("*.arrow"))
    assert arrow.samefile(tmp_path / arrow.name), "on one file system, tokens are linked, not copied"
    frequencies = torch.load(tmp_path / "token_freq.pt", weights_only=True)
    learned = np.concatenate(
        [tokens[mask.astype(bool)] for tokens, mask in zip(pre_norm.tokens, pre_norm.masks, strict=True)]
    )
    assert frequencies == dict(zip(*(a.tolist() for a in np.unique(learned, return_counts=True)), strict=True))


@pytest.mark.parametrize("kept_as", ["float8_e4m3fn", "bfloat16"])
def test_speculators_float8(tmp_path: Path, kept_as: Any) -> None:
    output = finished(tmp_path, dtype=kept_as)
    run(output, Speculators(output.plan, dtype="float8_e4m3fn"), tmp_path / "files")
    for row in output.kept:
        sample = load_file(tmp_path / f"files/hidden_states/hs_{row}.safetensors")
        scales = sample["hidden_states_scales"]
        assert sample["hidden_states"].dtype == torch.float8_e4m3fn
        assert scales.dtype == torch.float32
        decoded = sample["hidden_states"].float() * scales
        if kept_as == "float8_e4m3fn":
            assert torch.equal(decoded, stored(output, row, torch.float32)), "nothing is rounded twice"
        else:
            assert scales.shape == (len(output.tokens[row]), 1, 1)
            largest = stored(output, row, torch.float32).abs().amax(dim=(1, 2), keepdim=True)
            assert bool(((decoded - stored(output, row, torch.float32)).abs() <= largest / 16).all())


@pytest.mark.parametrize(
    ("options", "make", "message"),
    [
        ({"last": "postNorm"}, Speculators, "cannot be undone"),
        ({"last": "none"}, Speculators, "spec.states.last: none"),
        ({"layers": (1,), "last": "none"}, lambda plan: ModelOpt(plan, NOWHERE), "spec.states.last: none"),
        ({"last": "none"}, lambda plan: DeepSpec(plan, NOWHERE), "spec.states.last: none"),
        (
            {"layers": (1,), "last": "none"},
            lambda plan: SpecForge(plan, NOWHERE, strategy="dspark"),
            "spec.states.last: none",
        ),
        ({"layers": (-1, 2)}, lambda plan: SpecForge(plan, NOWHERE, strategy="dflash"), "-1"),
        ({"layers": (-1, 2)}, lambda plan: ModelOpt(plan, NOWHERE), "-1"),
        ({"layers": (4, 2)}, lambda plan: DeepSpec(plan, NOWHERE), "ascending"),
        ({"layers": (1, 5)}, lambda plan: DeepSpec(plan, NOWHERE), r"last decoder layer \(5\) after the final norm"),
        ({"layers": (1, 5)}, lambda plan: ModelOpt(plan, NOWHERE), "after the final norm"),
        ({"layers": (4, 2)}, lambda plan: ModelOpt(plan, NOWHERE), "ascending"),
        ({"layers": (4, 2)}, Speculators, "ascending"),
        ({"layers": (4, 2)}, lambda plan: SpecForge(plan, NOWHERE, strategy="dflash"), "ascending"),
        ({"layers": (1, 2)}, lambda plan: SpecForge(plan, NOWHERE, strategy="eagle3"), "exactly 3 layers"),
        ({}, lambda plan: TorchFiles(plan, dtype="float8_e4m3fn"), "no place for its scales"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(tmp_path: Path, options: dict[str, Any], make: Any, message: str) -> None:
    plan = write_extracted(LocalStore(tmp_path), **options).plan
    with pytest.raises(ConfigError, match=message):
        make(plan)


class Interrupted(LocalStore):
    """A disk that is full after some writes."""

    def __init__(self, directory: Path, writes: int) -> None:
        super().__init__(directory)
        self._left = writes

    def write(self, key: str, buffers: Sequence[memoryview], *, exclusive: bool = False) -> Written:
        self._left -= 1
        if self._left < 0:
            raise TemporaryError("full")
        return super().write(key, buffers, exclusive=exclusive)


def test_an_interrupted_export_goes_on_with_the_parts_that_miss(post_norm: SyntheticOutput, tmp_path: Path) -> None:
    exporter = DeepSpec(post_norm.plan, NOWHERE)
    source = SourceDataset.open(post_norm.store)
    with pytest.raises(TemporaryError):
        export(source, Interrupted(tmp_path, writes=6), exporter, advance=lambda *_: None)
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("part-*.json")}
    assert 0 < len(first) < len(list(source.part_entries()))
    assert not (tmp_path / "samples.idx").exists()
    result = run(post_norm, exporter, tmp_path)
    assert (result.samples, result.parts_missing) == (len(post_norm.kept), 0)
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert len((tmp_path / "samples.idx").read_bytes()) == 56 * len(post_norm.kept)


def test_processes_share_an_export(post_norm: SyntheticOutput, tmp_path: Path) -> None:
    exporter = DeepSpec(post_norm.plan, NOWHERE)
    half = run(post_norm, exporter, tmp_path / "shared", share=(1, 2))
    assert half.parts_missing > 0
    assert not (tmp_path / "shared/manifest.json").exists()
    whole = run(post_norm, exporter, tmp_path / "shared", share=(0, 2))
    alone = run(post_norm, exporter, tmp_path / "alone")
    assert whole == alone
    for path in (tmp_path / "alone").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "shared" / path.relative_to(tmp_path / "alone")).read_bytes()


def test_another_export_is_not_written_over(post_norm: SyntheticOutput, tmp_path: Path) -> None:
    run(post_norm, TorchFiles(post_norm.plan), tmp_path)
    with pytest.raises(ConfigError, match=r"holds another export.*dtype: torch.bfloat16; now dtype: torch.float32"):
        run(post_norm, TorchFiles(post_norm.plan, dtype="float32"), tmp_path)
