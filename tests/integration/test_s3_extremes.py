"""Very many samples and very long ones, from a bucket into a bucket, in bounded memory. HEADFRAME_EXTREMES=1 runs it: it takes minutes."""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
from bucket_jobs import PATIENCE_SECONDS, Bucket

from testbed.process import wait_until
from testbed.s3 import S3Server

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("HEADFRAME_EXTREMES"), reason="takes minutes: set HEADFRAME_EXTREMES=1"),
]
MEMORY_LIMIT_BYTES = 3 << 29
"""Of one process. Python with torch and Transformers takes a third of it; one float32 row of scores for each of 32k tokens took 4 GiB."""
MODEL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32_768,
}


@pytest.mark.parametrize(("samples", "shortest", "longest"), [(100_000, 1, 16), (20, 32_000, 32_768)])
def test_many_samples_and_long_ones_work_in_bounded_memory(
    s3_server: S3Server, tmp_path: Path, samples: int, shortest: int, longest: int
) -> None:
    bucket, chance = Bucket(s3_server, s3_server.new_bucket(), tmp_path), random.Random(0)
    tiny_models.save("llama", tmp_path / "model", **MODEL)
    client = s3_server.client()
    for file in (tmp_path / "model").iterdir():
        client.upload_file(str(file), bucket.name, f"models/tiny/{file.name}")
    rows = (
        chance.choices(range(3, tiny_models.VOCABULARY), k=chance.randint(shortest, longest)) for _ in range(samples)
    )
    content = "".join(f"{json.dumps({'input_ids': ids})}\n" for ids in rows)
    client.put_object(Bucket=bucket.name, Key="data/tokens.jsonl", Body=content.encode())
    spec: dict[str, Any] = {
        "dataset": {"format": "tokens", "lossMask": "all", "maxLength": longest},
        "states": {"layers": [-1, 0]},
        "shards": 2,
    }
    started, peak = time.monotonic(), 0
    child = bucket.start("run", bucket.manifest("out", spec=spec), "--workers", "2")

    def ended() -> bool:
        nonlocal peak
        with suppress(psutil.Error):
            for process in (parent := psutil.Process(child.pid), *parent.children(recursive=True)):
                with suppress(psutil.Error):
                    peak = max(peak, process.memory_info().rss)
        return child.poll() is not None

    try:
        wait_until(ended, 5 * PATIENCE_SECONDS)
        assert bucket.finish(child) == 0, bucket.said[-1]
    finally:
        bucket.end_all()
    print(f"{samples:,} samples: {time.monotonic() - started:.0f} s, at most {peak / 2**20:.0f} MiB in a process")
    assert peak < MEMORY_LIMIT_BYTES
    bucket.run("verify", f"s3://{bucket.name}/out")
    manifest = json.loads(client.get_object(Bucket=bucket.name, Key="out/manifest.json")["Body"].read())
    assert (manifest["rows_in"], manifest["samples"]) == (samples, samples)
