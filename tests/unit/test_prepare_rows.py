"""Every row of a dataset ends as tokens or in the quarantine with its reason and place, whatever its file holds."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import chat_models as tiny
import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headframe_api.errors import ConfigError
from headframe_api.manifests import QuarantinedRow
from headframe_api.names import tokens_key
from headframe_worker.meter import Meter
from headframe_worker.prepare import blocks
from headframe_worker.prepare.stage import Prepared, prepare
from headframe_worker.prepare.tokens_file import read_tokens
from headframe_worker.stores.local import LocalStore
from testbed.s3 import S3Server

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
ROW = {"messages": CHAT}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("model"))


class Bench:
    """Prepares datasets with one tiny model."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.output = model, folder, folder / "out"

    def prepare(self, dataset: Path | str, processes: int = 1, **spec: Any) -> Prepared:
        spec = {"failurePolicy": {"maxQuarantinedFraction": 1}, **spec}
        job = tiny.job_of(self.model, dataset, self.output, **spec)
        return prepare(
            job, LocalStore(self.output), scratch=self.folder / "scratch", meter=Meter("prepare"), processes=processes
        )

    def ids(self) -> list[str]:
        return list(datasets.load_from_disk(str(self.output / "tokens"))["sample_id"])

    def refused(self) -> list[QuarantinedRow]:
        path = self.output / "quarantine" / "prepare.jsonl"
        return (
            [QuarantinedRow.model_validate_json(line) for line in path.read_text().splitlines()]
            if path.exists()
            else []
        )


@pytest.fixture
def bench(model: Path, tmp_path: Path) -> Bench:
    return Bench(model, tmp_path)


BAD_LINES: list[tuple[bytes, str]] = [
    (b'{"messages": [', "InvalidJson"),
    (b"\x00\x00", "InvalidJson"),
    (b'{"messages": "\x00"}', "InvalidJson"),
    (b"[" * 100_000, "InvalidJson"),
    (b'{"messages": ' + b"9" * 5000 + b"}", "InvalidJson"),
    (b"\xff\xfe{}", "InvalidUnicode"),
    (
        b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}',
        "InvalidUnicode",
    ),
    (
        b'{"id": "\\udfff", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]}',
        "InvalidUnicode",
    ),
    (b"[1, 2]", "NotAnObject"),
    (b'"text"', "NotAnObject"),
    (b"null", "NotAnObject"),
    (b"{}", "MissingColumn"),
    (b'{"messages": null}', "MissingColumn"),
    (b'{"messages": "hello"}', "WrongType"),
    (b'{"messages": ["hello"]}', "WrongType"),
    (b'{"messages": [{"content": "no role"}]}', "WrongType"),
    (b'{"messages": [{"role": 7, "content": "x"}]}', "WrongType"),
    (b'{"messages": [{"role": "user", "content": 7}]}', "WrongType"),
    (b'{"messages": [{"role": "user"}]}', "WrongType"),
    (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]}', "WrongType"),
    (
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], "tools": 3}',
        "WrongType",
    ),
    (b'{"messages": []}', "EmptySample"),
    (b'{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": " "}]}', "EmptySample"),
    (b'{"messages": [{"role": "wizard", "content": "x"}]}', "UnknownRole"),
    (b'{"messages": [{"from": "wizard", "value": "x"}]}', "UnknownRole"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}', "UnsupportedContent"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "NoAssistantTurn"),
]


@pytest.mark.parametrize(
    ("line", "reason"), BAD_LINES, ids=[f"{i}-{reason}" for i, (_, reason) in enumerate(BAD_LINES)]
)
def test_a_bad_line_is_refused_and_the_others_stay(bench: Bench, line: bytes, reason: str) -> None:
    good = json.dumps(ROW).encode()
    path = bench.folder / "rows.jsonl"
    path.write_bytes(b"\n".join([good, line, good]))
    plan = bench.prepare(path).plan
    (refused,) = bench.refused()
    assert (refused.reason, refused.where, refused.row) == (reason, "rows.jsonl:2", None)
    assert bench.ids() == ["rows.jsonl:1", "rows.jsonl:3"]
    assert (plan.rows_in, plan.samples, plan.quarantined) == (3, 2, {reason: 1})


def test_a_hostile_file_is_accounted_for_row_by_row(bench: Bench) -> None:
    good = json.dumps({**ROW, "id": "twice"}).encode()
    nul = json.dumps(
        {"messages": [{"role": "user", "content": "a\0b"}, {"role": "assistant", "content": "\0"}]}
    ).encode()
    long = json.dumps({"messages": [CHAT[0], {"role": "assistant", "content": "long " * 1_000_000}]}).encode()
    lines = [good, nul, long, good, *(line for line, _ in BAD_LINES)]
    path = bench.folder / "hostile.jsonl"
    # A BOM, both kinds of line ends, blank lines, and no newline at the end.
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines[:6]) + b"\n\n  \n" + b"\n".join([*lines[6:], good]))
    plan = bench.prepare(path).plan
    assert plan.rows_in == len(lines) + 1
    assert plan.samples == 5
    assert plan.quarantined == dict(Counter(reason for _, reason in BAD_LINES))
    assert len(bench.refused()) == len(BAD_LINES)
    assert bench.ids() == ["twice", "hostile.jsonl:2", "hostile.jsonl:3", "twice", "twice"]
    assert plan.lengths.maximum == 4096


def test_many_tiny_rows(bench: Bench) -> None:
    path = tiny.write_jsonl(bench.folder / "tiny.jsonl", [{"input_ids": [index % 2000]} for index in range(10_000)])
    plan = bench.prepare(path, processes=2, shards=7).plan
    assert (plan.samples, plan.tokens, len(plan.shards)) == (10_000, 10_000, 7)
    shards = [read_tokens(bench.output / tokens_key(shard)) for shard in range(7)]
    assert np.concatenate([shard.input_ids for shard in shards]).tolist() == [index % 2000 for index in range(10_000)]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_line_too_long_to_hold_is_refused_unread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_ROW_BYTES", 3 << 20)
    good = json.dumps(ROW).encode()
    path = bench.folder / "rows.jsonl"
    path.write_bytes(b"\n".join([good, b'{"messages": "' + b"x" * (7 << 20) + b'"}', good, b"y" * (5 << 20)]))
    bench.prepare(path)
    assert [(row.reason, row.where) for row in bench.refused()] == [
        ("RowTooLarge", "rows.jsonl:2"),
        ("RowTooLarge", "rows.jsonl:4"),
    ]
    assert bench.ids() == ["rows.jsonl:1", "rows.jsonl:3"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": []}, "EmptySample"),
        ({"input_ids": "12"}, "WrongType"),
        ({"input_ids": [1, 2.5]}, "WrongType"),
        ({"input_ids": [1, 2000]}, "TokenOutOfRange"),
        ({"input_ids": [-1]}, "TokenOutOfRange"),
        ({"input_ids": [2**70]}, "TokenOutOfRange"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "LengthMismatch"),
        ({"input_ids": [1], "loss_mask": [2]}, "WrongType"),
    ],
)
def test_bad_tokens(bench: Bench, row: dict[str, Any], reason: str) -> None:
    path = tiny.write_jsonl(bench.folder / "rows.jsonl", [{"input_ids": [1]}, row])
    bench.prepare(path)
    assert [refused.reason for refused in bench.refused()] == [reason]


def test_tokens_with_masks_from_parquet(bench: Bench) -> None:
    table = pa.table(
        {
            "input_ids": pa.array([np.arange(3), np.arange(5)], pa.list_(pa.uint16())),
            "loss_mask": pa.array([[0, 1, 1], [0, 0, 0, 1, 0]], pa.list_(pa.int8())),
            "id": [7, 8],
        }
    )
    pq.write_table(table, bench.folder / "tokens.parquet")
    prepared = bench.prepare(bench.folder / "tokens.parquet")
    shard = read_tokens(bench.output / tokens_key(0))
    assert [array.tolist() for array in shard.sample(1)] == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 0]]
    assert shard.sample_ids == ["7", "8"]
    assert (prepared.plan.tokens_from.mask_method, prepared.plan.loss_tokens) == ("given", 3)


def test_a_tensor_dataset_of_batch_size_one(bench: Bench) -> None:
    datasets.Dataset.from_dict({"input_ids": np.arange(12).reshape(3, 1, 4)}).save_to_disk(bench.folder / "saved")
    assert bench.prepare(bench.folder / "saved").plan.lengths.mean == 4


SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Time?"},
    {"from": "function_call", "value": '{"name": "clock", "arguments": {}}'},
    {"from": "observation", "value": "12:00"},
    {"from": "gpt", "value": "Noon."},
]


def test_sharegpt_is_read_as_messages(bench: Bench) -> None:
    tiny.tiny_tokenizer()
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": [{"type": "text", "text": "No"}, {"type": "text", "text": "on."}]},
    ]
    path = tiny.write_jsonl(bench.folder / "rows.jsonl", [{"conversations": SHAREGPT}, {"messages": chat}])
    plan = bench.prepare(path, dataset_={"chatTemplate": tiny.THINKING}).plan
    assert plan.samples == 2
    first, second = (read_tokens(bench.output / tokens_key(0)).sample(row) for row in (0, 1))
    assert first[0].tolist() == second[0].tolist()
    assert first[1].tolist() == second[1].tolist()


@pytest.mark.parametrize(
    ("row", "row_format"),
    [
        ({"messages": CHAT}, "messages"),
        ({"conversations": SHAREGPT}, "messages"),
        ({"prompt": "a", "completion": "b"}, "promptCompletion"),
        ({"text": "a"}, "text"),
        ({"input_ids": [1]}, "tokens"),
    ],
)
def test_auto_decides_by_columns_and_says_so(bench: Bench, row: dict[str, Any], row_format: str) -> None:
    path = bench.folder / "rows.jsonl"
    path.write_text("broken\n" + json.dumps({**row, "other": 1}) + "\n")
    prepared = bench.prepare(path)
    assert prepared.plan.tokens_from.format == row_format
    assert next(iter(row)) in prepared.plan.tokens_from.format_reason
    assert prepared.notes[0].startswith(f"format {row_format}: ")


def test_auto_names_the_columns_where_it_cannot_decide(bench: Bench) -> None:
    path = tiny.write_jsonl(bench.folder / "rows.jsonl", [{"body": "a", "title": "b"}])
    with pytest.raises(ConfigError, match=r"body, title.*spec\.dataset\.columns"):
        bench.prepare(path)
    with pytest.raises(
        ConfigError, match=r"spec\.dataset\.columns: .*no column corpus \(for text\); it has body, title"
    ):
        bench.prepare(path, dataset_={"columns": {"text": "corpus", "id": "title"}})
    assert bench.prepare(path, dataset_={"columns": {"text": "body"}}).plan.tokens_from.format == "text"


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{index}", "text": f"row {index}"} for index in range(count)]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)


def _write_arrow_file(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def _write_arrow_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


WRITERS = {
    "rows.jsonl": lambda path, rows: path.write_bytes(jsonl(rows)),
    "rows.jsonl.gz": lambda path, rows: path.write_bytes(
        gzip.compress(jsonl(rows[:4])) + gzip.compress(jsonl(rows[4:]))
    ),
    "rows.jsonl.zst": lambda path, rows: path.write_bytes(
        zstandard.compress(jsonl(rows[:4])) + zstandard.compress(jsonl(rows[4:]))
    ),
    "array.json": lambda path, rows: path.write_text(json.dumps(rows, indent=2)),
    "lines.json": lambda path, rows: path.write_bytes(jsonl(rows)),
    "pretty.json": lambda path, rows: path.write_text("\n".join(json.dumps(row, indent=2) for row in rows)),
    "rows.parquet": _write_parquet,
    "file.arrow": _write_arrow_file,
    "stream.arrow": _write_arrow_stream,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file(bench: Bench, name: str) -> None:
    WRITERS[name](bench.folder / name, rows_of(10))
    bench.prepare(bench.folder / name)
    assert bench.ids() == [f"r{index}" for index in range(10)]
    assert bench.refused() == []


def test_default_ids_name_line_or_row(bench: Bench) -> None:
    folder = bench.folder / "data"
    folder.mkdir()
    rows = [{"text": "a"}, {"text": "b"}]
    (folder / "a.jsonl").write_bytes(b"\n" + jsonl(rows))
    _write_parquet(folder / "b.parquet", rows)
    bench.prepare(folder)
    assert bench.ids() == ["a.jsonl:2", "a.jsonl:3", "b.parquet:0", "b.parquet:1"]


def test_globs_mix_kinds_and_keep_their_order(bench: Bench) -> None:
    (bench.folder / "data" / "deep").mkdir(parents=True)
    for number, name in enumerate(("1.jsonl", "2.parquet", "deep/3.jsonl.gz", "ignored.txt")):
        path = bench.folder / "data" / name
        WRITERS.get(f"rows{''.join(path.suffixes)}", WRITERS["rows.jsonl"])(path, [{"id": str(number), "text": "x"}])
    bench.prepare(bench.folder / "data" / "**" / "*")
    assert bench.ids() == ["0", "1", "2"]
    bench.output = bench.folder / "flat"
    bench.prepare(bench.folder / "data" / "*.jsonl")
    assert bench.ids() == ["0"]
    (bench.folder / "data").rename(bench.folder / "données 1")
    bench.output = bench.folder / "uri"
    bench.prepare(f"{bench.folder.as_uri()}/donn%C3%A9es%201/?.jsonl")
    assert bench.ids() == ["0"]


def test_saved_datasets_and_their_splits(bench: Bench) -> None:
    table = datasets.Dataset.from_list(rows_of(9))
    table.save_to_disk(bench.folder / "one", num_shards=3)
    datasets.DatasetDict({"train": table, "test": table.select([4, 2])}).save_to_disk(bench.folder / "splits")
    bench.prepare(bench.folder / "one")
    assert bench.ids() == [f"r{index}" for index in range(9)]
    bench.output = bench.folder / "split"
    bench.prepare(bench.folder / "splits", dataset_={"split": "test"})
    assert bench.ids() == ["r4", "r2"]
    with pytest.raises(ConfigError, match=r"spec\.dataset\.split: dev .* train, test"):
        bench.prepare(bench.folder / "splits", dataset_={"split": "dev"})


@pytest.mark.parametrize(
    "name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet", "file.arrow", "stream.arrow", "array.json"]
)
def test_a_file_cut_short_is_an_error_that_names_it(bench: Bench, name: str) -> None:
    path = bench.folder / name
    WRITERS[name](path, rows_of(300))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=name) as caught:
        bench.prepare(path)
    assert caught.value.reason == "BrokenFile"


def test_limit_takes_the_first_rows(bench: Bench) -> None:
    for name in ("1.jsonl", "2.jsonl"):
        (bench.folder / name).write_bytes(jsonl(rows_of(3)))
    plan = bench.prepare(bench.folder / "*.jsonl", dataset_={"limit": 4}).plan
    assert (plan.rows_in, bench.ids()) == (4, ["r0", "r1", "r2", "r0"])
    _write_parquet(bench.folder / "3.parquet", rows_of(8))
    bench.output = bench.folder / "table"
    bench.prepare(bench.folder / "3.parquet", dataset_={"limit": 5})
    assert len(bench.ids()) == 5


@pytest.mark.parametrize("source", ["nothing.jsonl", "*.jsonl", "empty", "/no/such/file.parquet"])
def test_nothing_there_is_a_clear_error(bench: Bench, source: str) -> None:
    (bench.folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"spec\.dataset\.source") as caught:
        bench.prepare(source if source.startswith("/") else bench.folder / source)
    assert caught.value.reason == "DatasetNotFound"


def test_an_empty_file_is_a_clear_error(bench: Bench) -> None:
    (bench.folder / "rows.jsonl").write_bytes(b"\n")
    with pytest.raises(ConfigError, match="holds no rows"):
        bench.prepare(bench.folder / "rows.jsonl")


def test_files_on_s3_by_glob_name_and_prefix(
    bench: Bench, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_server.new_bucket()
    for name in ("a.jsonl", "b.parquet", "deep/c.jsonl.gz"):
        path = bench.folder / name.replace("/", "-")
        WRITERS[f"rows{''.join(path.suffixes)}"](path, [{"id": name, "text": "x"}])
        s3_server.client().upload_file(str(path), bucket, f"data/{name}")
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3 = {"endpoint": s3_server.endpoint, "addressing": "path"}
    for number, (source, expected) in enumerate(
        {
            f"s3://{bucket}/data/*": ["a.jsonl", "b.parquet"],
            f"s3://{bucket}/data/**/*.jsonl*": ["a.jsonl", "deep/c.jsonl.gz"],
            f"s3://{bucket}/data/b.parquet": ["b.parquet"],
            f"s3://{bucket}/data": ["a.jsonl", "b.parquet", "deep/c.jsonl.gz"],
        }.items()
    ):
        bench.output = bench.folder / f"out{number}"
        bench.prepare(source, s3=s3)
        assert bench.ids() == expected
    with pytest.raises(ConfigError) as caught:
        bench.prepare(f"s3://{bucket}/nothing/*.jsonl", s3=s3)
    assert caught.value.reason == "DatasetNotFound"


OFFLINE = """
import sys
from headframe_api.errors import HeadframeError
from headframe_api.spec import DatasetSpec, S3Spec
from headframe_worker.prepare.sources import find_source
for name, split in (("someone/chats", "train"), ("someone/chats", "dev"), ("someone/else", "train")):
    try:
        source = find_source(DatasetSpec(source=name, split=split), S3Spec())
        print(source.digest, source.hub.num_rows)
    except HeadframeError as error:
        print(int(error.exit_code), error.reason, " ".join(error.message.split()))
"""


def test_a_hub_dataset_comes_from_the_cache_when_offline(bench: Bench) -> None:
    data = tiny.write_jsonl(bench.folder / "rows.jsonl", rows_of(5))
    cache = bench.folder / "cache"
    datasets.load_dataset("json", data_files=str(data), cache_dir=str(cache))
    # As a download leaves it: owner___name/configuration/version/hash.
    (made,) = cache.glob("json/default-*/0.0.0/*/")
    kept = cache / "someone___chats" / "default" / "0.0.0" / "0123456789abcdef0123456789abcdef01234567"
    kept.parent.mkdir(parents=True)
    made.rename(kept)
    for file in kept.glob("json-train.arrow"):
        file.rename(kept / "chats-train.arrow")
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "HF_HOME": str(bench.folder)}
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True, check=True)
    found, no_split, missing = done.stdout.splitlines()
    assert found.endswith(" 5")
    assert no_split.startswith("78 DatasetNotFound")
    assert missing.startswith("78 DatasetNotFound")


def test_a_local_dataset_within_scratch_stays(bench: Bench) -> None:
    (bench.folder / "scratch").mkdir()
    path = tiny.write_jsonl(bench.folder / "scratch" / "rows.jsonl", rows_of(2))
    bench.prepare(path)
    assert path.exists()
