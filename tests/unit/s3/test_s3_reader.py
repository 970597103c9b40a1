"""The readers on a dataset that lies in a bucket: the same samples, few requests, several at once, and no fault seen."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Generator, Iterator
from typing import cast

import pytest
import torch
from synthetic_output import SyntheticOutput, encode, write_finished
from torch.utils.data import DataLoader

from headframe_api.names import part_key
from headframe_api.spec import S3Spec
from headframe_worker.reader import PartBatchSampler, Sample, StatesDataset, StatesStream, collate_packed
from headframe_worker.reader.stored_part import read_header
from testbed.faulty_proxy import FaultyProxy, Request, operation
from testbed.s3 import S3Server


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> SyntheticOutput:
    return write_finished(tmp_path_factory.mktemp("reader"), shards=3, part_target_bytes=8000)


@pytest.fixture(scope="module")
def uri(output: SyntheticOutput, s3_server: S3Server) -> str:
    bucket = s3_server.new_bucket()
    for info in output.store.list():
        s3_server.client().upload_file(str(output.directory / info.key), bucket, f"out/{info.key}")
    return f"s3://{bucket}/out"


@pytest.fixture
def dataset(uri: str, proxy: FaultyProxy) -> Iterator[StatesDataset]:
    """Behind a proxy that counts requests, and fails where it is told to."""
    return StatesDataset(uri, S3Spec(endpoint=proxy.endpoint))


@pytest.fixture(scope="module")
def first_bytes(output: SyntheticOutput) -> dict[str, int]:
    """Where the states of each part begin."""
    return {
        info.key: read_header(output.store, info.key, at_least_bytes=100).tensors["hidden_states"].start
        for info in output.store.list("states/")
        if info.key.endswith(".safetensors")
    }


@pytest.fixture
def reads_states(first_bytes: dict[str, int]) -> Callable[[Request], bool]:
    """Whether a request is for the states at the beginning of a part."""

    def matches(request: Request) -> bool:
        first_byte = first_bytes.get(request.path.partition("/out/")[2])
        return request.headers.get("range", "").startswith(f"bytes={first_byte}-")

    return matches


def check(output: SyntheticOutput, sample: Sample) -> None:
    stored, _ = encode(output.states[sample.row], "bfloat16")
    assert sample.sample_id == f"sample-{sample.row}"
    assert sample.token_ids.tolist() == output.tokens[sample.row].tolist()
    assert sample.loss_mask.tolist() == output.masks[sample.row].tolist()
    assert torch.equal(sample.hidden_states, stored[:, :3])
    assert sample.last is not None
    assert torch.equal(sample.last, stored[:, 3])


def test_any_order_costs_one_ranged_request_a_sample(
    output: SyntheticOutput, dataset: StatesDataset, proxy: FaultyProxy
) -> None:
    list(map(dataset.__getitem__, range(len(dataset))))  # so that all parts are known
    proxy.requests.clear()
    for item in torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1)).tolist():
        sample = dataset[item]
        assert sample.row == output.kept[item]
        check(output, sample)
    assert proxy.requests == {"GetObject": len(dataset)}


def test_a_sampler_in_workers_gives_every_sample_once_in_its_order(
    output: SyntheticOutput, dataset: StatesDataset
) -> None:
    sampler = PartBatchSampler(dataset, batch_tokens=150, seed=2)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_packed, num_workers=2)
    rows = [row for batch in loader for row in batch.rows.tolist()]
    assert rows == [output.kept[item] for batch in sampler for item in batch]
    assert sorted(rows) == output.kept


@pytest.mark.parametrize("reader", ["batch", "stream"])
def test_several_requests_are_under_way_at_once(
    output: SyntheticOutput,
    dataset: StatesDataset,
    uri: str,
    proxy: FaultyProxy,
    reads_states: Callable[[Request], bool],
    first_bytes: dict[str, int],
    reader: str,
) -> None:
    """The first request for states is answered once there is a second: read one after the other, that would be never."""
    second, arrived = threading.Event(), iter(range(10**6))

    def meet() -> None:
        if next(arrived):
            second.set()
        assert second.wait(60)

    firsts = [int(part[0]) for part in PartBatchSampler(dataset, batch_samples=1, shuffle=False)._parts]
    proxy.inject(reads_states, times=10**6, before=meet)
    stream = StatesStream(uri, S3Spec(endpoint=proxy.endpoint))
    samples = dataset.__getitems__(firsts) if reader == "batch" else list(stream)
    assert next(arrived) == len(first_bytes)
    for sample in samples:
        check(output, sample)


@pytest.mark.parametrize("follow", [False, True])
def test_a_stream_of_a_finished_dataset_misses_nothing_that_a_listing_hides(
    output: SyntheticOutput, uri: str, proxy: FaultyProxy, follow: bool
) -> None:
    nothing = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    proxy.inject(operation("ListObjectsV2"), answer=(200, ""), text=nothing)
    stream = StatesStream(uri, S3Spec(endpoint=proxy.endpoint), follow=follow)
    assert sorted(sample.row for sample in stream) == output.kept
    assert proxy.requests["ListObjectsV2"] == 1
    again = pickle.loads(pickle.dumps(stream))  # as a DataLoader does for each of its workers
    assert sorted(sample.row for sample in again) == sorted(sample.row for sample in stream) == output.kept


def test_faults_on_the_way_are_not_seen(
    output: SyntheticOutput, dataset: StatesDataset, uri: str, proxy: FaultyProxy
) -> None:
    struck = iter(range(10**6))
    faults: list[dict[str, object]] = [{"answer": (503, "SlowDown")}, {"truncate_bytes": 9}, {"lose_answer": True}]
    for number, fault in enumerate(faults):
        proxy.inject(
            lambda request, number=number: operation("GetObject")(request) and next(struck) % 12 == 4 * number,
            times=10**6,
            **fault,
        )
    for item in range(len(dataset)):
        check(output, dataset[item])
    rows = []
    for sample in StatesStream(uri, S3Spec(endpoint=proxy.endpoint)):
        check(output, sample)
        rows.append(sample.row)
    assert sorted(rows) == output.kept
    assert next(struck) > 100


def test_a_stream_that_is_broken_off_waits_for_nothing(
    output: SyntheticOutput, uri: str, proxy: FaultyProxy, reads_states: Callable[[Request], bool]
) -> None:
    """The reads ahead are in an outage, which they would outlast for minutes. Later the same stream gives all again."""
    stream, struck, well = StatesStream(uri, S3Spec(endpoint=proxy.endpoint)), threading.Event(), threading.Event()

    def strikes(request: Request) -> bool:
        if not reads_states(request) or request.path.endswith(part_key(0, 0)) or well.is_set():
            return False
        struck.set()
        return True

    proxy.inject(strikes, times=10**6, answer=(503, "SlowDown"))
    samples = cast("Generator[Sample]", iter(stream))
    next(samples)
    assert struck.wait(30)
    breaking_off = threading.Thread(target=samples.close)
    breaking_off.start()
    breaking_off.join(30)
    assert not breaking_off.is_alive()
    well.set()
    assert sorted(sample.row for sample in stream) == output.kept
