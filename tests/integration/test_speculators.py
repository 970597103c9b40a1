"""speculators' own dataset, collate and drafters read Headframe's states: through our backend, and from exported files alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from smollm2_output import save_smollm2, write_smollm2
from synthetic_output import SyntheticOutput, write_extracted

from headframe_worker.exporters.export import export
from headframe_worker.exporters.samples import SourceDataset
from headframe_worker.exporters.speculators import Speculators, write_tokens_directory
from headframe_worker.finalize.stage import finalize
from headframe_worker.meter import Meter
from headframe_worker.stores.local import LocalStore
from headframe_worker.trainers.speculators_launch import speculators_command
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


def test_rows_and_batches_are_the_same_through_the_backend_and_from_files(tmp_path: Path) -> None:
    output = write_extracted(LocalStore(tmp_path / "output"), layers=(1, 2, 4), shards=3)
    finalize(output.job, output.store, scratch=tmp_path / "scratch", meter=Meter("finalize"))
    write_tokens_directory(SourceDataset.open(output.store), LocalStore(tmp_path / "work"))
    files = exported(output, tmp_path / "files", None)
    float8 = exported(output, tmp_path / "float8", "float8_e4m3fn")
    found = json.loads(
        run_with_speculators([SESSION, "compare", str(tmp_path / "work"), str(output.directory), files, float8])
    )
    assert (found["rows"], found["missing"]) == (len(output.kept), len(output.refused))
    assert 0 < found["worst_float8_error"] < 0.05


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
