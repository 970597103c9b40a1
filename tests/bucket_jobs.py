"""Jobs whose model, dataset and output lie in a bucket, run as a user runs them, and how two outputs are compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import torch
import yaml
from safetensors.torch import load

from headframe_api.names import TERMINATION_LOG_ENVIRONMENT
from testbed.process import wait_until
from testbed.s3 import S3Server

PATIENCE_SECONDS = 600
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
    arguments: set[str] = field(default_factory=set)
    """Arguments of Headframe's processes and of their children, as anyone on the machine sees them."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What Headframe is given: credentials, and little time for each retry."""
        return (
            os.environ
            | self.server.environment
            | {
                "HEADFRAME_S3_RETRY_SECONDS": "120",
                "OMP_NUM_THREADS": "1",
                TERMINATION_LOG_ENVIRONMENT: str(self.folder / "termination.log"),
            }
        )

    def manifest(self, output: str, *, endpoint: str | None = None, spec: Mapping[str, Any] | None = None) -> Path:
        """A job over this bucket's model and dataset, written to a file; see write_manifest."""
        return write_manifest(
            self.folder / f"{output.replace('/', '-')}.yaml",
            model=f"s3://{self.name}/models/tiny",
            dataset=f"s3://{self.name}/data/*.jsonl",
            output=f"s3://{self.name}/{output}",
            endpoint=endpoint or self.server.endpoint,
            spec=spec,
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
            {key: data for key, data in reference.items() if not key.startswith("states/") and not is_final(key)},
        )

    def copy(self, output: str, objects: Mapping[str, bytes]) -> None:
        """Write objects below a prefix."""
        for key, data in objects.items():
            self.server.client().put_object(Bucket=self.name, Key=f"{output}/{key}", Body=data)

    def wait_for_parts(self, output: str, wanted: int, child: subprocess.Popen[str]) -> None:
        """Return once so many parts are there, or the child has ended."""

        def is_there() -> bool:
            self._note_arguments(child.pid)
            return self.parts_on_disk(output) >= wanted or child.poll() is not None

        wait_until(is_there, PATIENCE_SECONDS)

    def _note_arguments(self, pid: int) -> None:
        with suppress(psutil.Error):
            parent = psutil.Process(pid)
            for process in (parent, *parent.children(recursive=True)):
                with suppress(psutil.Error):
                    self.arguments.add(" ".join(process.cmdline()))

    def leave_upload(self, output: str) -> None:
        """Begin an upload of a part and leave it."""
        key = f"{output}/states/shard-00000/part-00000.safetensors"
        self.server.client().create_multipart_upload(Bucket=self.name, Key=key)

    def uploads(self) -> list[str]:
        """Multipart uploads that were begun and not ended."""
        return [
            entry["Key"] for entry in self.server.client().list_multipart_uploads(Bucket=self.name).get("Uploads", ())
        ]


def write_manifest(
    path: Path,
    *,
    model: str,
    dataset: str,
    output: str,
    endpoint: str | None = None,
    spec: Mapping[str, Any] | None = None,
) -> Path:
    """A job on the CPU as a file; `spec` adds to its model and dataset, and replaces other sections."""
    whole: dict[str, Any] = {
        "model": {"source": model, "gpus": 0},
        "dataset": {"source": dataset, "maxLength": 512},
        "states": {"layers": [-1, 1, 3]},
        "output": {"uri": output},
        "shards": 4,
    }
    for name, value in (spec or {}).items():
        whole[name] = whole[name] | value if name in ("model", "dataset") else value
    if endpoint:
        whole["s3"] = {"endpoint": endpoint}
    document = {"apiVersion": "headframe.dev/v1alpha1", "kind": "ExtractionJob", "metadata": {"name": "night"}}
    path.write_text(yaml.safe_dump(document | {"spec": whole}))
    return path


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


def is_final(key: str) -> bool:
    """Whether finalize writes it."""
    return key in ("manifest.json", "samples.parquet", "report.html", "_SUCCESS")
