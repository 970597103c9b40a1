"""A whole job with its model, its dataset and its output in a bucket: the same dataset as locally, whatever is killed or cut.

HEADFRAME_ROUNDS (default 1) says how many times each kind of interruption strikes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
import tiny_models
import torch
import yaml
from safetensors.torch import load

from headframe_api.spec import S3Spec
from headframe_worker.reader import StatesDataset
from testbed.process import free_port, wait_until
from testbed.s3 import S3Server
from testbed.toxiproxy import Proxy, Toxiproxy

pytestmark = pytest.mark.timeout(1800)
PATIENCE_SECONDS = 600
ROUNDS = int(os.environ.get("HEADFRAME_ROUNDS", "1"))
SAMPLES = 60
PART_BYTES = 100_000
CHATS = Path(__file__).parents[2] / "examples" / "data" / "chats.jsonl"
HEADFRAME = Path(sys.executable).with_name("headframe")


@dataclass
class Bucket:
    """A bucket with the model and the dataset in it, and jobs that work on it."""

    server: S3Server
    name: str
    folder: Path
    """For manifests and logs."""
    said: list[str] = field(default_factory=list)
    """All that Headframe printed, and how it was called."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What Headframe is given: credentials, and little time for each retry."""
        return os.environ | self.server.environment | {"HEADFRAME_S3_RETRY_SECONDS": "120", "OMP_NUM_THREADS": "1"}

    def manifest(self, output: str, *, endpoint: str | None = None) -> Path:
        """A job over this bucket's model and dataset, written to a file."""
        return write_manifest(
            self.folder / f"{output.replace('/', '-')}.yaml",
            model=f"s3://{self.name}/models/tiny",
            dataset=f"s3://{self.name}/data/*.jsonl",
            output=f"s3://{self.name}/{output}",
            endpoint=endpoint or self.server.endpoint,
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start `headframe ARGUMENTS` in a process group of its own; its words go to a file."""
        log = self.folder / f"{len(self.said)}.log"
        self.said.append(" ".join(map(str, arguments)))
        with log.open("w") as stream:
            child = subprocess.Popen(
                [HEADFRAME, *arguments],
                env=self.environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        child.log = log  # type: ignore[attr-defined]
        self.started.append(child)
        return child

    def finish(self, child: subprocess.Popen[str]) -> int:
        """Wait for a child; its exit code."""
        code = child.wait(PATIENCE_SECONDS)
        self.said.append(child.log.read_text())  # type: ignore[attr-defined]
        return code

    def run(self, *arguments: str | Path) -> None:
        """Run to the end; fail with the output where it fails."""
        child = self.start(*arguments)
        code = self.finish(child)
        assert code == 0, self.said[-1]

    def objects(self, output: str) -> dict[str, bytes]:
        """Every object below a prefix, but for probes, which a killed process leaves for a later start to remove."""
        client, found = self.server.client(), {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=f"{output}/"):
            for entry in page.get("Contents", ()):
                if "/.headframe-probe-" in entry["Key"]:
                    continue
                body = client.get_object(Bucket=self.name, Key=entry["Key"])["Body"]
                found[entry["Key"].removeprefix(f"{output}/")] = body.read()
        return found

    def parts_on_disk(self, output: str) -> int:
        """How many parts are there now, seen on the server's own disk."""
        return len(list((self.server.folder / "objects" / self.name / output / "states").glob("*/part-*")))

    def end_all(self) -> None:
        """Kill what a failed test left running."""
        for child in self.started:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        self.started.clear()

    def prepare(self, output: str, reference: Mapping[str, bytes]) -> None:
        """Put the first stage's objects of another run in place, so that a test begins with extraction."""
        self.copy(
            output,
            {key: data for key, data in reference.items() if not key.startswith("states/") and not _is_final(key)},
        )

    def copy(self, output: str, objects: Mapping[str, bytes]) -> None:
        """Write objects below a prefix."""
        for key, data in objects.items():
            self.server.client().put_object(Bucket=self.name, Key=f"{output}/{key}", Body=data)

    def wait_for_parts(self, output: str, wanted: int, child: subprocess.Popen[str]) -> None:
        """Return once so many parts are there, or the child has ended."""
        wait_until(lambda: self.parts_on_disk(output) >= wanted or child.poll() is not None, PATIENCE_SECONDS)

    def uploads(self) -> list[str]:
        """Multipart uploads that were begun and not ended."""
        return [
            entry["Key"] for entry in self.server.client().list_multipart_uploads(Bucket=self.name).get("Uploads", ())
        ]


def write_manifest(path: Path, *, model: str, dataset: str, output: str, endpoint: str | None = None) -> Path:
    spec: dict[str, Any] = {
        "model": {"source": model, "gpus": 0},
        "dataset": {"source": dataset, "maxLength": 512},
        "states": {"layers": [-1, 1, 3]},
        "output": {"uri": output},
        "shards": 4,
    }
    if endpoint:
        spec["s3"] = {"endpoint": endpoint}
    document = {"apiVersion": "headframe.dev/v1alpha1", "kind": "ExtractionJob", "metadata": {"name": "night"}}
    path.write_text(yaml.safe_dump(document | {"spec": spec}))
    return path


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Bucket:
    folder = tmp_path_factory.mktemp("night")
    tiny_models.save("llama", folder / "model", tokenizer=True)
    (folder / "chats.jsonl").write_text("".join(CHATS.read_text().splitlines(keepends=True)[:SAMPLES]))
    made, client = Bucket(s3_server, s3_server.new_bucket(), folder), s3_server.client()
    for file in (folder / "model").iterdir():
        client.upload_file(str(file), made.name, f"models/tiny/{file.name}")
    client.upload_file(str(folder / "chats.jsonl"), made.name, "data/chats.jsonl")
    return made


@pytest.fixture(scope="module")
def reference(bucket: Bucket) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    bucket.run("run", bucket.manifest("reference"), "--workers", "2", "--part-bytes", str(PART_BYTES))
    return bucket.objects("reference")


@pytest.fixture(autouse=True)
def _no_process_stays(bucket: Bucket) -> Iterator[None]:
    yield
    bucket.end_all()


@pytest.fixture
def link(bucket: Bucket, toxiproxy: Toxiproxy) -> Iterator[Proxy]:
    """A slow way to the bucket, so that parts appear one after the other."""
    made = toxiproxy.proxy(f"{bucket.server.host}:{bucket.server.port}")
    made.add("latency", stream="upstream", latency=100)
    yield made
    made.delete()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def assert_same_dataset(
    found: Mapping[str, bytes], expected: Mapping[str, bytes], *, same_sources: bool = True
) -> None:
    """Object by object: states bit for bit, tokens and index alike, counts and digests as they should be."""
    assert sorted(found) == sorted(expected)
    for key, content in expected.items():
        if key.endswith(".safetensors"):
            if same_sources:
                assert found[key] == content, key
            ours, theirs = load(found[key]), load(content)
            assert ours.keys() == theirs.keys()
            assert all(same_bits(ours[name], theirs[name]) for name in ours), key
        elif key.endswith(".arrow"):
            assert found[key] == content, key
        elif key.endswith(".parquet"):
            tables = [pyarrow.parquet.read_table(pyarrow.BufferReader(data)) for data in (found[key], content)]
            assert tables[0].equals(tables[1]), key
        elif key.endswith("/manifest.json"):
            names = ("shard", "samples", "tokens")
            parts = [
                [(part["part"], part["samples"], part["tokens"]) for part in json.loads(data)["parts"]]
                for data in (found[key], content)
            ]
            assert [json.loads(found[key])[name] for name in names] == [json.loads(content)[name] for name in names]
            assert parts[0] == parts[1]


def test_all_on_s3_equals_all_local(bucket: Bucket, reference: dict[str, bytes], tmp_path: Path) -> None:
    local = write_manifest(
        tmp_path / "local.yaml",
        model=str(bucket.folder / "model"),
        dataset=str(bucket.folder / "chats.jsonl"),
        output=str(tmp_path / "out"),
    )
    bucket.run("run", local, "--workers", "2", "--part-bytes", str(PART_BYTES))
    out = tmp_path / "out"
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert "_SUCCESS" in reference
    assert sum(key.endswith(".safetensors") for key in reference) > 12
    assert_same_dataset(files, reference, same_sources=False)


def test_verify_inspect_and_the_reader_work_on_s3(
    bucket: Bucket, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"s3://{bucket.name}/reference"
    for command in ("verify", "inspect", "report"):
        bucket.run(command, uri)
    for name, value in bucket.server.environment.items():
        monkeypatch.setenv(name, value)
    dataset = StatesDataset(uri, s3=S3Spec(endpoint=bucket.server.endpoint))
    assert len(dataset) == SAMPLES
    sample = dataset[0]
    assert sample.hidden_states.shape == (len(sample.token_ids), 3, 32)
    assert sample.last is not None
    assert sample.last.shape == (len(sample.token_ids), 32)


@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_kill_9_at_random_moments_loses_nothing(
    bucket: Bucket, reference: dict[str, bytes], link: Proxy, round_number: int
) -> None:
    chance = random.Random(round_number)
    output = f"killed-{round_number}"
    arguments = (
        "run",
        bucket.manifest(output, endpoint=f"http://{link.address}"),
        "--workers",
        "4",
        "--part-bytes",
        str(PART_BYTES),
    )
    bucket.prepare(output, reference)
    total = sum(key.endswith(".safetensors") for key in reference)
    child = bucket.start(*arguments)
    for wanted in sorted(chance.sample(range(total - 2), 2)):
        bucket.wait_for_parts(output, wanted, child)
        workers = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
        if workers and chance.random() < 0.5:
            _kill(chance.choice(workers).pid)  # one worker of four; the run goes on
        elif child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            bucket.finish(child)
            child = bucket.start(*arguments)
    assert bucket.finish(child) == 0, bucket.said[-1]
    assert_same_dataset(bucket.objects(output), reference)
    assert bucket.uploads() == []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_sigterm_ends_with_143_and_the_next_run_goes_on(
    bucket: Bucket, reference: dict[str, bytes], link: Proxy, round_number: int
) -> None:
    chance = random.Random(100 + round_number)
    output = f"stopped-{round_number}"
    arguments = (
        "run",
        bucket.manifest(output, endpoint=f"http://{link.address}"),
        "--workers",
        "2",
        "--part-bytes",
        str(PART_BYTES),
    )
    bucket.prepare(output, reference)
    child = bucket.start(*arguments)
    wanted = chance.randrange(1, 8)
    bucket.wait_for_parts(output, wanted, child)
    before = time.monotonic()
    child.terminate()
    assert bucket.finish(child) == 143, bucket.said[-1]
    assert time.monotonic() - before < 60
    kept = {key: data for key, data in bucket.objects(output).items() if key.endswith(".safetensors")}
    assert len(kept) >= wanted
    bucket.run(*arguments)
    finished = bucket.objects(output)
    assert kept.items() <= finished.items()
    assert_same_dataset(finished, reference)


def test_two_workers_on_one_shard_do_no_harm(bucket: Bucket, reference: dict[str, bytes], link: Proxy) -> None:
    manifest = bucket.manifest("doubled", endpoint=f"http://{link.address}")
    bucket.prepare("doubled", reference)
    twins = [bucket.start("extract", manifest, "--shard", "0", "--port", "0") for _ in range(2)]
    assert [bucket.finish(twin) for twin in twins] == [0, 0], bucket.said[-2:]
    shard = {key: data for key, data in bucket.objects("doubled").items() if key.startswith("states/")}
    assert_same_dataset(shard, {key: data for key, data in reference.items() if key.startswith("states/shard-00000/")})


def test_a_partners_parts_that_appear_meanwhile_are_taken(
    bucket: Bucket, reference: dict[str, bytes], link: Proxy
) -> None:
    manifest = bucket.manifest("partner", endpoint=f"http://{link.address}")
    bucket.prepare("partner", reference)
    child = bucket.start("extract", manifest, "--shard", "0", "--port", "0")
    bucket.wait_for_parts("partner", 1, child)
    bucket.copy("partner", {key: data for key, data in reference.items() if key.startswith("states/shard-00000/part-")})
    assert bucket.finish(child) == 0, bucket.said[-1]
    shard = {key: data for key, data in bucket.objects("partner").items() if key.startswith("states/")}
    assert_same_dataset(shard, {key: data for key, data in reference.items() if key.startswith("states/shard-00000/")})


def _is_final(key: str) -> bool:
    return key in ("manifest.json", "samples.parquet", "report.html", "_SUCCESS")


def test_an_outage_in_the_middle_pauses_the_run_and_is_told(
    bucket: Bucket, reference: dict[str, bytes], link: Proxy
) -> None:
    port = free_port()
    manifest = bucket.manifest("outage", endpoint=f"http://{link.address}")
    bucket.prepare("outage", reference)
    child = bucket.start("run", manifest, "--workers", "2", "--part-bytes", str(PART_BYTES), "--port", str(port))

    def progress() -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=10) as answer:
            return dict(json.loads(answer.read()))

    bucket.wait_for_parts("outage", 3, child)
    link.cut()
    wait_until(lambda: progress()["state"] == "waiting", 60)
    assert f"s3://{bucket.name}/outage/states/" in progress()["message"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    bucket.said.append(metrics)
    assert 'headframe_state{state="waiting",worker="0"} 1.0' in metrics or 'state="waiting",worker="1"} 1.0' in metrics
    link.mend()
    assert bucket.finish(child) == 0, bucket.said[-1]
    assert_same_dataset(bucket.objects("outage"), reference)


def test_what_is_wrong_with_the_bucket_is_said_before_the_model_is_loaded(bucket: Bucket) -> None:
    manifest = bucket.manifest("nowhere")
    text = manifest.read_text().replace(f"s3://{bucket.name}/nowhere", "s3://no-such-bucket-here/out")
    manifest.write_text(text)
    started = time.monotonic()
    assert bucket.finish(bucket.start("run", manifest)) == 78
    assert "error: s3://no-such-bucket-here/out" in bucket.said[-1]
    assert "Traceback" not in bucket.said[-1]
    assert time.monotonic() - started < 180


def test_no_secret_stands_anywhere(bucket: Bucket, reference: dict[str, bytes]) -> None:
    """Last of the file: it reads all that the runs above printed, and all that they wrote."""
    secrets = [secret.encode() for secret in (bucket.server.access_key, bucket.server.secret_key)]
    everything = ["\n".join(bucket.said).encode(), *reference.values()]
    client = bucket.server.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name):
        everything += [
            client.get_object(Bucket=bucket.name, Key=entry["Key"])["Body"].read() for entry in page["Contents"]
        ]
    assert len(everything) > 50
    assert not [secret for secret in secrets for text in everything if secret in text]
