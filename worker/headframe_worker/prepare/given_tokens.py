"""Rows that another project tokenised: read through before a job is written for them, so that each keeps its number and its mask.

A row that `prepare` would refuse would move the numbers of all that follow, and a trainer that goes on with that project's own
directory would then read the states of another row. So one such row is an error here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from headframe_api.errors import ConfigError, DataError
from headframe_api.spec import DatasetSpec, S3Spec
from headframe_worker.prepare.blocks import Block, read_blocks
from headframe_worker.prepare.encoder import Encoder
from headframe_worker.prepare.samples import Columns
from headframe_worker.prepare.sources import find_source

_MOST_SHOWN = 5
_ANY_TOKEN = 1 << 31
"""The vocabulary is the model's to know: prepare checks it."""


@dataclass(frozen=True)
class GivenTokens:
    """What a dataset of tokens holds."""

    rows: int
    tokens: int
    loss_tokens: int
    longest: int


def read_given_tokens(source: str, s3: S3Spec, *, scratch: Path) -> GivenTokens:
    """Read every row of a dataset with input_ids and loss_mask, local or on S3.

    Raises DataError where a row would be refused, ConfigError where nothing is there or the rows have no masks.
    """
    spec = DatasetSpec(source=source, format="tokens")
    columns = Columns(spec.columns)
    encoder = Encoder("tokens", columns, "assistant", _ANY_TOKEN, "fail", _ANY_TOKEN, tokenizer=None, renderer=None)
    rows = tokens = loss_tokens = longest = 0
    for block in read_blocks(find_source(spec, s3), columns, scratch=scratch, limit=None):
        _need_columns(source, block)
        encoded = encoder.encode(block)
        if encoded.refusals:
            shown = "; ".join(f"{refusal.where}: {refusal.message}" for refusal in encoded.refusals[:_MOST_SHOWN])
            raise DataError(
                f"{source}: rows that cannot be taken, so that those after them would change their numbers: {shown}",
                reason="RowsRefused",
            )
        rows += encoded.rows_in
        tokens += len(encoded.input_ids)
        loss_tokens += int(encoded.loss_mask.sum())
        longest = max(longest, int(encoded.lengths.max(initial=0)))
    if not rows:
        raise ConfigError(f"{source}: has no rows", reason="DatasetNotFound")
    return GivenTokens(rows, tokens, loss_tokens, longest)


def _need_columns(source: str, block: Block) -> None:
    names = [] if block.table is None else pa.ipc.open_stream(block.table).schema.names
    if missing := [name for name in ("input_ids", "loss_mask") if name not in names]:
        raise ConfigError(
            f"{source}: {block.file} has no column {' and no '.join(missing)}; a dataset that speculators prepared has both (Arrow "
            "files beside state.json)",
            reason="UnknownFormat",
        )
