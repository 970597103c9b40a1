"""Exports out of a bucket into a bucket: byte for byte those between directories, shared by processes, and never written twice."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from synthetic_output import SyntheticOutput, write_finished
from typer.testing import CliRunner

from headframe_api.errors import ConfigError
from headframe_worker.cli.main import app
from testbed.s3 import S3Server


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> SyntheticOutput:
    return write_finished(tmp_path_factory.mktemp("exports"), layers=(1, 2, 4), last="preNorm", part_target_bytes=8000)


@pytest.fixture
def bucket(output: SyntheticOutput, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the dataset under `out`."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    name = s3_server.new_bucket()
    for info in output.store.list():
        s3_server.client().upload_file(str(output.directory / info.key), name, f"out/{info.key}")
    return name


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def objects(server: S3Server, bucket: str, prefix: str) -> dict[str, bytes]:
    client = server.client()
    return {
        key.removeprefix(prefix): client.get_object(Bucket=bucket, Key=key)["Body"].read()
        for key in written(server, bucket, prefix)
    }


def written(server: S3Server, bucket: str, prefix: str) -> dict[str, datetime]:
    pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {entry["Key"]: entry["LastModified"] for page in pages for entry in page.get("Contents", ())}


@pytest.mark.parametrize("trainer", ["speculators", "torch"])
def test_an_export_between_buckets(
    output: SyntheticOutput, s3_server: S3Server, bucket: str, tmp_path: Path, trainer: str
) -> None:
    source, target = f"s3://{bucket}/out", f"s3://{bucket}/{trainer}"
    run("export", str(output.directory), "--to", trainer, "--into", str(tmp_path / "local"))
    said = run("export", source, "--to", trainer, "--into", target, "--share", "2/3")
    assert "parts are left to other processes" in said
    first = written(s3_server, bucket, f"{trainer}/")
    assert not any(key.endswith("done.json") for key in first)
    run("export", source, "--to", trainer, "--into", target)
    assert {key: time for key, time in written(s3_server, bucket, f"{trainer}/").items() if key in first} == first
    local = {
        str(path.relative_to(tmp_path / "local")): path.read_bytes()
        for path in (tmp_path / "local").rglob("*")
        if path.is_file()
    }
    assert objects(s3_server, bucket, f"{trainer}/") == local
    with pytest.raises(ConfigError, match="holds another export"):
        run("export", source, "--to", trainer, "--into", target, "--dtype", "float32")


def test_a_training_on_a_bucket_has_its_tokens_here(output: SyntheticOutput, bucket: str, tmp_path: Path) -> None:
    line = run("train-with", "speculators", f"s3://{bucket}/out", "--work", str(tmp_path / "work"), "--dry-run")
    assert f"--headframe-dataset s3://{bucket}/out" in line
    for path in (output.directory / "tokens").iterdir():
        assert (tmp_path / "work" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "work/token_freq.pt").exists()


def test_a_prepared_dataset_in_a_bucket_is_imported(output: SyntheticOutput, bucket: str) -> None:
    manifest = run(
        "import", f"s3://{bucket}/out/tokens", "--from", "speculators", "--model", "made/up", "--output", "s3://b/out"
    )
    assert f"source: s3://{bucket}/out/tokens" in manifest
    assert f"maxLength: {max(map(len, output.tokens))}" in manifest
