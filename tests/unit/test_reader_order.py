"""The batch sampler, packing and the stream: every sample once, alike on all ranks, and resumable."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic_output import SyntheticOutput, encode, write_extracted, write_finished, write_shard
from torch.utils.data import DataLoader

from headframe_api.names import part_key, shard_manifest_key
from headframe_worker.finalize.stage import finalize
from headframe_worker.meter import Meter
from headframe_worker.reader import PartBatchSampler, Sample, StatesDataset, StatesStream, collate_packed
from headframe_worker.stores.local import LocalStore


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> SyntheticOutput:
    return write_finished(tmp_path_factory.mktemp("order"), shards=3, part_target_bytes=8000)


@pytest.fixture(scope="module")
def dataset(output: SyntheticOutput) -> StatesDataset:
    return StatesDataset(output.directory)


def flat(batches: list[list[int]]) -> list[int]:
    return [item for batch in batches for item in batch]


@pytest.mark.parametrize("cut", [{"batch_samples": 4}, {"batch_tokens": 100}])
def test_every_sample_is_seen_once_in_an_order_that_seed_and_epoch_decide(dataset: StatesDataset, cut: Any) -> None:
    sampler = PartBatchSampler(dataset, seed=3, **cut)
    first = list(sampler)
    assert sorted(flat(first)) == list(range(len(dataset)))
    assert list(PartBatchSampler(dataset, seed=3, **cut)) == first
    assert list(PartBatchSampler(dataset, seed=4, **cut)) != first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert len(sampler) == len(list(sampler))


def test_token_batches_keep_their_budget_and_are_filled(dataset: StatesDataset) -> None:
    batches = list(PartBatchSampler(dataset, batch_tokens=100))
    tokens = [int(dataset.lengths[batch].sum()) for batch in batches]
    assert max(tokens) <= 100
    firsts = [int(dataset.lengths[batch[0]]) for batch in batches]
    assert all(have + following > 100 for have, following in zip(tokens, firsts[1:], strict=False))
    # A longer sample is not lost.
    assert sorted(flat(list(PartBatchSampler(dataset, batch_tokens=5)))) == list(range(len(dataset)))


def test_reads_stay_within_few_parts(dataset: StatesDataset) -> None:
    order = flat(list(PartBatchSampler(dataset, batch_samples=1, parts_together=3)))
    parts = list(zip(dataset.index.shards[order].tolist(), dataset.index.parts[order].tolist(), strict=True))
    assert len(set(parts)) > 6
    for part in set(parts):
        first, last = parts.index(part), len(parts) - parts[::-1].index(part)
        assert len(set(parts[first:last])) <= 3
    stored = flat(list(PartBatchSampler(dataset, batch_samples=1, shuffle=False)))
    places = [(dataset.index.shards[i], dataset.index.parts[i], dataset.index.starts[i]) for i in stored]
    assert places == sorted(places)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_samples_and_have_equally_many_batches(dataset: StatesDataset, ranks: int) -> None:
    each = [list(PartBatchSampler(dataset, batch_tokens=60, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in each}) == 1
    seen = [item for batches in each for item in flat(batches)]
    assert len(seen) == len(set(seen))
    whole = list(PartBatchSampler(dataset, batch_tokens=60))
    assert set(range(len(dataset))) - set(seen) == set(flat(whole[len(whole) // ranks * ranks :]))


def test_a_checkpoint_in_mid_epoch_goes_on_with_the_next_batch(dataset: StatesDataset) -> None:
    sampler = PartBatchSampler(dataset, batch_tokens=80, seed=1)
    sampler.set_epoch(5)
    whole = list(sampler)
    running = iter(sampler)
    for _ in range(3):
        next(running)
    state = sampler.state_dict()
    resumed = PartBatchSampler(dataset, batch_tokens=80, seed=1)
    resumed.load_state_dict(state)
    assert list(resumed) == whole[3:]
    resumed.load_state_dict(sampler.state_dict(batches_done=1))
    assert list(resumed) == whole[1:]
    with pytest.raises(ValueError, match="not this sampler's"):
        PartBatchSampler(dataset, batch_tokens=90, seed=1).load_state_dict(state)


def test_a_split_side_is_sampled_alone(dataset: StatesDataset) -> None:
    training, _ = dataset.split(0.3)
    items = flat(list(PartBatchSampler(training, batch_samples=3)))
    assert sorted(items) == list(range(len(training)))


def test_packed_batches_hold_their_samples_one_after_the_other(output: SyntheticOutput, dataset: StatesDataset) -> None:
    loader = DataLoader(
        dataset, batch_sampler=PartBatchSampler(dataset, batch_tokens=100), collate_fn=collate_packed, num_workers=2
    )
    rows = []
    for batch in loader:
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.last is not None
        for number, row in enumerate(batch.rows.tolist()):
            rows.append(row)
            tokens = slice(int(batch.cu_seqlens[number]), int(batch.cu_seqlens[number + 1]))
            length = len(output.tokens[row])
            assert batch.token_ids[tokens].tolist() == output.tokens[row].tolist()
            assert batch.loss_mask[tokens].tolist() == output.masks[row].tolist()
            assert batch.position_ids[tokens].tolist() == list(range(length))
            assert batch.sequence_ids[tokens].tolist() == [number] * length
            stored, _ = encode(output.states[row], "bfloat16")
            assert torch.equal(batch.hidden_states[tokens], stored[:, :3])
            assert torch.equal(batch.last[tokens], stored[:, 3])
    assert sorted(rows) == output.kept


def check_states(output: SyntheticOutput, sample: Sample) -> None:
    assert sample.sample_id == f"sample-{sample.row}"
    assert sample.token_ids.tolist() == output.tokens[sample.row].tolist()
    assert torch.equal(sample.hidden_states, encode(output.states[sample.row], "bfloat16")[0][:, :3])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_deals_every_sample_to_one_reader(output: SyntheticOutput, workers: int, ranks: int) -> None:
    seen = []
    for rank in range(ranks):
        stream = StatesStream(output.directory, rank=rank, ranks=ranks)
        for sample in DataLoader(stream, batch_size=None, num_workers=workers):
            check_states(output, sample)
            seen.append(sample.row)
    assert sorted(seen) == output.kept


def test_a_following_stream_yields_parts_as_they_are_committed_and_ends_with_the_last(tmp_path: Path) -> None:
    """The extraction goes on only once the stream has given out all that was there: it cannot have waited for the end."""
    output = write_extracted(LocalStore(tmp_path / "output"), shards=2, part_target_bytes=8000)
    second = output.plan.shards[1]
    for part in range(second.parts):
        (output.directory / part_key(1, part)).unlink()
    (output.directory / shard_manifest_key(1)).unlink()
    in_first = [row for row in output.kept if row < second.first_row]
    rows: list[int] = []
    extraction = threading.Thread(target=write_shard, args=(output, second))
    for sample in StatesStream(output.directory, follow=True, poll_seconds=0.01):
        check_states(output, sample)
        rows.append(sample.row)
        if len(rows) == len(in_first):
            assert sorted(rows) == in_first
            extraction.start()
    extraction.join()
    assert sorted(rows) == output.kept


def test_a_stream_that_does_not_follow_takes_what_is_there(tmp_path: Path) -> None:
    output = write_extracted(LocalStore(tmp_path / "output"), shards=2)
    (output.directory / part_key(1, 0)).unlink()
    rows = [sample.row for sample in StatesStream(output.directory)]
    assert 0 < len(rows) < len(output.kept)


def test_a_following_stream_ends_when_a_dataset_is_finished_without_some_shards(tmp_path: Path) -> None:
    output = write_extracted(LocalStore(tmp_path / "output"), shards=2)
    for path in (output.directory / "states" / "shard-00001").iterdir():
        path.unlink()
    policy = output.job.spec.failure_policy.model_copy(update={"max_failed_shards": 1})
    job = output.job.model_copy(update={"spec": output.job.spec.model_copy(update={"failure_policy": policy})})
    finalize(job, output.store, scratch=tmp_path / "scratch", meter=Meter("finalize"))
    rows = [sample.row for sample in StatesStream(output.directory, follow=True)]
    assert np.array_equal(sorted(rows), [row for row in output.kept if row < output.plan.shards[1].first_row])
