"""speculators' own dataset, collate and drafters read Headframe's states: through our backend, and from exported files alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest
from smollm2_output import save_smollm2, write_smollm2
from synthetic_output import SyntheticOutput, write_extracted, write_finished
from tiny_models import save
from typer.testing import CliRunner

from headframe_worker.cli.main import app
from headframe_worker.exporters.export import export
from headframe_worker.exporters.samples import SourceDataset
from headframe_worker.exporters.speculators import Speculators, write_tokens_directory
from headframe_worker.stores.local import LocalStore
from headframe_worker.trainers.speculators_launch import speculators_command
from testbed.s3 import S3Server
from testbed.speculators import run_with_speculators, speculators_python
from testbed.tools import require

SESSION = str(Path(__file__).parents[1] / "speculators_session.py")
STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def _speculators() -> None:
    with require():
        speculators_python()


@dataclass(frozen=True)
class Prepared:
    output: SyntheticOutput
    verifier: Path


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    folder = tmp_path_factory.mktemp("smollm2")
    yield Prepared(write_smollm2(folder, samples=16, max_length=128), save_smollm2(folder / "verifier"))
    shutil.rmtree(folder)


def exported(output: SyntheticOutput, target: Path, dtype: str | None) -> str:
    source = SourceDataset.open(output.store)
    exporter = Speculators(source.plan, dtype=dtype)  # type: ignore[arg-type]
    export(source, LocalStore(target), exporter, advance=lambda *_: None)
    return str(target)


def test_rows_and_batches_are_the_same_through_the_backend_and_from_files(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend reads the packed dataset in a bucket; the files are exports of the same dataset on a disk."""
    output = write_finished(tmp_path, layers=(1, 2, 4), shards=3)
    write_tokens_directory(SourceDataset.open(output.store), LocalStore(tmp_path / "work"))
    files = exported(output, tmp_path / "files", None)
    float8 = exported(output, tmp_path / "float8", "float8_e4m3fn")
    bucket = s3_server.new_bucket()
    for info in output.store.list():
        s3_server.client().upload_file(str(output.directory / info.key), bucket, f"out/{info.key}")
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    found = json.loads(
        run_with_speculators([SESSION, "compare", str(tmp_path / "work"), f"s3://{bucket}/out", files, float8])
    )
    assert (found["rows"], found["missing"]) == (len(output.kept), len(output.refused))
    assert 0 < found["worst_float8_error"] < 0.05


def test_what_speculators_prepares_is_imported_row_by_row(tmp_path: Path) -> None:
    """Our tokens through its own `prepare-data`, which shuffles them: its rows and masks are ours again, in its order."""
    output = write_extracted(LocalStore(tmp_path / "output"), vocabulary=160)
    save("llama", tmp_path / "model", tokenizer=True, num_hidden_layers=8)
    rows = [
        {"input_ids": ids.tolist(), "loss_mask": mask.tolist()}
        for ids, mask in zip(output.tokens, output.masks, strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepared = tmp_path / "prepared"
    arguments = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "rows.jsonl"), "--output", str(prepared)]
    run_with_speculators(["-m", "speculators", "prepare-data", *arguments])
    manifest = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "states"), "--quiet"]
    made = CliRunner().invoke(
        app, ["import", str(prepared), "--from", "speculators", *manifest], catch_exceptions=False
    )
    (tmp_path / "job.yaml").write_text(made.output)
    CliRunner().invoke(app, ["prepare", str(tmp_path / "job.yaml"), "--quiet"], catch_exceptions=False)
    theirs, ours = (
        datasets.load_from_disk(str(path)).with_format(None) for path in (prepared, tmp_path / "states/tokens")
    )
    assert len(theirs) == len(rows)
    for column in ("input_ids", "loss_mask", "seq_len"):
        assert theirs[column][:] == ours[column][:]


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("dflash", ["--block-size", "4", "--max-anchors", "32"]),
        ("eagle3", ["--ttt-steps", "2"]),
    ],
)
def test_a_drafter_learns_from_our_states(smollm2: Prepared, tmp_path: Path, kind: str, extra: list[str]) -> None:
    """The command that `train-with` makes, with its trainer's loop on the CPU; loader processes are spawned for dflash."""
    command = speculators_command(
        SourceDataset.open(smollm2.output.store),
        tmp_path / "work",
        [
            *("--verifier-name-or-path", str(smollm2.verifier)),
            *("--speculator-type", kind),
            *("--num-layers", "1", "--draft-vocab-size", "512", "--mask-token-id", "0", "--draft-attn-impl", "sdpa"),
            *("--loss-implementation", "eager"),  # its fused losses are Triton kernels
            *("--hidden-states-dtype", "float32", "--total-seq-len", "256", "--lr", "1e-3"),
            *("--max-steps", str(STEPS), "--num-workers", "1" if kind == "dflash" else "0"),
            *extra,
        ],
        processes=1,
    )
    result = json.loads(run_with_speculators([SESSION, "train", *command[3:]]))
    losses = result["losses"]
    assert result["target_layer_ids"] == [2, 9, 15, 21, 28]
    assert len(losses) >= STEPS
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4]), losses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-layer-ids", "1", "8", "14", "20", "27"], "pass --target-layer-ids 2 9 15 21 28"),
        ([], "not given, so [2, 15, 27]"),
    ],
)
def test_layers_of_another_numbering_are_refused_before_training(
    smollm2: Prepared, tmp_path: Path, arguments: list[str], message: str
) -> None:
    write_tokens_directory(SourceDataset.open(smollm2.output.store), LocalStore(tmp_path / "work"))
    common = ["--verifier-name-or-path", str(smollm2.verifier), "--speculator-type", "dflash", "--mask-token-id", "0"]
    place = ["--data-path", str(tmp_path / "work"), "--headframe-dataset", str(smollm2.output.directory)]
    with pytest.raises(AssertionError, match=r"ConfigError") as failed:
        run_with_speculators(
            [SESSION, "train", *common, *place, "--hidden-states-backend", "headframe", "--num-layers", "1", *arguments]
        )
    assert message in str(failed.value)
