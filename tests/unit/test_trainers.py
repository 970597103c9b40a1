"""What a trainer must be told is printed exactly, and the command that trains is filled in from the dataset."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import datasets
import pytest
from synthetic_output import MADE_UP, SyntheticOutput, write_finished
from tiny_models import save
from typer.testing import CliRunner

from headframe_api.errors import ConfigError, DataError
from headframe_api.layers import preset_layers
from headframe_worker.cli.main import app


def finished(directory: Path, *, last: str = "preNorm", layers: Sequence[int] | None = None) -> SyntheticOutput:
    return write_finished(
        directory,
        layers=tuple(layers or preset_layers("dflash", 64)),
        last=last,
        model=MADE_UP.model_copy(update={"num_layers": 64, "hidden_size": 16}),
    )


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> SyntheticOutput:
    return finished(tmp_path_factory.mktemp("trainers"))


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        ("speculators", "--target-layer-ids 2 17 32 47 62\n"),
        ("specforge", "dflash_config.target_layer_ids [1, 16, 31, 46, 61]\n"),
        ("modelopt", "--aux-layers 1,16,31,46,61\n"),
        ("modelopt", "dflash.dflash_architecture_config.num_hidden_layers 5\n"),
        ("deepspec", "model.target_layer_ids [1, 16, 31, 46, 61]\n"),
        ("torch", "layers (0-based outputs of decoder layers) 1 16 31 46 61\n"),
    ],
)
def test_inspect_prints_a_trainers_own_numbers(output: SyntheticOutput, trainer: str, line: str) -> None:
    assert line in run("inspect", str(output.directory), "--for", trainer)


def test_model_optimizers_dflash_chooses_its_layers_itself(tmp_path: Path) -> None:
    output = finished(tmp_path, layers=(1, 31, 60))
    printed = run("inspect", str(output.directory), "--for", "modelopt")
    assert "eagle_aux_hidden_state_layer_ids [1, 31, 60]\n" in printed
    assert "its DFlash reads layers [1, 31, 61]" in printed
    assert "eagle_aux_hidden_state_layer_ids [1, 31, 60]\n" in run(
        "inspect", str(output.directory), "--for", "specforge"
    )


def test_the_training_command_holds_what_the_dataset_knows(output: SyntheticOutput, tmp_path: Path) -> None:
    work = tmp_path / "work"
    given = ["--", "--on-missing=warn", "--speculator-type", "dflash"]
    line = run("train-with", "speculators", str(output.directory), "--work", str(work), "--dry-run", *given)
    for words in (
        f"--data-path {work}",
        "--hidden-states-backend headframe",
        f"--headframe-dataset {output.directory}",
        "--target-layer-ids 2 17 32 47 62",
        "--on-missing=warn --speculator-type dflash",
    ):
        assert words in line
    assert "--on-missing skip" not in line, "what the user gives wins"
    assert {path.name for path in work.iterdir()} >= {"state.json", "dataset_info.json", "token_freq.pt"}


def test_a_last_state_after_the_norm_is_no_training_data_for_speculators(tmp_path: Path) -> None:
    output = finished(tmp_path, last="postNorm")
    with pytest.raises(ConfigError, match="before the final norm"):
        run("inspect", str(output.directory), "--for", "speculators")


def test_export_by_command(output: SyntheticOutput, tmp_path: Path) -> None:
    for share in ("1/2", "2/2"):
        run("export", str(output.directory), "--to", "torch", "--into", str(tmp_path), "--share", share)
    done = json.loads((tmp_path / "headframe-export/done.json").read_bytes())
    assert done["samples"] == len(output.kept) == len(list(tmp_path.rglob("*.pt")))
    with pytest.raises(ConfigError, match="3/2"):
        run("export", str(output.directory), "--to", "torch", "--into", str(tmp_path), "--share", "3/2")


def test_a_dataset_that_speculators_prepared_keeps_rows_and_masks(output: SyntheticOutput, tmp_path: Path) -> None:
    """Our tokens, saved as speculators saves its own, imported and prepared: the same rows under the same numbers."""
    exported = datasets.load_from_disk(str(output.directory / "tokens")).select_columns(
        ["input_ids", "loss_mask", "seq_len"]
    )
    exported.with_format("torch").save_to_disk(tmp_path / "prepared", num_shards=3)
    save("llama", tmp_path / "model", vocab_size=1000, num_hidden_layers=8)
    arguments = ["--from", "speculators", "--model", str(tmp_path / "model")]
    manifest = run("import", str(tmp_path / "prepared"), *arguments, "--output", str(tmp_path / "states"), "--quiet")
    (tmp_path / "job.yaml").write_text(manifest)
    run("prepare", str(tmp_path / "job.yaml"), "--quiet")
    again = datasets.load_from_disk(str(tmp_path / "states/tokens")).with_format(None)
    assert len(again) == len(output.tokens)
    for row, found in enumerate(again):
        assert found["input_ids"] == output.tokens[row].tolist()
        assert found["loss_mask"] == output.masks[row].tolist()


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (
            [{"input_ids": [1, 2], "loss_mask": [0, 1]}, {"input_ids": [], "loss_mask": []}],
            DataError,
            ":1: input_ids is empty",
        ),
        ([{"input_ids": [1, 2], "loss_mask": [0]}], DataError, "2 input_ids but 1 values of loss_mask"),
        ([{"input_ids": [1, 2], "seq_len": 2}], ConfigError, "no column loss_mask"),
    ],
)
def test_rows_that_would_move_the_numbers_of_others_are_refused(
    tmp_path: Path, rows: list[dict[str, object]], error: type[Exception], message: str
) -> None:
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path)
    with pytest.raises(error, match=message):
        run("import", str(tmp_path), "--from", "speculators", "--model", "made/up", "--output", "out")
