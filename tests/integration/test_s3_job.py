"""A whole job with its model, its dataset and its output in a bucket: the same dataset as locally, whatever is killed or cut.

HEADFRAME_ROUNDS (default 1) says how many times each kind of interruption strikes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
import tiny_models
from bucket_jobs import Bucket, assert_same_dataset, write_manifest

from headframe_api.spec import S3Spec
from headframe_worker.reader import StatesDataset
from testbed.faulty_proxy import FaultyProxy, operation
from testbed.process import free_port, wait_until
from testbed.s3 import S3Server
from testbed.toxiproxy import Proxy, Toxiproxy

pytestmark = pytest.mark.timeout(1800)
ROUNDS = int(os.environ.get("HEADFRAME_ROUNDS", "1"))
SAMPLES = 60
PART_BYTES = 100_000
CHATS = Path(__file__).parents[2] / "examples" / "data" / "chats.jsonl"


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


def test_all_on_s3_equals_all_local(bucket: Bucket, reference: dict[str, bytes], tmp_path: Path) -> None:
    local = write_manifest(
        tmp_path / "local.yaml",
        model=str(bucket.folder / "model"),
        dataset=str(bucket.folder / "chats.jsonl"),
        output=str(tmp_path / "out"),
    )
    bucket.run("run", local, "--workers", "2", "--part-bytes", str(PART_BYTES))
    assert "_SUCCESS" in reference
    assert sum(key.endswith(".safetensors") for key in reference) > 12
    assert_same_dataset(files_below(tmp_path / "out"), reference, same_sources=False)


def files_below(folder: Path) -> dict[str, bytes]:
    """As Bucket.objects, of a directory."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_quickstart_with_a_gguf_file_on_s3_equals_the_local_one(bucket: Bucket, tmp_path: Path) -> None:
    gguf = tiny_models.smollm2_gguf()
    bucket.server.client().upload_file(str(gguf), bucket.name, f"models/{gguf.name}")
    spec = {"dataset": {"maxLength": 96, "limit": 3}, "states": {"preset": "dflash"}, "shards": 2}
    local = write_manifest(
        tmp_path / "local.yaml",
        model=str(gguf),
        dataset=str(bucket.folder / "chats.jsonl"),
        output=str(tmp_path / "out"),
        spec=spec,
    )
    remote = bucket.manifest("gguf", spec={**spec, "model": {"source": f"s3://{bucket.name}/models/{gguf.name}"}})
    runs = [bucket.start("run", manifest, "--workers", "1") for manifest in (local, remote)]
    assert [bucket.finish(run) for run in runs] == [0, 0], bucket.said[-2:]
    assert_same_dataset(files_below(tmp_path / "out"), bucket.objects("gguf"), same_sources=False)


def test_every_command_works_on_s3(
    bucket: Bucket, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"s3://{bucket.name}/reference"
    for command in ("verify", "inspect", "report"):
        bucket.run(command, uri)
    bucket.run("plan", bucket.manifest("planned"))
    bucket.run("export", uri, "--to", "torch", "--into", f"s3://{bucket.name}/exported")
    assert sum(key.endswith(".pt") for key in bucket.objects("exported")) == SAMPLES
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
    bucket.leave_upload(output)  # as a process that was killed just now does
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
    child = bucket.start(*arguments)
    bucket.wait_for_parts(output, len(kept) + 1, child)
    if child.poll() is None:
        link.cut()  # and while nothing can be finished any more
        before = time.monotonic()
        child.terminate()
        assert bucket.finish(child) == 143, bucket.said[-1]
        assert time.monotonic() - before < 60
        link.mend()
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


def listing(objects: Iterable[tuple[str, int]]) -> str:
    """A server's answer to ListObjectsV2."""
    entries = "".join(
        f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>&quot;0&quot;</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key, size in sorted(objects)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"


@pytest.mark.parametrize("shown", ["too little", "what is gone"])
def test_a_listing_that_lags_does_no_harm(bucket: Bucket, reference: dict[str, bytes], shown: str) -> None:
    """Of shard 0 all is there, of shard 1 the parts but one, of the others nothing; the listing knows none of it, or more."""
    output = shown.replace(" ", "-")
    there = {
        key: data
        for key, data in reference.items()
        if key.startswith(("states/shard-00000/", "states/shard-00001/part-"))
        and not key.endswith("1/part-00000.safetensors")
    }
    bucket.prepare(output, reference)
    bucket.copy(output, there)
    with FaultyProxy(bucket.server) as proxy:
        for prefix in ("tokens/", "states/", *(f"states/shard-{shard:05d}/" for shard in range(4))):
            known = reference.items() if shown == "what is gone" else []
            answer = listing((f"{output}/{key}", len(data)) for key, data in known if key.startswith(prefix))
            path = f"prefix={quote(f'{output}/{prefix}', safe='')}&"
            proxy.inject(
                lambda request, path=path: operation("ListObjectsV2")(request) and path in f"{request.path}&",
                times=10**6,
                answer=(200, ""),
                text=answer,
            )
        manifest = bucket.manifest(output, endpoint=proxy.endpoint)
        bucket.run("run", manifest, "--workers", "1", "--part-bytes", str(PART_BYTES))
        assert proxy.requests["ListObjectsV2"] > 5
    assert_same_dataset(bucket.objects(output), reference)


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
    bucket.said += [metrics, json.dumps(progress())]
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
    everything = ["\n".join([*bucket.said, *bucket.arguments]).encode(), *reference.values()]
    everything += [path.read_bytes() for path in bucket.folder.iterdir() if path.is_file()]
    assert (bucket.folder / "termination.log").exists()
    assert any("spawn_main" in line for line in bucket.arguments)  # workers were seen, not only their parent
    client = bucket.server.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name):
        everything += [
            client.get_object(Bucket=bucket.name, Key=entry["Key"])["Body"].read() for entry in page["Contents"]
        ]
    assert len(everything) > 50
    assert not [secret for secret in secrets for text in everything if secret in text]
