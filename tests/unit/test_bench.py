"""`headframe bench`: its arithmetic, what it draws from a plan, and a whole measurement of a small model on the CPU."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import yaml
from prepared_output import random_samples, write_prepared
from torch import nn
from typer.testing import CliRunner

from headframe_api.errors import ConfigError, DataError, HeadframeError, StoppedError
from headframe_api.names import tokens_key
from headframe_api.spec import S3Spec
from headframe_worker.bench.commits import Commit, steady_bytes_per_second
from headframe_worker.bench.estimate import estimate
from headframe_worker.bench.matmuls import record_products, replay_seconds
from headframe_worker.bench.measure import BenchOptions, bench
from headframe_worker.bench.place import temporary_place
from headframe_worker.bench.timing import median_seconds
from headframe_worker.bench.workload import count_tokens, evenly, padding, shard_batches
from headframe_worker.cli.main import app
from headframe_worker.job_file import load_job
from headframe_worker.prepare.tokens_file import read_tokens
from headframe_worker.stores.observer import StoreObserver

CPU = torch.device("cpu")


def test_each_shard_goes_to_the_worker_that_is_free_first_and_loads_the_model() -> None:
    found = estimate([100, 300, 100, 0, 100], tokens_per_second=10, load_seconds=5, workers=2)
    # Worker 1: 15, then 15, then 15 seconds; worker 2: 35.
    assert (found.replica_seconds, found.wall_seconds) == (80, 45)
    assert estimate([100], tokens_per_second=10, load_seconds=5, workers=0).wall_seconds == 15
    assert estimate([], tokens_per_second=10, load_seconds=5, workers=3).wall_seconds == 0


def test_the_steady_pace_leaves_out_the_start_and_the_last_write() -> None:
    # A part a second, committed in pairs, after ten seconds in which the pipeline filled up.
    pairs = [Commit(10.0 + 2 * (number // 2), 100) for number in range(8)]
    assert steady_bytes_per_second(pairs[::-1]) == 100
    assert steady_bytes_per_second([Commit(10.0 + number, 100) for number in range(6)]) == 100
    assert steady_bytes_per_second(pairs[:3]) is None


def test_products_are_the_forward_s_own_in_their_order() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4))
    products = record_products(lambda: model(torch.ones(2, 5, 8)))
    assert [(product.rows, tuple(product.weight.shape)) for product in products] == [(10, (8, 16)), (10, (16, 4))]
    assert sum(product.flops for product in products) == 2 * 10 * (8 * 16 + 16 * 4)
    assert products[0].weight.data_ptr() == model[0].weight.data_ptr()  # no copy
    assert replay_seconds(products, repeats=1) > 0


def test_products_of_experts_are_counted_however_transformers_computes_them() -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 32}
    model = tiny_models.build("qwen3_moe", **config).model
    ids = torch.randint(3, tiny_models.VOCABULARY, (2, 20))
    flops = sum(product.flops for product in record_products(lambda: model(input_ids=ids, use_cache=False)))
    tokens, hidden, experts, used, expert_width, heads, kv_heads, head = 40, 32, 4, 2, 32, 4, 2, 8
    layer = hidden * head * (heads + 2 * kv_heads) + heads * head * hidden + hidden * experts
    layer += used * 3 * hidden * expert_width
    assert flops == 2 * tokens * 2 * layer


def test_time_is_taken_after_a_first_call_and_within_bounds() -> None:
    calls: list[int] = []
    median_seconds(lambda: calls.append(1), [CPU], repeats=3)
    assert len(calls) == 4
    calls.clear()
    median_seconds(lambda: calls.append(1), [CPU], repeats=3, within_seconds=0)
    assert len(calls) == 2


def test_batches_are_drawn_from_all_over_the_shard(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path / "model")
    samples = random_samples([int(length) for length in np.random.default_rng(1).integers(4, 100, 300)], 160)
    _, plan, store = write_prepared(
        tmp_path / "out",
        tmp_path / "model",
        samples,
        states={"preset": "none"},
        part_target_bytes=1 << 20,
    )
    tokens = read_tokens(store.fetch(tokens_key(0), tmp_path))
    batches = shard_batches(plan, tokens, 256)
    assert sorted(np.concatenate([entry.rows for entry in batches])) == list(range(300))
    assert count_tokens(batches) == plan.tokens
    padded = sum(len(entry.rows) * max(len(samples[row]) for row in entry.rows) for entry in batches)
    assert padding(batches) == pytest.approx(1 - plan.tokens / padded)
    assert max(len(entry.rows) * max(len(samples[row]) for row in entry.rows) for entry in batches) <= 256
    drawn = evenly(batches, plan.tokens // 5)
    assert count_tokens(drawn) == pytest.approx(plan.tokens / 5, rel=0.2)
    assert padding(drawn) == pytest.approx(padding(batches), abs=0.05)
    assert len(evenly(batches, 1)) == 1
    assert [entry.batch for entry in evenly(batches, 10 * plan.tokens)] == [entry.batch for entry in batches]


def test_the_place_lies_beside_the_output_and_is_gone_with_what_was_made_for_it(tmp_path: Path) -> None:
    output = tmp_path / "a/b/out"
    with temporary_place(str(output), None, S3Spec(), StoreObserver()) as place:
        place.write("states/shard-00000/part", [memoryview(b"x")])
        assert Path(place.uri).parent == output.parent
        assert not output.exists()
    assert list(tmp_path.iterdir()) == []
    output.mkdir(parents=True)
    (output / "mine").write_text("stays")
    with pytest.raises(DataError, match="broken"):
        _write_and_fail(output.as_uri())
    with temporary_place(str(output), str(output), S3Spec(), StoreObserver()) as place:  # told to
        assert Path(place.uri).parent == output
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert [path.name for path in output.iterdir()] == ["mine"]


def _write_and_fail(output: str) -> None:
    with temporary_place(output, None, S3Spec(), StoreObserver()) as place:
        place.write("key", [memoryview(b"x")])
        raise DataError("broken")


@pytest.mark.parametrize(
    ("output", "problem"), [("/", "another medium"), ("/proc", "another medium"), ("s3://bucket/", "bucket")]
)
def test_where_nothing_can_lie_beside_the_output_a_place_must_be_named(output: str, problem: str) -> None:
    with (
        pytest.raises(ConfigError, match=rf"{problem}.*--output"),
        temporary_place(output, None, S3Spec(endpoint="http://127.0.0.1:9"), StoreObserver()),
    ):
        pass


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of a tiny model and 300 samples, not prepared."""
    folder = tmp_path_factory.mktemp("bench")
    tiny_models.save("llama", folder / "model")
    lengths = np.random.default_rng(2).integers(4, 120, 300)
    rows = [json.dumps({"input_ids": sample.tolist()}) for sample in random_samples(lengths.tolist(), 160)]
    (folder / "tokens.jsonl").write_text("\n".join(rows) + "\n")
    return write_job(folder)


def write_job(folder: Path, **spec: Any) -> Path:
    job = {
        "apiVersion": "headframe.dev/v1alpha1",
        "kind": "ExtractionJob",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"source": str(folder / "model"), "gpus": 0, "dtype": "float32"},
            "dataset": {
                "source": str(folder / "tokens.jsonl"),
                "format": "tokens",
                "lossMask": "all",
                "maxLength": 128,
            },
            "states": {"preset": "none", "layers": [0, 2]},
            "output": {"uri": str(folder / "out")},
            "shards": 3,
            "workers": 2,
            **spec,
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder: when it was written, and what is in it."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def headframe(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_job_is_measured_before_and_after_it_is_prepared_and_its_output_never_touched(job_file: Path) -> None:
    folder = job_file.parent
    before = content(folder)
    text = headframe("bench", job_file, "--seconds", 2, "--samples", 100)
    assert "measured on the first 100 rows" in " ".join(text.split())
    assert "end to end" in text
    assert "expect" not in text
    assert content(folder) == before
    headframe("plan", job_file)
    before = content(folder)
    found = json.loads(headframe("bench", job_file, "--seconds", 2, "--json", "--quiet"))
    assert content(folder) == before
    trial, expected, plan = found["trial"], found["expected"], found["plan"]
    assert plan["samples"] == 300
    assert not plan["is_sample"]
    assert 0 < trial["tokens"] <= plan["tokens"]
    assert trial["parts"] >= 2  # twelve, unless the machine is slow
    assert trial["uri"].startswith(f"{folder}/out.headframe-bench-")
    assert trial["bytes"] > trial["tokens"] * 3 * 32 * 2  # three slots of 32 values in bfloat16
    assert trial["stage_seconds"]["forward"] <= trial["seconds"]
    assert 0 <= found["padding_fraction"] < 0.5
    # Seven products of llama's six layers, for each token with its padding.
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64
    assert found["flops_per_token"] == pytest.approx(2 * 6 * layer, rel=0.5)
    assert found["flops_per_token"] >= 2 * 6 * layer
    assert found["ceiling_flops"] > 0
    assert min(found["matmul_tokens_per_second"], found["forward_tokens_per_second"]) > 0
    load_seconds = sum(found["start_seconds"].values())
    hours = (3 * load_seconds + plan["tokens"] / expected["tokens_per_second"]) / 3600
    assert expected["replica_hours"] == pytest.approx(hours)
    assert hours / 3 < expected["wall_hours"] < hours
    assert expected["gpu_hours"] is None


def test_a_wish_to_stop_leaves_nothing_behind(job_file: Path, tmp_path: Path) -> None:
    before = content(job_file.parent)
    stop = threading.Event()

    def on_step(name: str) -> None:
        if name == "end to end":
            stop.set()

    with pytest.raises(StoppedError):
        bench(load_job(job_file), BenchOptions(2, 50, None, tmp_path), on_step=on_step, stop=stop)
    assert content(job_file.parent) == before
    assert not list(job_file.parent.glob("out.*"))


@pytest.mark.parametrize(
    ("spec", "arguments", "problem"),
    [
        ({"model": {"source": "/nowhere/model", "gpus": 0}}, [], "spec.model.source"),
        ({"output": {"uri": "/proc/nothing/out"}}, [], "cannot be written"),
        ({}, ["--output", "ftp://host/x"], "not supported"),
    ],
)
def test_mistakes_are_errors_of_the_job(
    job_file: Path, tmp_path: Path, spec: dict[str, Any], arguments: list[str], problem: str
) -> None:
    for name in ("model", "tokens.jsonl"):
        (tmp_path / name).symlink_to(job_file.parent / name)
    path = write_job(tmp_path, **spec)
    with pytest.raises(HeadframeError, match=problem) as caught:
        CliRunner().invoke(app, ["bench", str(path), *arguments], catch_exceptions=False)
    assert isinstance(caught.value, ConfigError)
