"""One shard against the plan and its tokens: every sample there, once, in its place, with the tokens that were asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import ValidationError

from headframe_api.errors import DataError
from headframe_api.manifests import PartEntry, ShardManifest
from headframe_api.names import part_key, shard_manifest_key, shard_prefix, tokens_key
from headframe_api.plan import Plan, ShardPlan
from headframe_worker.finalize.fault import Fault
from headframe_worker.finalize.layout_check import header_faults, sample_faults
from headframe_worker.finalize.samples_index import SAMPLES_SCHEMA
from headframe_worker.format.cut import PartPlan, shard_parts
from headframe_worker.prepare.tokens_file import TokensShard, read_tokens
from headframe_worker.reader.stored_part import read_header, read_small_tensors
from headframe_worker.stores.base import Store
from headframe_worker.stores.missing import MissingObjectError


@dataclass(frozen=True)
class CheckedShard:
    """What one shard holds, and what is wrong with it."""

    plan: ShardPlan
    faults: list[Fault]
    manifest: ShardManifest | None = None
    """None: the shard was never committed, or its manifest cannot be read (then there is a fault)."""
    manifest_digest: str = ""
    samples: pa.Table = field(default_factory=SAMPLES_SCHEMA.empty_table)
    """Its lines of samples.parquet, by row; only whole where there are no faults."""


def check_shard(plan: Plan, shard: ShardPlan, store: Store, sizes: Mapping[str, int], scratch: Path) -> CheckedShard:
    """Check one shard without reading its states.

    `sizes` is the listing of states/: every object's key and size, as far as the listing knows. `scratch` is where a tokens file is fetched to and
    removed from again.
    """
    key = shard_manifest_key(shard.index)
    faults: list[Fault] = []
    tokens = _shard_tokens(shard, store, scratch, faults)
    try:
        data = store.read(key)
    except MissingObjectError:
        return CheckedShard(shard, faults)
    try:
        manifest = ShardManifest.model_validate_json(data)
    except ValidationError as error:
        return CheckedShard(shard, [*faults, Fault(key, f"not a shard's manifest: {_first_problem(error)}")])
    faults += _manifest_faults(plan, shard, manifest, key, sizes)
    tables = []
    if tokens is not None:
        planned = shard_parts(plan, tokens.seq_len)
        if [entry.part for entry in manifest.parts] != [part.part for part in planned]:
            faults.append(
                Fault(key, f"lists parts {_numbers(manifest)}, the plan cuts this shard into {len(planned)} parts")
            )
        else:
            tables = [
                _check_part(plan, shard, entry, part, tokens, store, sizes, faults)
                for entry, part in zip(manifest.parts, planned, strict=True)
            ]
    table = pa.concat_tables([SAMPLES_SCHEMA.empty_table(), *tables]).sort_by("row")
    return CheckedShard(shard, faults, manifest, "sha256:" + hashlib.sha256(data).hexdigest(), table)


def _shard_tokens(shard: ShardPlan, store: Store, scratch: Path, faults: list[Fault]) -> TokensShard | None:
    key = tokens_key(shard.index)
    try:
        path = store.fetch(key, scratch)
        tokens = read_tokens(path)
    except MissingObjectError:
        faults.append(Fault(key, "is missing"))
        return None
    except DataError as error:
        faults.append(Fault(key, error.message))
        return None
    if path.is_relative_to(scratch):
        path.unlink()  # mapped, so still readable; gone from the disk once the shard is done
    counts = (len(tokens.seq_len), int(tokens.seq_len.sum()))
    if counts != (shard.samples, shard.tokens):
        faults.append(
            Fault(
                key, f"holds {counts[0]:,} samples, {counts[1]:,} tokens; planned {shard.samples:,}, {shard.tokens:,}"
            )
        )
        return None
    return tokens


def _manifest_faults(
    plan: Plan, shard: ShardPlan, manifest: ShardManifest, key: str, sizes: Mapping[str, int]
) -> list[Fault]:
    faults = []
    if (manifest.plan, manifest.shard) != (plan.digest, shard.index):
        faults.append(
            Fault(key, f"belongs to plan {manifest.plan} shard {manifest.shard}, not to {plan.digest} {shard.index}")
        )
    for name in ("samples", "tokens", "bytes"):
        total = sum(getattr(entry, name) for entry in manifest.parts)
        if total != getattr(manifest, name):
            faults.append(Fault(key, f"says {getattr(manifest, name):,} {name}, its parts add up to {total:,}"))
    quarantined = sum(len(entry.quarantined) for entry in manifest.parts)
    if manifest.samples + quarantined != shard.samples:
        faults.append(
            Fault(
                key,
                f"{manifest.samples:,} samples and {quarantined:,} in quarantine do not make the {shard.samples:,} planned",
            )
        )
    listed = {part_key(shard.index, entry.part) for entry in manifest.parts} | {key}
    strangers = [found for found in sizes if found.startswith(shard_prefix(shard.index)) and found not in listed]
    return faults + [Fault(found, "is not in the shard's manifest") for found in strangers]


def _check_part(
    plan: Plan,
    shard: ShardPlan,
    entry: PartEntry,
    planned: PartPlan,
    tokens: TokensShard,
    store: Store,
    sizes: Mapping[str, int],
    faults: list[Fault],
) -> pa.Table:
    """Check one part; its lines of samples.parquet, none where it has faults."""
    found = list(_part_faults(plan, shard, entry, planned, tokens, store, sizes))
    faults += found
    if found:
        return SAMPLES_SCHEMA.empty_table()
    return _sample_lines(shard, entry, _kept_rows(planned, entry, shard), tokens)


def _part_faults(
    plan: Plan,
    shard: ShardPlan,
    entry: PartEntry,
    planned: PartPlan,
    tokens: TokensShard,
    store: Store,
    sizes: Mapping[str, int],
) -> list[Fault]:
    key = part_key(shard.index, entry.part)
    size = sizes.get(key, entry.bytes)  # where the listing lags, reading it will tell
    if size != entry.bytes:
        return [Fault(key, f"has {size:,} bytes, the shard's manifest says {entry.bytes:,}")]
    try:
        header = read_header(store, key, at_least_bytes=size)
        faults = list(header_faults(plan, shard.index, entry, key, header, size))
        if faults:
            return faults
        part = read_small_tensors(store, key, header)
    except MissingObjectError:
        return [Fault(key, "is missing")]
    except DataError as error:
        return [Fault(key, error.message)]
    strangers = [
        row.row for row in entry.quarantined if row.row is None or row.row - shard.first_row not in planned.rows
    ]
    if strangers:
        return [Fault(key, f"quarantined rows {strangers} are not among this part's samples")]
    return list(sample_faults(part, _kept_rows(planned, entry, shard), tokens, shard.first_row))


def _kept_rows(planned: PartPlan, entry: PartEntry, shard: ShardPlan) -> NDArray[np.int64]:
    """The part's rows, relative to the shard, without those that extract refused."""
    refused = [row.row - shard.first_row for row in entry.quarantined if row.row is not None]
    return planned.rows[~np.isin(planned.rows, refused)]


def _sample_lines(shard: ShardPlan, entry: PartEntry, rows: NDArray[np.int64], tokens: TokensShard) -> pa.Table:
    lengths = tokens.seq_len[rows]
    loss = np.concatenate([[0], np.cumsum(tokens.loss_mask, dtype=np.int64)])
    return pa.table(
        {
            "row": rows + shard.first_row,
            "sample_id": pc.take(tokens.id_column, pa.array(rows)).cast(pa.string()),
            "shard": np.full(len(rows), shard.index, np.int32),
            "part": np.full(len(rows), entry.part, np.int32),
            "start": np.cumsum(lengths) - lengths,
            "length": lengths.astype(np.int32),
            "loss_tokens": (loss[tokens.offsets[rows + 1]] - loss[tokens.offsets[rows]]).astype(np.int32),
        },
        schema=SAMPLES_SCHEMA,
    )


def _numbers(manifest: ShardManifest) -> str:
    numbers = [str(entry.part) for entry in manifest.parts]
    return ", ".join(numbers) if len(numbers) <= 8 else f"{', '.join(numbers[:8])} and {len(numbers) - 8} more"


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'JSON'}: {problem['msg']}"
