"""StatesDataset gives back exactly what was stored, whichever dtype, process and order asks for it."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic_output import SyntheticOutput, encode, write_extracted, write_finished
from torch.utils.data import DataLoader

from headframe_api.errors import ConfigError
from headframe_worker.reader import Sample, StatesDataset
from headframe_worker.stores.local import LocalStore


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> SyntheticOutput:
    return write_finished(tmp_path_factory.mktemp("reader"))


def expected_states(output: SyntheticOutput, row: int) -> torch.Tensor:
    stored, scales = encode(output.states[row], output.plan.states.dtype)
    return stored if scales is None else stored.float() * scales[..., None]


def check(output: SyntheticOutput, sample: Sample) -> None:
    assert sample.sample_id == f"sample-{sample.row}"
    assert sample.token_ids.dtype == torch.int64
    assert sample.token_ids.tolist() == output.tokens[sample.row].tolist()
    assert sample.loss_mask.tolist() == output.masks[sample.row].tolist()
    states = expected_states(output, sample.row).to(sample.hidden_states.dtype)
    layers = len(output.plan.states.layers)
    assert torch.equal(sample.hidden_states, states[:, :layers])
    if output.plan.states.last == "none":
        assert sample.last is None
    else:
        assert sample.last is not None
        assert torch.equal(sample.last, states[:, layers])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("last", ["preNorm", "none"])
def test_every_sample_reads_back(tmp_path: Path, dtype: str, last: str) -> None:
    output = write_finished(tmp_path, dtype=dtype, last=last, shards=3)
    dataset = StatesDataset(output.directory)
    assert [sample.row for sample in map(dataset.__getitem__, range(len(dataset)))] == output.kept
    for position in range(len(dataset)):
        check(output, dataset[position])
    assert dataset.layers == [-1, 1, 4]
    assert dataset.slot_names == list(output.plan.states.slot_names)
    assert dataset.dtype == (torch.bfloat16 if dtype == "float8_e4m3fn" else getattr(torch, dtype))


def test_states_come_in_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    output = write_finished(tmp_path, dtype="float8_e4m3fn")
    sample = StatesDataset(str(output.directory), dtype=torch.float32)[3]
    assert sample.hidden_states.dtype == torch.float32
    check(output, sample)
    original = output.states[sample.row][:, :3]
    error = (sample.hidden_states - original).norm() / original.norm()
    assert 0 < error < 2**-4


def test_negative_positions_and_repeated_ones_are_as_in_a_list(output: SyntheticOutput) -> None:
    dataset = StatesDataset(output.directory)
    assert dataset[-1].row == output.kept[-1]
    assert [sample.row for sample in dataset.__getitems__([5, 2, 5])] == [output.kept[i] for i in (5, 2, 5)]
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_one_sample_costs_one_read_once_its_part_is_known(
    output: SyntheticOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are counted at the store: a sample's states, and nothing more."""
    dataset = StatesDataset(output.directory)
    in_one_part = np.flatnonzero((dataset.index.shards == 1) & (dataset.index.parts == 0))
    dataset[in_one_part[0]]
    reads: list[int] = []
    fill = LocalStore.read_into
    monkeypatch.setattr(
        LocalStore,
        "read_into",
        lambda self, key, start, buffer: (reads.append(len(buffer)), fill(self, key, start, buffer))[1],
    )
    sample = dataset[in_one_part[1]]
    assert sample.last is not None
    assert reads == [(sample.hidden_states.numel() + sample.last.numel()) * 2]
    reads.clear()
    # A batch of all the part's samples is one read too.
    dataset.__getitems__(in_one_part.tolist())
    assert reads == [int(dataset.lengths[in_one_part].sum()) * 4 * 16 * 2]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers_read_it(output: SyntheticOutput, context: str) -> None:
    dataset = StatesDataset(output.directory)
    dataset[0]  # so that there is something open which must not be shared
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=context)
    samples = list(loader)
    assert [sample.row for sample in samples] == output.kept
    for sample in samples:
        check(output, sample)
    check(output, dataset[0])


def test_it_pickles_without_what_belongs_to_a_process(output: SyntheticOutput) -> None:
    dataset = StatesDataset(output.directory)
    dataset[0]
    check(output, pickle.loads(pickle.dumps(dataset))[7])


def test_a_split_is_whole_stable_and_by_row(output: SyntheticOutput) -> None:
    dataset = StatesDataset(output.directory)
    training, validation = dataset.split(0.3, seed=4)
    assert sorted([*training.rows, *validation.rows]) == output.kept
    assert 0.1 < len(validation) / len(dataset) < 0.5
    check(output, validation[0])
    assert set(dataset.split(0.1, seed=4)[1].rows) <= set(validation.rows)
    assert set(dataset.split(0.3, seed=5)[1].rows) != set(validation.rows)
    assert [len(side) for side in dataset.split(0.0)] == [len(dataset), 0]


def test_an_unfinished_output_is_refused(tmp_path: Path) -> None:
    output = write_extracted(LocalStore(tmp_path / "output"))
    with pytest.raises(ConfigError, match="not finished"):
        StatesDataset(output.directory)
