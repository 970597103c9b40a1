"""finalize finishes a dataset whose every sample is there once and right, and names what is wrong with any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from synthetic_output import REFUSED_ROW, SyntheticOutput, write_extracted

from headframe_api.errors import ConfigError, DataError, HeadframeError, TemporaryError
from headframe_api.manifests import DatasetManifest, ShardManifest
from headframe_api.names import (
    MANIFEST_KEY,
    PLAN_KEY,
    SAMPLES_KEY,
    SUCCESS_KEY,
    part_key,
    shard_manifest_key,
    tokens_key,
)
from headframe_worker.finalize.stage import finalize
from headframe_worker.meter import Meter
from headframe_worker.stores.local import LocalStore


@pytest.fixture
def extracted(tmp_path: Path) -> SyntheticOutput:
    return write_extracted(LocalStore(tmp_path / "output"))


def run(output: SyntheticOutput, **policy: object) -> DatasetManifest:
    job = output.job
    if policy:
        spec = job.spec
        job = job.model_copy(
            update={"spec": spec.model_copy(update={"failure_policy": spec.failure_policy.model_copy(update=policy)})}
        )
    return finalize(job, output.store, scratch=output.directory.parent / "scratch", meter=Meter("finalize"))


def test_it_accounts_for_every_row_and_its_index_finds_every_sample(extracted: SyntheticOutput) -> None:
    manifest = run(extracted)
    assert manifest.rows_in == manifest.samples + sum(manifest.quarantined.values())
    assert manifest.quarantined == {"InvalidJson": 1, "NonFinite": 1}
    assert manifest.tokens == sum(len(extracted.tokens[row]) for row in extracted.kept)
    assert manifest.loss_tokens == sum(int(extracted.masks[row].sum()) for row in extracted.kept)
    assert manifest.slot_names == ["embeddings", "layer.1", "layer.4", "last.preNorm"]

    lines = pq.read_table(extracted.directory / SAMPLES_KEY).to_pylist()
    assert [line["row"] for line in lines] == extracted.kept
    for line in lines:
        with safe_open(extracted.directory / part_key(line["shard"], line["part"]), framework="pt") as part:
            stop = line["start"] + line["length"]
            assert part.get_slice("token_ids")[line["start"] : stop].tolist() == extracted.tokens[line["row"]].tolist()
        assert line["sample_id"] == f"sample-{line['row']}"
        assert line["loss_tokens"] == extracted.masks[line["row"]].sum()


def test_success_holds_the_manifests_digest_and_statistics_are_over_all_tokens(extracted: SyntheticOutput) -> None:
    manifest = run(extracted)
    data = (extracted.directory / MANIFEST_KEY).read_bytes()
    assert (extracted.directory / SUCCESS_KEY).read_text() == f"sha256:{hashlib.sha256(data).hexdigest()}\n"
    for slot, statistics in enumerate(manifest.statistics):
        norms = [norm for row in extracted.kept for norm in extracted.states[row][:, slot].norm(dim=-1).tolist()]
        assert statistics.tokens == len(norms)
        assert statistics.norm_mean == pytest.approx(sum(norms) / len(norms))
        assert (statistics.norm_min, statistics.norm_max) == pytest.approx((min(norms), max(norms)))


def test_a_finished_dataset_is_checked_again_and_left_as_it_is(extracted: SyntheticOutput) -> None:
    manifest = run(extracted)
    before = {path: path.stat().st_mtime_ns for path in extracted.directory.iterdir() if path.is_file()}
    assert run(extracted) == manifest
    assert {path: path.stat().st_mtime_ns for path in extracted.directory.iterdir() if path.is_file()} == before
    (extracted.directory / part_key(1, 0)).unlink()
    with pytest.raises(DataError, match=r"shard-00001/part-00000.safetensors: is missing"):
        run(extracted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn"])
def test_every_dtype_and_empty_shards_pass(tmp_path: Path, dtype: str) -> None:
    output = write_extracted(LocalStore(tmp_path / "o"), lengths=[3, 1], shards=4, dtype=dtype, last="none")  # type: ignore[arg-type]
    manifest = run(output, max_quarantined_fraction=0.5)
    assert [shard.samples for shard in manifest.shards] == [0, 1, 0, 1]
    assert manifest.lengths.maximum == 3


def test_missing_shards_are_a_temporary_error_until_the_policy_allows_them(extracted: SyntheticOutput) -> None:
    (extracted.directory / shard_manifest_key(0)).unlink()
    with pytest.raises(TemporaryError, match="1 of 2 shards are not extracted yet: 0"):
        run(extracted)
    assert not (extracted.directory / SUCCESS_KEY).exists()
    manifest = run(extracted, max_failed_shards=1)
    assert manifest.failed_shards == [0]
    assert manifest.missing_samples == extracted.plan.shards[0].samples
    assert manifest.rows_in == manifest.samples + sum(manifest.quarantined.values()) + manifest.missing_samples


def test_a_shard_that_comes_later_is_taken_in(extracted: SyntheticOutput) -> None:
    key = extracted.directory / shard_manifest_key(0)
    data = key.read_bytes()
    key.unlink()
    run(extracted, max_failed_shards=1)
    key.write_bytes(data)
    assert run(extracted, max_failed_shards=1).failed_shards == []


def test_more_quarantine_than_allowed_stops_it(extracted: SyntheticOutput) -> None:
    with pytest.raises(DataError, match="2 of 61 input samples are in quarantine") as caught:
        run(extracted, max_quarantined_fraction=0.03)
    assert caught.value.reason == "TooManyQuarantined"


def test_samples_that_the_user_wants_dropped_are_not_too_many(tmp_path: Path) -> None:
    output = write_extracted(LocalStore(tmp_path / "output"), refuse=False, refused_by_prepare="TooLong")
    assert run(output, max_quarantined_fraction=0.0).quarantined == {"TooLong": 1}


def edit_manifest(output: SyntheticOutput, change: Callable[[dict[str, object]], object]) -> None:
    path = output.directory / shard_manifest_key(0)
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def swap_parts(output: SyntheticOutput) -> None:
    one, other = (output.directory / part_key(0, part) for part in (0, 1))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def double_a_row(output: SyntheticOutput) -> None:
    """The last sample's row is written over the one before, in a part's `rows`."""
    part = ShardManifest.model_validate_json((output.directory / shard_manifest_key(0)).read_bytes()).parts[-1]
    path = output.directory / part_key(0, part.part)
    from headframe_worker.reader.stored_part import read_header

    place = read_header(output.store, part_key(0, part.part), at_least_bytes=100).tensors["rows"]
    data = bytearray(path.read_bytes())
    end = place.start + place.size_bytes
    data[end - 16 : end - 8] = data[end - 8 : end]
    path.write_bytes(data)


def change_a_token(output: SyntheticOutput) -> None:
    from headframe_worker.reader.stored_part import read_header

    place = read_header(output.store, part_key(1, 0), at_least_bytes=100).tensors["token_ids"]
    path = output.directory / part_key(1, 0)
    data = bytearray(path.read_bytes())
    data[place.start] ^= 1
    path.write_bytes(data)


FAULTS: dict[str, tuple[Callable[[SyntheticOutput], object], type[HeadframeError], str]] = {
    "part deleted": (
        lambda o: (o.directory / part_key(0, 2)).unlink(),
        DataError,
        "part-00002.safetensors: is missing",
    ),
    "part truncated": (
        lambda o: (o.directory / part_key(0, 2)).write_bytes((o.directory / part_key(0, 2)).read_bytes()[:-1]),
        DataError,
        r"part-00002.safetensors: has [\d,]+ bytes, the shard's manifest says",
    ),
    "parts swapped": (swap_parts, DataError, "part-00000.safetensors: "),
    "row doubled": (double_a_row, DataError, r"row \d+: is in it more than once(.|\n)*row \d+: is missing"),
    "token changed": (
        change_a_token,
        DataError,
        r"part-00000.safetensors row \d+: token_ids differs from tokens/, first at token 0",
    ),
    "tokens file deleted": (
        lambda o: (o.directory / tokens_key(1)).unlink(),
        DataError,
        "shard-00001.arrow: is missing",
    ),
    "counts changed": (
        lambda o: edit_manifest(o, lambda d: d.update(samples=7)),
        DataError,
        "says 7 samples, its parts add up to",
    ),
    "digest changed": (
        lambda o: edit_manifest(o, lambda d: d["parts"][0].update(digest="crc64nvme:0")),  # type: ignore[index]
        DataError,
        "header and the shard's manifest differ in digest",
    ),
    "another plan's shard": (
        lambda o: edit_manifest(o, lambda d: d.update(plan="sha256:other")),
        DataError,
        "belongs to plan sha256:other",
    ),
    "manifest is no JSON": (
        lambda o: (o.directory / shard_manifest_key(0)).write_text("{"),
        DataError,
        "not a shard's manifest",
    ),
    "stray part": (
        lambda o: (o.directory / part_key(0, 99)).write_bytes(b"x"),
        DataError,
        "part-00099.safetensors: is not in the shard's manifest",
    ),
    "stray shard": (
        lambda o: o.store.write(part_key(9, 0), [memoryview(b"x")]),
        DataError,
        "part-00000.safetensors: belongs to no shard of the plan",
    ),
    "plan changed": (
        lambda o: (o.directory / PLAN_KEY).write_text(
            (o.directory / PLAN_KEY).read_text().replace('"row', '"row').replace("made/up", "made/it")
        ),
        ConfigError,
        "was changed after it was made",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_refuses_what_is_wrong_and_says_where(extracted: SyntheticOutput, fault: str) -> None:
    damage, error, message = FAULTS[fault]
    damage(extracted)
    with pytest.raises(error, match=message):
        run(extracted)
    assert not (extracted.directory / SUCCESS_KEY).exists()


def test_the_refused_row_is_not_missed(extracted: SyntheticOutput) -> None:
    """A quarantined row is accounted for: were it not listed, its absence would be a fault."""
    assert REFUSED_ROW not in extracted.kept
    for shard in extracted.plan.shards:
        path = extracted.directory / shard_manifest_key(shard.index)
        document = json.loads(path.read_bytes())
        for part in document["parts"]:
            part["quarantined"] = []
        path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="do not make the 30 planned"):
        run(extracted)
