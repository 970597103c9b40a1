"""The plan: what it states, when it is reused and when refused, how shards are cut, and what two runs at once do."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chat_models as tiny
import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headframe_api.errors import ConfigError, StoppedError, TemporaryError
from headframe_api.job import ExtractionJob
from headframe_api.manifests import QuarantinedRow
from headframe_api.names import tokens_key
from headframe_api.plan import PART_TARGET_BYTES, Plan, plan_digest
from headframe_worker.documents import read_plan
from headframe_worker.format.cut import shard_parts
from headframe_worker.meter import Meter
from headframe_worker.prepare.model_structure import ModelSize
from headframe_worker.prepare.shards import ShardCutter, count_shards, percentile
from headframe_worker.prepare.stage import Prepared, prepare
from headframe_worker.prepare.tokens_file import read_tokens
from headframe_worker.stores.base import Written
from headframe_worker.stores.local import LocalStore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("model"))


def run(job: ExtractionJob, store: LocalStore | None = None, **options: Any) -> Prepared:
    output = store or LocalStore(Path(job.spec.output.uri))
    scratch = Path(job.spec.output.uri).parent / "scratch"
    return prepare(job, output, scratch=scratch, meter=Meter("prepare"), **{"processes": 1, **options})


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_plan_of_an_earlier_version_is_still_whole(model: Path, tmp_path: Path) -> None:
    """It lacks the fields that came later; its digest is over those that it has."""
    job = tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out")
    store = LocalStore(tmp_path / "out")
    run(job, store)
    earlier = json.loads((tmp_path / "out" / "plan.json").read_text())
    del earlier["model"]["embeddings_in_hidden_states"]
    earlier["digest"] = plan_digest(earlier)
    (tmp_path / "out" / "plan.json").write_text(json.dumps(earlier))
    assert read_plan(store).digest == earlier["digest"]
    assert run(job, store).plan.digest == earlier["digest"], "a resumed run takes it as it is"


def test_the_plan_agrees_with_the_tokens(model: Path, tmp_path: Path) -> None:
    job = tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out", shards=6)
    plan = run(job, part_target_bytes=100_000).plan
    assert plan.digest == plan.computed_digest()
    assert Plan.model_validate_json((tmp_path / "out" / "plan.json").read_bytes()) == plan
    assert json.loads((tmp_path / "out" / "job.json").read_text())["spec"] == job.without_server_fields()["spec"]
    row = 0
    lengths = []
    for shard in plan.shards:
        tokens = read_tokens(tmp_path / "out" / tokens_key(shard.index))
        assert (shard.first_row, shard.samples, shard.tokens) == (row, len(tokens), int(tokens.seq_len.sum()))
        assert shard.parts == len(shard_parts(plan, tokens.seq_len))
        assert abs(shard.tokens - plan.tokens / 6) <= plan.lengths.maximum
        row += len(tokens)
        lengths += tokens.seq_len.tolist()
    assert (plan.samples, plan.tokens) == (200, sum(lengths))
    assert (plan.lengths.minimum, plan.lengths.maximum) == (min(lengths), max(lengths))
    assert plan.lengths.p50 == np.percentile(lengths, 50, method="inverted_cdf")
    assert plan.lengths.p99 == np.percentile(lengths, 99, method="inverted_cdf")
    saved = datasets.load_from_disk(str(tmp_path / "out" / "tokens"))
    assert saved["seq_len"][:].tolist() == lengths
    assert plan.loss_tokens == sum(int(mask.sum()) for mask in saved["loss_mask"])
    first = json.loads(tiny.EXAMPLES.read_text(encoding="utf-8").splitlines()[0])
    assert saved[0]["sample_id"] == first["id"]
    assert saved[0]["input_ids"].dtype == saved[0]["loss_mask"].dtype
    assert str(saved[0]["input_ids"].dtype) == "torch.int64"


def test_several_processes_make_the_same_files(model: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in tiny.EXAMPLES.read_text(encoding="utf-8").splitlines()] * 15
    data = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    for name, processes in (("one", 1), ("two", 2)):
        run(tiny.job_of(model, data, tmp_path / name / "out", shards=3), processes=processes)
    one, two = (files_of(tmp_path / name / "out" / "tokens") for name in ("one", "two"))
    assert one == two


def test_unchanged_inputs_reuse_the_plan(model: Path, tmp_path: Path) -> None:
    job = tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out")
    first = run(job)
    before = files_of(tmp_path / "out")
    again = run(tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out", workers=5))
    assert (first.reused, again.reused) == (False, True)
    assert again.plan == first.plan
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({"dataset_": {"maxLength": 100}}, ["dataset.maxLength: was 4096, is now 100"]),
        ({"dataset_": {"lossMask": "all"}}, ["dataset.lossMask: was 'assistant', is now 'all'", "dataset.maskMethod"]),
        (
            {"dataset_": {"chatTemplate": tiny.GENERATION}},
            ["dataset.chatTemplateDigest", "'prefix', is now 'generation'"],
        ),
        ({"dataset_": {"limit": 5}}, ["dataset.limit: was None, is now 5"]),
        ({"states": {"layers": [2], "dtype": "float32"}}, ["states.layers: was [1, 5], is now [2]", "states.dtype"]),
        ({"shards": 2}, ["shards: was 1, is now 2"]),
        ({"model_": {"dtype": "float32"}}, ["model.dtype: was 'bfloat16', is now 'float32'"]),
    ],
)
def test_changed_inputs_are_refused_by_name(
    model: Path, tmp_path: Path, spec: dict[str, Any], names: Sequence[str]
) -> None:
    run(tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out"))
    before = files_of(tmp_path / "out")
    with pytest.raises(ConfigError) as caught:
        run(tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out", **spec))
    assert caught.value.reason == "InputsChanged"
    for name in names:
        assert name in caught.value.message
    assert "--fresh" in caught.value.message
    assert files_of(tmp_path / "out") == before


def test_a_changed_dataset_is_refused_and_fresh_begins_anew(model: Path, tmp_path: Path) -> None:
    data = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"text": "one"}, {"text": "two"}])
    job = tiny.job_of(model, data, tmp_path / "out", shards=2)
    run(job)
    for name in ("_SUCCESS", "manifest.json", "states/shard-00000/part-00000.safetensors", "notes.txt"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("old")
    tiny.write_jsonl(data, [{"text": "three"}])
    with pytest.raises(ConfigError, match=r"dataset\.filesDigest"):
        run(job)
    assert run(job, fresh=True).plan.samples == 1
    assert sorted(files_of(tmp_path / "out")) == [
        "job.json",
        "notes.txt",
        "plan.json",
        "tokens/dataset_info.json",
        "tokens/shard-00000.arrow",
        "tokens/state.json",
    ]


def test_a_run_that_was_cut_off_leaves_nothing_that_the_next_one_believes(model: Path, tmp_path: Path) -> None:
    class Falling(LocalStore):
        """The machine goes down when the third file is written."""

        def write_file(self, key: str, path: Path, *, exclusive: bool = False) -> Written:
            if key == tokens_key(2):
                raise KeyboardInterrupt
            return super().write_file(key, path, exclusive=exclusive)

    job = tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out", shards=4)
    with pytest.raises(KeyboardInterrupt):
        run(job, Falling(tmp_path / "out"))
    assert sorted(files_of(tmp_path / "out")) == [tokens_key(0), tokens_key(1)]
    fewer = run(tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out", shards=1))
    assert not fewer.reused
    assert [name for name in files_of(tmp_path / "out") if name.endswith(".arrow")] == [tokens_key(0)]


def test_two_at_once_agree(model: Path, tmp_path: Path) -> None:
    job = tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out", shards=3)
    barrier = threading.Barrier(2)
    results: list[Prepared] = []

    class Together(LocalStore):
        """Both have read that there is no plan before either writes one."""

        def check_writable(self) -> None:
            barrier.wait(timeout=60)
            super().check_writable()

    threads = [threading.Thread(target=lambda: results.append(run(job, Together(tmp_path / "out")))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert results[0].plan.digest == results[1].plan.digest
    assert datasets.load_from_disk(str(tmp_path / "out" / "tokens")).num_rows == 200


def test_the_loser_of_a_race_with_other_inputs_says_so(model: Path, tmp_path: Path) -> None:
    class Overtaken(LocalStore):
        """Another prepare commits its plan between our look and our own."""

        def check_writable(self) -> None:
            run(tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out", dataset_={"maxLength": 64}))

    with pytest.raises(TemporaryError, match="another prepare"):
        run(tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out"), Overtaken(tmp_path / "out"))


def test_too_many_refused_rows_stop_the_job_and_are_listed(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "good"}\n' * 97 + "bad\n" * 2 + '{"text": ""}\n')
    with pytest.raises(ConfigError) as caught:
        run(tiny.job_of(model, data, tmp_path / "out"))
    assert caught.value.reason == "TooManyQuarantined"
    for words in (
        "3 of 100 rows (3 %)",
        "InvalidJson: 2 (rows.jsonl:98: ",
        "EmptySample: 1",
        "quarantine/prepare.jsonl",
    ):
        assert words in caught.value.message
    lines = (tmp_path / "out" / "quarantine" / "prepare.jsonl").read_text().splitlines()
    assert [QuarantinedRow.model_validate_json(line).where for line in lines] == [
        f"rows.jsonl:{n}" for n in (98, 99, 100)
    ]
    assert not (tmp_path / "out" / "plan.json").exists()
    allowed = tiny.job_of(model, data, tmp_path / "out", failurePolicy={"maxQuarantinedFraction": 0.03})
    assert run(allowed).plan.quarantined == {"EmptySample": 1, "InvalidJson": 2}


def test_no_sample_left_is_an_error_whatever_is_allowed(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match="leaves no sample"):
        run(tiny.job_of(model, data, tmp_path / "out", failurePolicy={"maxQuarantinedFraction": 1}))


@pytest.mark.parametrize("on_too_long", ["truncate", "drop", "fail"])
def test_too_long(model: Path, tmp_path: Path, on_too_long: str) -> None:
    data = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [1] * length} for length in (4, 5, 6)])
    dataset = {"maxLength": 5, "onTooLong": on_too_long}
    job = tiny.job_of(model, data, tmp_path / "out", dataset_=dataset, failurePolicy={"maxQuarantinedFraction": 0})
    if on_too_long == "fail":
        with pytest.raises(ConfigError, match=r"rows\.jsonl:3: 6 tokens, over maxLength 5"):
            run(job)
        return
    plan = run(job).plan
    assert (plan.tokens, plan.quarantined) == ((14, {}) if on_too_long == "truncate" else (9, {"TooLong": 1}))


def test_max_length_over_the_models_limit_is_an_error(tmp_path: Path) -> None:
    model = tiny.save_tiny_model(tmp_path / "model", max_position_embeddings=64)
    with pytest.raises(ConfigError, match=r"spec\.dataset\.maxLength: 4096 .* 64"):
        run(tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out"))


def test_no_chat_template_names_the_two_ways_out(tmp_path: Path) -> None:
    model = tiny.save_tiny_model(tmp_path / "model", template=None)
    with pytest.raises(ConfigError, match=r"spec\.dataset\.chatTemplate.*format: text"):
        run(tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out"))
    (tmp_path / "chat.jinja").write_text(tiny.CHATML)
    by_file = run(
        tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out", dataset_={"chatTemplate": str(tmp_path / "chat.jinja")})
    )
    by_text = tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out", dataset_={"chatTemplate": tiny.CHATML})
    assert run(by_text).reused
    assert by_file.plan.samples == 200


@pytest.mark.parametrize("template", ["{% for m in messages %}", "no/such/file.jinja"])
def test_a_broken_chat_template_is_an_error(model: Path, tmp_path: Path, template: str) -> None:
    with pytest.raises(ConfigError, match=r"spec\.dataset\.chatTemplate"):
        run(tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out", dataset_={"chatTemplate": template}))


def test_a_wish_to_stop_is_granted(model: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        run(tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out"), stop=stop)
    assert files_of(tmp_path / "out") == {}


def test_more_shards_than_samples_are_lowered_with_a_note(model: Path, tmp_path: Path) -> None:
    data = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"text": "one"}, {"text": "two"}])
    prepared = run(tiny.job_of(model, data, tmp_path / "out", shards=9))
    assert [shard.samples for shard in prepared.plan.shards] == [1, 1]
    assert any("2 shards instead of 9" in note for note in prepared.notes)
    assert run(tiny.job_of(model, data, tmp_path / "out", shards=9)).reused


@given(
    lengths=st.lists(st.integers(1, 4096), min_size=1, max_size=200),
    shards=st.integers(1, 40),
    block=st.integers(1, 50),
)
def test_shards_are_contiguous_balanced_and_never_empty(lengths: list[int], shards: int, block: int) -> None:
    shards = min(shards, len(lengths))
    cutter = ShardCutter(shards=shards, samples=len(lengths), tokens=sum(lengths))
    cut: dict[int, list[int]] = {}
    for start in range(0, len(lengths), block):
        piece = np.array(lengths[start : start + block], dtype=np.int64)
        for shard, samples in cutter.split(piece):
            cut.setdefault(shard, []).extend(piece[samples].tolist())
    assert list(cut) == list(range(shards))
    assert [length for shard in cut.values() for length in shard] == lengths
    assert all(cut.values())
    done = 0
    for shard in range(shards - 1):
        done += sum(cut[shard])
        target = (shard + 1) * sum(lengths) / shards
        held_back = (
            len(cut[shard]) == 1 or len(lengths) - sum(map(len, list(cut.values())[: shard + 1])) == shards - shard - 1
        )
        assert held_back or abs(done - target) <= max(lengths)


@given(lengths=st.lists(st.integers(1, 50), min_size=1), share=st.floats(0.01, 1))
def test_percentiles_are_numpys_nearest_ranks(lengths: list[int], share: float) -> None:
    assert percentile(np.bincount(lengths), share) == np.percentile(lengths, 100 * share, method="inverted_cdf")


@pytest.mark.parametrize(
    ("tokens", "samples", "workers", "gpus", "expected"),
    [
        (57_000, 200, 1, 0, 1),  # a minute of work: loading twice would cost more than it gives
        (10**9, 2_000_000, 8, 1, 38),  # 8 a worker would spend more than 2 % on loading
        (10**9, 2_000_000, 2, 1, 30),  # half an hour each
        (10**11, 10**8, 8, 1, 2963),  # half an hour each
        (10**6, 2_000, 8, 1, 8),  # every worker gets one, whatever loading costs
        (10**6, 3, 8, 1, 3),  # no shard without a sample
        (0, 0, 8, 1, 0),
    ],
)
def test_automatic_number_of_shards(tokens: int, samples: int, workers: int, gpus: int, expected: int) -> None:
    size = ModelSize(135_000_000, 135_000_000) if gpus == 0 else ModelSize(8 * 10**9, 8 * 10**9)
    spec = tiny.job_of("m", "d", "o", workers=workers, model_={"gpus": gpus}).spec
    assert count_shards(spec, size, samples=samples, tokens=tokens) == expected


def test_part_target_bytes_is_part_of_the_plan(model: Path, tmp_path: Path) -> None:
    job = tiny.job_of(model, tiny.EXAMPLES, tmp_path / "out")
    assert run(job, part_target_bytes=1 << 20).plan.part_target_bytes == 1 << 20
    with pytest.raises(ConfigError, match=f"partTargetBytes: was {1 << 20}, is now {PART_TARGET_BYTES}"):
        run(job)
