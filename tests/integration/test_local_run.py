"""`headframe run` as a user runs it: a subprocess, a manifest, a directory."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny_models
import yaml
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "out/models/SmolLM2-135M-Instruct.Q4_1.gguf"
HEADFRAME = [sys.executable, "-m", "headframe_worker.cli.main"]
ROUNDS = int(os.environ.get("HEADFRAME_ROUNDS", "4"))
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
"""By turns."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_models.save("llama", directory, tokenizer=True)
    return directory


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A few dozen of the example's shorter conversations."""
    lines = (ROOT / "examples/data/chats.jsonl").read_text().splitlines()
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(sorted(lines, key=len)[:60]) + "\n")
    return path


def write_job(folder: Path, model_source: Path, data: Path, **spec: Any) -> Path:
    """A manifest for a CPU run into folder/out."""
    job = {
        "apiVersion": "headframe.dev/v1alpha1",
        "kind": "ExtractionJob",
        "metadata": {"name": "test"},
        "spec": {
            "model": {"source": str(model_source), "gpus": 0, "dtype": "float32"},
            "dataset": {"source": str(data), "maxLength": 512},
            "states": {"preset": "none", "layers": [0, 2], "dtype": "float32"},
            "output": {"uri": str(folder / "out")},
            "shards": 3,
            **spec,
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def headframe(*arguments: object, check: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command; its exit code must be `check`."""
    result = subprocess.run([*HEADFRAME, *map(str, arguments)], check=False, capture_output=True, text=True, **options)
    assert check is None or result.returncode == check, result.stderr
    assert "Traceback" not in result.stderr
    return result


def stored_samples(output: Path) -> dict[int, tuple[bytes, bytes]]:
    """Row -> (token ids, states) of every part; a row twice fails."""
    found: dict[int, tuple[bytes, bytes]] = {}
    for path in sorted(output.glob("states/*/part-*.safetensors")):
        part = load_file(path)
        for index, row in enumerate(part["rows"].tolist()):
            start, end = part["offsets"][index : index + 2]
            assert row not in found, f"row {row} twice"
            found[row] = (part["token_ids"][start:end].tobytes(), part["hidden_states"][start:end].tobytes())
    return found


def assert_same_samples(output: Path, reference: Path) -> None:
    """The same rows, the same tokens, the same states but for rounding."""
    ours, theirs = stored_samples(output), stored_samples(reference)
    assert ours.keys() == theirs.keys()
    for row, (tokens, states) in theirs.items():
        assert ours[row][0] == tokens
        np.testing.assert_allclose(
            np.frombuffer(ours[row][1], np.float32), np.frombuffer(states, np.float32), rtol=1e-4, atol=1e-5
        )


def test_one_command_makes_a_verified_dataset(tmp_path: Path, tiny_model: Path, chats: Path) -> None:
    job = write_job(tmp_path, tiny_model, chats)
    result = headframe("run", job, "--json")
    manifest = json.loads(result.stdout)
    assert manifest["rows_in"] == manifest["samples"] == 60
    assert (tmp_path / "out/_SUCCESS").exists()
    assert len(stored_samples(tmp_path / "out")) == 60
    headframe("verify", tmp_path / "out", "--deep")
    again = headframe("run", job, "--json")
    assert json.loads(again.stdout)["samples_digest"] == manifest["samples_digest"]


def end(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Kill a run and its workers at once, or ask the run alone to stop, which it does in time; what it said."""
    if number == signal.SIGKILL:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    # Before Python's own start is over nobody listens yet; and a run may just have got through.
    assert process.returncode in ({-number} if number == signal.SIGKILL else {143, -number, 0}), errors
    return errors


def test_ended_at_any_moment_then_the_same_command_ends_alike(tmp_path: Path, tiny_model: Path, chats: Path) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    started = time.monotonic()
    headframe("run", write_job(reference, tiny_model, chats), "--quiet", "--part-bytes", 300_000)
    undisturbed_seconds = time.monotonic() - started

    job = write_job(tmp_path, tiny_model, chats)
    moments = random.Random(7)
    committed: dict[Path, tuple[int, int]] = {}
    struck = 0
    while struck < ROUNDS:
        process = subprocess.Popen(
            [*HEADFRAME, "run", str(job), "--quiet", "--part-bytes", "300000"],
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = process.communicate(timeout=moments.uniform(0.1, 0.9) * undisturbed_seconds)
            assert process.returncode == 0, errors
        except subprocess.TimeoutExpired:
            errors = end(process, SIGNALS[struck % len(SIGNALS)])
            struck += 1
        assert "Traceback" not in errors
        for path, identity in committed.items():
            assert (path.stat().st_ino, path.stat().st_mtime_ns) == identity, f"{path} was computed again"
        if process.returncode == 0:  # it got through between two kills: from the start once more
            assert_same_samples(tmp_path / "out", reference / "out")
            shutil.rmtree(tmp_path / "out")
        committed = {
            path: (path.stat().st_ino, path.stat().st_mtime_ns)
            for path in (tmp_path / "out").glob("states/*/part-*.safetensors")
        }
    headframe("run", job, "--quiet", "--part-bytes", 300_000)
    assert_same_samples(tmp_path / "out", reference / "out")
    headframe("verify", tmp_path / "out")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_cleanly_and_says_how_to_go_on(
    tmp_path: Path, tiny_model: Path, chats: Path, number: int, code: int
) -> None:
    job = write_job(tmp_path, tiny_model, chats)
    process = subprocess.Popen([*HEADFRAME, "run", str(job)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out/plan.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == code, errors
    assert f"headframe run {job}" in errors
    assert "Traceback" not in errors
    headframe("run", job, "--quiet")


def test_a_lost_worker_process_is_replaced(tmp_path: Path, tiny_model: Path, chats: Path) -> None:
    job = write_job(tmp_path, tiny_model, chats, shards=6)
    process = subprocess.Popen([*HEADFRAME, "run", str(job), "--workers", "2", "--part-bytes", "50000"])
    killed = set()
    while process.poll() is None and len(killed) < 2:
        # Workers exist once the plan does; both are killed, one while it starts and one while it works.
        if (tmp_path / "out/plan.json").exists():
            for child in psutil.Process(process.pid).children():
                with suppress(psutil.Error):
                    if child.pid not in killed and "spawn_main" in " ".join(child.cmdline()):
                        child.kill()
                        killed.add(child.pid)
                        break
        time.sleep(0.2)
    assert process.wait(timeout=180) == 0
    assert len(killed) == 2
    headframe("verify", tmp_path / "out")


def test_two_runs_at_once_do_no_harm(tmp_path: Path, tiny_model: Path, chats: Path) -> None:
    job = write_job(tmp_path, tiny_model, chats)
    both = [subprocess.Popen([*HEADFRAME, "run", str(job), "--quiet"]) for _ in range(2)]
    assert [process.wait(timeout=180) for process in both] == [0, 0]
    headframe("verify", tmp_path / "out")


def test_a_full_disk_stops_with_a_clear_error_and_goes_on_after_room_is_made(
    tmp_path: Path, tiny_model: Path, chats: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    output = tmp_path / "out"
    output.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(output)], check=True)
    try:
        job = write_job(tmp_path, tiny_model, chats, failurePolicy={"retriesPerShard": 0})
        result = headframe("run", job, "--part-bytes", 200_000, check=None)
        assert result.returncode not in (0, 1)
        assert "no space left" in result.stderr
        subprocess.run(["mount", "-o", "remount,size=200m", str(output)], check=True)
        headframe("run", job, "--quiet", "--part-bytes", 200_000)
        headframe("verify", output)
    finally:
        subprocess.run(["umount", str(output)], check=True)


def test_mistakes_are_named_without_a_traceback(tmp_path: Path, tiny_model: Path, chats: Path) -> None:
    missing = headframe("run", tmp_path / "none.yaml", check=78)
    assert "none.yaml" in missing.stderr
    job = write_job(tmp_path, tiny_model, chats, states={"layres": [1], "layers": [99]})
    assert "did you mean 'layers'" in headframe("run", job, check=78).stderr
    job = write_job(tmp_path, tiny_model, chats, states={"layers": [99]})
    assert "spec.states.layers: [99]" in headframe("run", job, check=78).stderr
    job = write_job(tmp_path, tiny_model, chats, model={"source": str(tiny_model), "gpus": 1})
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    assert "spec.model.gpus" in headframe("run", job, check=78, env=environment).stderr
