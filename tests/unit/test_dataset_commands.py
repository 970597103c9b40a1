"""The commands that finish a dataset or look at one, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_output import SyntheticOutput, write_extracted
from typer.testing import CliRunner

from headframe_api.errors import ConfigError, DataError
from headframe_api.exit_codes import ExitCode
from headframe_api.names import JOB_ENVIRONMENT, SUCCESS_KEY, TERMINATION_LOG_ENVIRONMENT, part_key
from headframe_worker.cli.main import app
from headframe_worker.stores.local import LocalStore


@pytest.fixture
def extracted(tmp_path: Path) -> SyntheticOutput:
    return write_extracted(LocalStore(tmp_path / "output"))


@pytest.fixture
def finished(extracted: SyntheticOutput) -> SyntheticOutput:
    run("finalize", str(extracted.directory / "job.json"))
    return extracted


def run(*arguments: str) -> str:
    """Standard output of a command that succeeds; errors come as they are raised."""
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_finalize_takes_the_job_of_the_environment_and_leaves_a_termination_message(
    extracted: SyntheticOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_ENVIRONMENT, (extracted.directory / "job.json").read_text())
    monkeypatch.setenv(TERMINATION_LOG_ENVIRONMENT, str(tmp_path / "termination"))
    assert "59 samples" in run("finalize")
    assert (extracted.directory / SUCCESS_KEY).exists()
    message = json.loads((tmp_path / "termination").read_text())
    assert message["reason"] == "Completed"
    assert message["samples"] == 59
    assert message["quarantined"] == 2
    assert message["output"]["manifest"] == f"{extracted.directory}/manifest.json"


def test_finalize_says_in_its_termination_message_what_is_wrong(
    extracted: SyntheticOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TERMINATION_LOG_ENVIRONMENT, str(tmp_path / "termination"))
    (extracted.directory / part_key(0, 0)).unlink()
    with pytest.raises(DataError):
        run("finalize", str(extracted.directory / "job.json"))
    message = json.loads((tmp_path / "termination").read_text())
    assert (message["exitCode"], message["reason"]) == (ExitCode.DATA, "StatesDiffer")
    assert "part-00000.safetensors: is missing" in message["message"]


def test_verify_says_sound_or_lists_faults_and_fails(finished: SyntheticOutput) -> None:
    assert "is sound: 59 samples" in run("verify", str(finished.directory))
    assert run("verify", str(finished.directory), "--quiet") == ""
    assert json.loads(run("verify", str(finished.directory), "--json"))["sound"] is True
    path = finished.directory / part_key(1, 0)
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    result = CliRunner().invoke(app, ["verify", str(finished.directory), "--json"])
    assert isinstance(result.exception, DataError)
    assert "loss_mask differs from tokens/" in result.exception.message
    document = json.loads(result.stdout)
    assert document["sound"] is False
    assert document["faults"][0]["place"].startswith(part_key(1, 0))


def test_inspect_shows_both_numberings_and_quarantine(finished: SyntheticOutput) -> None:
    text = run("inspect", str(finished.directory))
    assert "--target-layer-ids 0 2 5" in text
    assert "-1, 1, 4" in text
    assert "1 InvalidJson, 1 NonFinite" in text
    assert json.loads(run("inspect", str(finished.directory), "--json"))["states"]["hugging_face_indexes"] == [0, 2, 5]


def test_inspect_shows_one_samples_tokens_mask_and_norms(finished: SyntheticOutput) -> None:
    row = 8
    document = json.loads(run("inspect", str(finished.directory), "--row", str(row), "--json"))
    assert [token["token_id"] for token in document["tokens"]] == finished.tokens[row].tolist()
    assert [token["learned"] for token in document["tokens"]] == finished.masks[row].astype(bool).tolist()
    expected = finished.states[row].norm(dim=-1)
    assert document["tokens"][2]["norms"] == pytest.approx(expected[2].tolist(), rel=2**-7)
    assert f"row {row} (sample-{row})" in run("inspect", str(finished.directory), "--row", str(row))


def test_inspect_of_a_row_that_is_not_there_is_an_error(finished: SyntheticOutput) -> None:
    with pytest.raises(ConfigError, match="row 5: not in this dataset"):
        run("inspect", str(finished.directory), "--row", "5")


def test_report_is_made_again(finished: SyntheticOutput, tmp_path: Path) -> None:
    report = finished.directory / "report.html"
    before = report.read_text()
    report.unlink()
    run("report", str(finished.directory))
    assert report.read_text() == before
    run("report", str(finished.directory), "--to", str(tmp_path / "else.html"))
    assert (tmp_path / "else.html").read_text() == before
