"""Extracting a shard: what becomes of bad samples, of too little memory, of races, of restarts, and of a wish to stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from numpy.typing import NDArray
from prepared_output import extractor, random_samples, write_prepared
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from headframe_api.errors import ConfigError, DataError, StoppedError, TemporaryError
from headframe_api.job import ExtractionJob
from headframe_api.manifests import ShardManifest
from headframe_api.names import part_key, quarantine_key, shard_manifest_key
from headframe_api.plan import Plan
from headframe_worker.extract.stage import Extractor
from headframe_worker.meter import Meter
from headframe_worker.stores.base import Written
from headframe_worker.stores.local import LocalStore

LAYERS = [-1, 0, 3]
NAN_TOKEN = 7
ZERO_TOKEN = 8
LENGTHS = [int(length) for length in np.random.default_rng(5).integers(1, 40, 60)]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama whose embeddings of two tokens are broken: one gives NaN, one nothing but zeros."""
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_models.save("llama", directory)
    weights = load_file(directory / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[NAN_TOKEN] = float("nan")
    embedding[ZERO_TOKEN] = 0.0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def sound_samples(lengths: Sequence[int] = LENGTHS) -> list[NDArray[np.int64]]:
    """Samples without the two broken tokens."""
    return [np.where(sample < 10, sample + 10, sample) for sample in random_samples(lengths, tiny_models.VOCABULARY)]


Prepared = tuple[ExtractionJob, Plan, LocalStore]


def prepare(directory: Path, checkpoint: Path, samples: Sequence[NDArray[np.int64]], **options: Any) -> Prepared:
    """Small parts and batches, three layers and the last."""
    defaults: dict[str, Any] = {"states": {"layers": LAYERS}, "batch_tokens": 128, "part_target_bytes": 40_000}
    return write_prepared(directory, checkpoint, samples, **(defaults | options))


def read_parts(store: LocalStore, manifest: ShardManifest) -> dict[int, torch.Tensor]:
    """Row -> its states [t, S, H]."""
    rows = {}
    for entry in manifest.parts:
        tensors = load_file(store.directory / part_key(manifest.shard, entry.part))
        offsets = tensors["offsets"].tolist()
        for index, row in enumerate(tensors["rows"].tolist()):
            rows[row] = tensors["hidden_states"][offsets[index] : offsets[index + 1]]
    return rows


def files_of(store: LocalStore) -> dict[str, tuple[int, int]]:
    """Each part's inode and time of change."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in (store.directory / "states").glob("**/*.safetensors")
    }


def test_bad_samples_are_quarantined_and_the_others_are_right(tmp_path: Path, checkpoint: Path) -> None:
    clean = sound_samples()
    reference_store = prepare(tmp_path / "clean", checkpoint, clean)
    reference = read_parts(reference_store[2], extractor(*reference_store).run(0))

    samples = [sample.copy() for sample in clean]
    broken = {4: "NonFinite", 17: "NonFinite", 31: "AllZero"}
    samples[4][-1] = NAN_TOKEN
    samples[17][0] = NAN_TOKEN
    samples[31][:] = ZERO_TOKEN
    meter = Meter("extract")
    job, plan, store = prepare(tmp_path / "output", checkpoint, samples)
    manifest = extractor(job, plan, store, meter=meter).run(0)

    stored = read_parts(store, manifest)
    assert sorted(stored) == [row for row in range(len(samples)) if row not in broken]
    for row, states in stored.items():
        assert states.shape == (len(samples[row]), len(LAYERS) + 1, 32)
        assert torch.allclose(states, reference[row], rtol=1e-4, atol=1e-5), row
    assert manifest.samples == len(samples) - len(broken)
    assert manifest.tokens == sum(len(sample) for row, sample in enumerate(samples) if row not in broken)

    lines = [json.loads(line) for line in (store.directory / quarantine_key("extract", 0)).read_text().splitlines()]
    assert {line["row"]: line["reason"] for line in lines} == broken
    assert {line["sample_id"] for line in lines} == {f"sample-{row}" for row in broken}
    assert meter.quarantined == {"NonFinite": 2, "AllZero": 1}
    assert meter.non_finite_samples == 2
    assert all(np.isfinite(slot.norm_max) for entry in manifest.parts for slot in entry.statistics)


def test_statistics_are_those_of_the_stored_states(tmp_path: Path, checkpoint: Path) -> None:
    job, plan, store = prepare(tmp_path, checkpoint, sound_samples())
    manifest = extractor(job, plan, store).run(0)
    for entry in manifest.parts:
        states = load_file(tmp_path / part_key(0, entry.part))["hidden_states"].double()
        for slot, statistics in enumerate(entry.statistics):
            norms = states[:, slot].norm(dim=-1)
            assert statistics.tokens == len(states)
            assert statistics.sum == pytest.approx(float(states[:, slot].sum()), abs=1e-2)
            assert statistics.norm_mean == pytest.approx(float(norms.mean()), rel=1e-5)
            assert (statistics.norm_min, statistics.norm_max) == pytest.approx(
                (float(norms.min()), float(norms.max())), rel=1e-5
            )


def test_the_run_is_described(tmp_path: Path, checkpoint: Path) -> None:
    meter = Meter("extract")
    job, plan, store = prepare(tmp_path, checkpoint, sound_samples())
    manifest = extractor(job, plan, store, meter=meter).run(0)
    (run,) = manifest.runs
    assert run.device == "CPU"
    assert run.parts == [entry.part for entry in manifest.parts]
    assert sum(stretch.tokens for stretch in run.throughput) == manifest.tokens == plan.tokens
    assert run.stage_seconds["forward"] > 0
    assert run.stage_seconds["write"] > 0
    assert run.self_check_error < 1e-5
    assert 0 <= run.padding_fraction < 0.5
    assert run.model_load_seconds > 0
    progress = meter.progress()
    assert (progress.samples, progress.tokens) == (plan.samples, plan.tokens)
    assert progress.bytes == manifest.bytes


def limit_memory(extraction: Extractor, padded_tokens: int) -> None:
    """A device on which more padded tokens than these do not fit: a fault that cannot be had otherwise on the CPU."""

    def check(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[0] * args[0].shape[1] > padded_tokens:
            raise torch.OutOfMemoryError("out of memory")

    assert extraction._engine is not None
    extraction._engine._pipeline.capture.stack.layers[1].register_forward_pre_hook(check)


def test_out_of_memory_halves_the_budget_and_loses_nothing(tmp_path: Path, checkpoint: Path) -> None:
    plain = prepare(tmp_path / "plain", checkpoint, sound_samples())
    expected = read_parts(plain[2], extractor(*plain).run(0))

    meter = Meter("extract")
    job, plan, store = prepare(tmp_path / "output", checkpoint, sound_samples(), batch_tokens=400, shards=2)
    extraction = extractor(job, plan, store, meter=meter)
    extraction.load()
    limit_memory(extraction, 120)
    stored = read_parts(store, extraction.run(0))
    retries = meter.out_of_memory_retries
    assert retries >= 1
    stored |= read_parts(store, extraction.run(1))
    assert meter.out_of_memory_retries == retries, "the second shard must begin with what the first one learned"
    assert sorted(stored) == sorted(expected)
    assert all(torch.allclose(stored[row], expected[row], rtol=1e-4, atol=1e-5) for row in expected)


def test_a_sample_that_does_not_fit_alone_is_named(tmp_path: Path, checkpoint: Path) -> None:
    samples = sound_samples([5, 9, 100, 7])
    job, plan, store = prepare(tmp_path, checkpoint, samples)
    extraction = extractor(job, plan, store)
    extraction.load()
    limit_memory(extraction, 50)
    with pytest.raises(DataError, match=r"row 2 of tokens/ \(100 tokens\)") as error:
        extraction.run(0)
    assert error.value.exit_code == 65


def test_a_long_sample_waits_for_the_memory_of_those_before_it(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second sample finds no memory while the first one's states are on their way, and goes through after them."""
    samples = sound_samples([100, 90, 80])
    plain = prepare(tmp_path / "plain", checkpoint, samples)
    expected = read_parts(plain[2], extractor(*plain).run(0))
    job, plan, store = prepare(tmp_path / "output", checkpoint, samples, batch_tokens=50)
    meter = Meter("extract")
    extraction = extractor(job, plan, store, meter=meter)
    extraction.load()
    out_of_memory = threading.Event()

    def fail_once(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[1] == 90 and not out_of_memory.is_set():
            out_of_memory.set()
            raise torch.OutOfMemoryError("out of memory")

    assert extraction._engine is not None
    extraction._engine._pipeline.capture.stack.layers[1].register_forward_pre_hook(fail_once)
    batch_done = meter.batch_done
    monkeypatch.setattr(meter, "batch_done", lambda **counts: out_of_memory.wait(60) and batch_done(**counts))
    stored = read_parts(store, extraction.run(0))
    assert meter.out_of_memory_retries == 1
    assert all(torch.allclose(stored[row], expected[row], rtol=1e-4, atol=1e-5) for row in expected)


def test_batches_change_no_row_and_hardly_a_value(tmp_path: Path, checkpoint: Path) -> None:
    manifests, parts = [], []
    for batch_tokens in (40, 1000):
        job, plan, store = prepare(tmp_path / str(batch_tokens), checkpoint, sound_samples(), batch_tokens=batch_tokens)
        manifests.append(extractor(job, plan, store).run(0))
        parts.append([load_file(store.directory / part_key(0, entry.part)) for entry in manifests[-1].parts])
    for one, other in zip(*parts, strict=True):
        for name in ("rows", "offsets", "token_ids", "loss_mask"):
            assert torch.equal(one[name], other[name])
        assert torch.allclose(one["hidden_states"], other["hidden_states"], rtol=1e-4, atol=1e-5)


def test_ten_thousand_tiny_samples(tmp_path: Path, checkpoint: Path) -> None:
    job, plan, store = prepare(
        tmp_path, checkpoint, sound_samples([1] * 10_000), batch_tokens=4096, part_target_bytes=1 << 20
    )
    assert extractor(job, plan, store).run(0).samples == 10_000


# Restarts and races.


def test_a_restart_computes_only_what_is_missing(tmp_path: Path, checkpoint: Path) -> None:
    job, plan, store = prepare(tmp_path, checkpoint, sound_samples())
    whole = extractor(job, plan, store).run(0)
    expected = read_parts(store, whole)
    assert len(whole.parts) >= 4
    lost = [1, 3]
    for part in lost:
        (tmp_path / part_key(0, part)).unlink()
    (tmp_path / shard_manifest_key(0)).unlink()
    before = files_of(store)

    meter = Meter("extract")
    again = extractor(job, plan, store, meter=meter).run(0)
    after = files_of(store)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(whole.parts)
    assert again.runs[0].parts == lost
    assert [entry.model_dump() for entry in again.parts] == [entry.model_dump() for entry in whole.parts]
    stored = read_parts(store, again)
    assert all(torch.equal(stored[row], expected[row]) for row in expected)
    progress = meter.progress()
    assert progress.samples == plan.samples
    assert meter.samples == sum(whole.parts[part].samples for part in lost)


def test_a_committed_shard_loads_no_model(tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, plan, store = prepare(tmp_path, checkpoint, sound_samples())
    manifest = extractor(job, plan, store).run(0)
    caplog.set_level("INFO", "headframe_worker")
    second = extractor(job, plan, store)
    assert second.run(0) == manifest
    assert "shard 0 is committed already" in caplog.text
    assert second._engine is None


def test_only_the_manifest_is_missing(tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, plan, store = prepare(tmp_path, checkpoint, sound_samples())
    manifest = extractor(job, plan, store).run(0)
    (tmp_path / shard_manifest_key(0)).unlink()
    caplog.set_level("INFO", "headframe_worker")
    second = extractor(job, plan, store)
    again = second.run(0)
    assert second._engine is None
    assert again.parts == manifest.parts
    assert again.runs == []
    assert f"shard 0: of its parts {len(manifest.parts)} are committed already, 0 are missing" in caplog.text


@pytest.mark.parametrize("what", ["part", "manifest"])
def test_output_of_another_plan_is_left_alone(tmp_path: Path, checkpoint: Path, what: str) -> None:
    job, plan, store = prepare(tmp_path, checkpoint, sound_samples())
    extractor(job, plan, store).run(0)
    if what == "part":
        (tmp_path / shard_manifest_key(0)).unlink()
    before = files_of(store)
    job, plan, store = prepare(tmp_path, checkpoint, sound_samples(), states={"layers": [0, 1]})
    with pytest.raises(ConfigError, match="belongs to plan"):
        extractor(job, plan, store).run(0)
    assert files_of(store) == before


def test_a_part_cut_short_is_named(tmp_path: Path, checkpoint: Path) -> None:
    job, plan, store = prepare(tmp_path, checkpoint, sound_samples())
    extractor(job, plan, store).run(0)
    (tmp_path / shard_manifest_key(0)).unlink()
    path = tmp_path / part_key(0, 2)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"part-00002.safetensors: has [\d,]+ bytes, its header needs"):
        extractor(job, plan, store).run(0)


def test_two_workers_on_one_shard_do_no_harm(tmp_path: Path, checkpoint: Path) -> None:
    job, plan, store = prepare(tmp_path, checkpoint, sound_samples(LENGTHS * 4))
    start, tie_weights = threading.Barrier(2), PreTrainedModel.tie_weights
    manifests: list[ShardManifest | BaseException] = []

    def work() -> None:
        extraction = extractor(job, plan, LocalStore(tmp_path))
        extraction.load()
        start.wait()
        try:
            manifests.append(extraction.run(0))
        except BaseException as error:
            manifests.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert PreTrainedModel.tie_weights is tie_weights, "Transformers swaps it while it loads, in one thread at a time"
    one, other = manifests
    assert isinstance(one, ShardManifest)
    assert one == other
    assert sorted(read_parts(store, one)) == list(range(plan.samples))


def test_two_processes_on_one_shard_do_no_harm(tmp_path: Path, checkpoint: Path) -> None:
    """The command itself, as pods run it."""
    job, plan, store = prepare(tmp_path / "output", checkpoint, sound_samples())
    manifest_path = tmp_path / "job.yaml"
    manifest_path.write_text(json.dumps(job.without_server_fields()))
    command = [sys.executable, "-m", "headframe_worker.cli.main", "extract", str(manifest_path), "--port", "0"]
    environment = os.environ | {"JOB_COMPLETION_INDEX": "0", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"HEADFRAME_TERMINATION_LOG": str(tmp_path / f"termination-{index}")},
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()
    manifest = ShardManifest.model_validate_json((store.directory / shard_manifest_key(0)).read_bytes())
    assert sorted(read_parts(store, manifest)) == list(range(plan.samples))
    for index in range(2):
        message = json.loads((tmp_path / f"termination-{index}").read_text())
        assert (message["reason"], message["samples"]) == ("Completed", plan.samples)


# Stopping and failing.


class WatchedStore(LocalStore):
    """A directory that tells when a part is about to be written, and waits if asked to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.writes = 0
        self.at_write = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.fail: Exception | None = None

    def write(self, key: str, buffers: Sequence[memoryview], *, exclusive: bool = False) -> Written:
        self.writes += 1
        self.at_write.set()
        self.go_on.wait()
        if self.fail is not None:
            raise self.fail
        return super().write(key, buffers, exclusive=exclusive)


def test_a_wish_to_stop_leaves_whole_parts_and_the_next_run_goes_on(tmp_path: Path, checkpoint: Path) -> None:
    job, plan, _ = prepare(tmp_path, checkpoint, sound_samples(LENGTHS * 8), part_target_bytes=20_000)
    store = WatchedStore(tmp_path)
    stop = store.at_write  # the wish comes with the first write
    with pytest.raises(StoppedError) as error:
        extractor(job, plan, store, stop=stop).run(0)
    assert error.value.exit_code == 143
    committed = files_of(store)
    assert 1 <= len(committed) < plan.shards[0].parts
    assert not list(tmp_path.glob("**/.headframe-*"))
    manifest = extractor(job, plan, store).run(0)
    assert {name: files_of(store)[name] for name in committed} == committed
    assert manifest.samples == plan.samples


def test_a_write_that_hangs_does_not_outlast_the_grace(tmp_path: Path, checkpoint: Path) -> None:
    job, plan, _ = prepare(tmp_path, checkpoint, sound_samples(LENGTHS * 8), part_target_bytes=20_000)
    store = WatchedStore(tmp_path)
    store.go_on.clear()
    meter = Meter("extract")
    try:
        with pytest.raises(StoppedError):
            extractor(job, plan, store, stop=store.at_write, grace_seconds=0.3, meter=meter).run(0)
        assert files_of(store) == {}
    finally:
        store.go_on.set()


def test_backpressure_bounds_what_is_computed_ahead(tmp_path: Path, checkpoint: Path) -> None:
    """While no part can be written, only as many parts are computed as there are buffers."""
    job, plan, _ = prepare(tmp_path, checkpoint, sound_samples(LENGTHS * 8), part_target_bytes=20_000)
    store = WatchedStore(tmp_path)
    store.go_on.clear()
    meter, stop = Meter("extract"), threading.Event()
    extraction = extractor(job, plan, store, stop=stop, grace_seconds=0.2, meter=meter)
    extraction.load()
    failure: list[BaseException] = []

    def work() -> None:
        try:
            extraction.run(0)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    store.at_write.wait()
    while not settled(meter):
        thread.join(0.05)
    buffers, bytes_per_token = 3, plan.states.bytes_per_token(32)
    assert meter.tokens <= buffers * (20_000 // bytes_per_token + max(LENGTHS))
    assert meter.tokens < plan.tokens / 4
    stop.set()
    thread.join()
    store.go_on.set()
    assert isinstance(failure[0], StoppedError)


def settled(meter: Meter) -> bool:
    """Whether no batch has come through for a while."""
    return time.monotonic() - meter.moved_at > 0.5


def test_a_full_disk_stops_with_its_reason_and_resumes(tmp_path: Path, checkpoint: Path) -> None:
    job, plan, _ = prepare(tmp_path, checkpoint, sound_samples())
    store = WatchedStore(tmp_path)
    store.fail = TemporaryError("no space left", reason="NoSpaceLeft")
    with pytest.raises(TemporaryError, match="no space left"):
        extractor(job, plan, store).run(0)
    store.fail = None
    assert extractor(job, plan, store).run(0).samples == plan.samples


# Checkpoints.


def rewrite(directory: Path, change: Any) -> None:
    """Change a checkpoint's weights."""
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.3.mlp.up_proj.weight"), r"lacks .*layers\.3\.mlp\.up_proj\.weight"),
        (lambda w: w.pop("model.embed_tokens.weight"), r"lacks .*embed_tokens\.weight"),
        (lambda w: w.pop("model.norm.weight"), r"lacks .*norm\.weight"),
        (
            lambda w: w.update({"model.layers.2.self_attn.q_proj.weight": torch.zeros(16, 32)}),
            r"another shape .*layers\.2\.self_attn\.q_proj\.weight",
        ),
        (
            lambda w: w.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}),
            r"no place for: .*layers\.1\.self_attn\.q_proj\.bias",
        ),
    ],
    ids=["layer", "embedding", "norm", "shape", "stray-bias"],
)
def test_a_checkpoint_that_does_not_fit_its_configuration_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    tiny_models.save("llama", tmp_path / "model")
    rewrite(tmp_path / "model", change)
    job, plan, store = prepare(tmp_path / "output", tmp_path / "model", sound_samples())
    with pytest.raises(ConfigError, match=message) as error:
        extractor(job, plan, store).run(0)
    assert error.value.reason == "IncompleteCheckpoint"


def test_weights_that_the_states_do_not_need_may_be_absent_or_extra(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path / "model")

    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights["lm_head.weight"]
        weights["mtp.layers.0.fc.weight"] = torch.zeros(4, 4)
        weights["model.layers.6.mlp.up_proj.weight"] = torch.zeros(4, 4)  # a prediction layer behind the last
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    rewrite(tmp_path / "model", change)
    job, plan, store = prepare(tmp_path / "output", tmp_path / "model", sound_samples())
    assert extractor(job, plan, store).run(0).samples == plan.samples


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing-shard"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    if damage == "truncated":
        os.truncate(files[1], files[1].stat().st_size - 8)
    elif damage == "garbage":
        files[1].write_bytes(b"<html>404</html>" * 100)
    else:
        files[1].unlink()
    job, plan, store = prepare(tmp_path / "output", tmp_path / "model", sound_samples())
    with pytest.raises(ConfigError, match=files[1].name):
        extractor(job, plan, store).run(0)


def test_a_sharded_checkpoint_gives_the_same_states(tmp_path: Path) -> None:
    model = tiny_models.save("qwen3", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    stored = []
    for name in ("one", "many"):
        job, plan, store = prepare(tmp_path / f"output-{name}", tmp_path / name, sound_samples())
        stored.append(read_parts(store, extractor(job, plan, store).run(0)))
    assert all(torch.equal(stored[0][row], stored[1][row]) for row in stored[0])


def test_a_changed_model_is_refused(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path / "model")
    job, plan, store = prepare(tmp_path / "output", tmp_path / "model", sound_samples())
    tiny_models.save("llama", tmp_path / "model", seed=1)
    with pytest.raises(ConfigError, match="has changed since the plan was made"):
        extractor(job, plan, store).run(0)


def test_layers_that_are_not_needed_are_not_kept(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path / "model")
    job, plan, store = prepare(
        tmp_path / "output", tmp_path / "model", sound_samples(), states={"layers": [1, 2], "last": "none"}
    )
    extraction = extractor(job, plan, store)
    extraction.run(0)
    assert extraction._engine is not None
    assert len(extraction._engine._pipeline.capture.stack.layers) == 3


def test_token_ids_beyond_the_embedding_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    samples = sound_samples()
    samples[LENGTHS.index(min(LENGTHS))][0] = tiny_models.VOCABULARY + 5
    job, plan, store = prepare(tmp_path, checkpoint, samples)
    with pytest.raises((ConfigError, DataError), match=str(tiny_models.VOCABULARY)):
        extractor(job, plan, store).run(0)


MEMORY_SCRIPT = """
import resource, sys, threading, torch
from pathlib import Path
from headframe_worker.extract.stage import Extractor
from headframe_worker.job_file import load_job
from headframe_worker.meter import Meter
from headframe_worker.documents import read_plan
from headframe_worker.stores.local import LocalStore

for name in sys.argv[1:]:
    job, store = load_job(Path(name, "job.yaml")), LocalStore(Path(name, "output"))
    extractor = Extractor(job, read_plan(store), store, devices=[torch.device("cpu")], scratch=Path(name),
        meter=Meter("extract"), stop=threading.Event())
    extractor.run(0)
    extractor.close()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_memory_does_not_grow_with_the_data(tmp_path: Path, checkpoint: Path) -> None:
    """Peak memory over 8 MB of states, and over ten times as much."""
    sizes = []
    for times in (1, 10):
        job, plan, _ = prepare(
            tmp_path / str(times) / "output",
            checkpoint,
            sound_samples([100] * 160 * times),
            batch_tokens=1600,
            part_target_bytes=1 << 20,
        )
        (tmp_path / str(times) / "job.yaml").write_text(json.dumps(job.without_server_fields()))
        sizes.append(plan.bytes)
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path / "1"), str(tmp_path / "10")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    small, large = map(int, result.stdout.split())
    assert large - small < (sizes[1] - sizes[0]) / 4
