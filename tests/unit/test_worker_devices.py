"""Which GPUs and CPUs the worker processes of one machine get."""

from __future__ import annotations

import chat_models as tiny
import pytest

from headframe_api.errors import ConfigError
from headframe_worker.gpus import open_gpus, visible_gpus
from headframe_worker.run.cores import allowed_cpus, divide_cores, read_cores
from headframe_worker.run.devices import worker_cpus, worker_devices

ALL = frozenset(range(16))
# Two nodes of four cores, each core with two threads: 0 with 8, 1 with 9, and so on.
FIRST, SECOND = frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15})
CORES = {cpu: cpu % 8 for cpu in ALL}


@pytest.mark.parametrize(
    ("near", "allowed", "expected"),
    [
        ([FIRST], ALL, [FIRST]),
        ([FIRST, SECOND], ALL, [FIRST, SECOND]),
        ([FIRST, FIRST], ALL, [{0, 1, 8, 9}, {2, 3, 10, 11}]),
        ([FIRST, SECOND, FIRST, SECOND], ALL, [{0, 1, 8, 9}, {4, 5, 12, 13}, {2, 3, 10, 11}, {6, 7, 14, 15}]),
        ([frozenset(), frozenset()], ALL, [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
        (
            [FIRST, SECOND],
            FIRST,
            [{0, 1, 8, 9}, {2, 3, 10, 11}],
        ),  # the second's node is forbidden: both divide the first
        ([FIRST] * 3, ALL, [{0, 8}, {1, 9}, {2, 3, 10, 11}]),
        ([FIRST] * 5, ALL, [FIRST] * 5),
        ([FIRST | SECOND], ALL, [ALL]),
    ],
    ids=["alone", "apart", "together", "four", "unknown", "confined", "uneven", "crowded", "two nodes"],
)
def test_workers_divide_the_cores_near_their_gpus(
    near: list[frozenset[int]], allowed: frozenset[int], expected: list[set[int]]
) -> None:
    assert divide_cores(near, allowed, CORES) == expected


def test_cores_of_this_machine() -> None:
    cores = read_cores(allowed_cpus())
    assert set(cores) == allowed_cpus()
    assert all(cores[core] == core for core in set(cores.values()) & set(cores))


@pytest.mark.parametrize(
    ("visible", "gpus", "shards", "workers", "expected"),
    [
        ("0,1,2,3", 1, 10, None, [["0"], ["1"], ["2"], ["3"]]),
        ("0,1,2,3,4", 2, 10, None, [["0", "1"], ["2", "3"]]),
        ("GPU-a, GPU-b", 1, 10, 1, [["GPU-a"]]),
        ("0,1", 1, 1, None, [["0"]]),
        ("0,1", 0, 10, 3, [[], [], []]),
    ],
)
def test_one_worker_for_each_replica_that_fits(
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    gpus: int,
    shards: int,
    workers: int | None,
    expected: list[list[str]],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    spec = tiny.job_of("m", "d", "o", model_={"gpus": gpus}).spec
    assert worker_devices(spec, shards, workers) == expected


@pytest.mark.parametrize(
    ("gpus", "workers", "message"),
    [(3, None, r"spec\.model\.gpus: 3 asked, 2 visible"), (2, 2, "2 workers of 2 GPUs need 4; 2 are visible")],
)
def test_more_gpus_than_there_are(
    monkeypatch: pytest.MonkeyPatch, gpus: int, workers: int | None, message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match=message):
        worker_devices(tiny.job_of("m", "d", "o", model_={"gpus": gpus}).spec, 10, workers)


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_none(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert visible_gpus() == []
    assert open_gpus() == {}


def test_cpus_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers on GPUs of which nothing is known still do not share a core, if there are two."""
    first, second = worker_cpus([["7001"], ["7002"]])
    assert first | second == allowed_cpus()
    assert not first & second or len(set(read_cores(allowed_cpus()).values())) < 2
    assert worker_cpus([[], []]) == [frozenset(), frozenset()]
