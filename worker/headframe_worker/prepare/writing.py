"""The two passes: all rows into the spool and the quarantine, then the spool into one file of tokens a shard."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headframe_api.errors import ConfigError, StoppedError
from headframe_api.manifests import QuarantinedRow
from headframe_api.names import tokens_key
from headframe_api.plan import TOO_LONG, LengthPercentiles, ShardPlan, StatesLayout
from headframe_worker.format.cut import cut_parts
from headframe_worker.meter import Meter
from headframe_worker.prepare.encoder import EncodedBlock, Refusal
from headframe_worker.prepare.pool import encode_blocks
from headframe_worker.prepare.reading import Reading
from headframe_worker.prepare.shards import ShardCutter, percentile
from headframe_worker.prepare.spool import Spool, SpooledBlock
from headframe_worker.prepare.tokens_file import TokensWriter, tokens_writer
from headframe_worker.stores.base import Store

_EXAMPLES = 3


@dataclass
class Totals:
    """What the first pass counted."""

    counts_by_length: np.ndarray[tuple[int], np.dtype[np.int64]]
    """[maxLength + 1]: samples of each length."""
    rows_in: int = 0
    loss_tokens: int = 0
    truncated: int = 0
    without_loss: int = 0
    uncertain_turns: int = 0
    quarantined: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Refusal]] = field(default_factory=dict)
    """The first few refusals of each reason."""

    @property
    def samples(self) -> int:
        """N."""
        return int(self.counts_by_length.sum())

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.counts_by_length @ np.arange(len(self.counts_by_length)))

    def lengths(self) -> LengthPercentiles:
        """Their percentiles, by nearest rank."""
        present = np.flatnonzero(self.counts_by_length)
        return LengthPercentiles(
            minimum=int(present[0]),
            p50=percentile(self.counts_by_length, 0.5),
            p90=percentile(self.counts_by_length, 0.9),
            p99=percentile(self.counts_by_length, 0.99),
            maximum=int(present[-1]),
            mean=round(self.tokens / self.samples, 3),
        )

    def add(self, block: EncodedBlock) -> None:
        """Count a block."""
        self.rows_in += block.rows_in
        self.loss_tokens += int(block.loss_mask.sum())
        self.truncated += block.truncated
        self.without_loss += block.without_loss
        self.uncertain_turns += block.uncertain_turns
        self.counts_by_length += np.bincount(block.lengths, minlength=len(self.counts_by_length))
        for refusal in block.refusals:
            self.quarantined[refusal.reason] += 1
            examples = self.examples.setdefault(refusal.reason, [])
            if len(examples) < _EXAMPLES:
                examples.append(refusal)


def tokenise(
    reading: Reading,
    spool: Spool,
    quarantine: Path,
    meter: Meter,
    *,
    processes: int,
    stop: threading.Event | None = None,
) -> Totals:
    """The first pass. Refused rows become lines of the quarantine file. Raises StoppedError when `stop` is set."""
    totals = Totals(np.zeros(reading.encoder.max_length + 1, np.int64))
    with quarantine.open("wb") as refused:
        for block in encode_blocks(reading.encoder, reading.blocks, processes=processes):
            if stop is not None and stop.is_set():
                raise StoppedError("stopped while tokenising; the same command begins prepare anew")
            spool.append(block)
            totals.add(block)
            for refusal in block.refusals:
                meter.quarantine(refusal.reason)
                refused.write(_line(refusal))
            tokens = len(block.input_ids)
            meter.batch_done(samples=len(block.lengths), tokens=tokens, padded_tokens=tokens)
    spool.finish()
    return totals


def _line(refusal: Refusal) -> bytes:
    row = QuarantinedRow(
        row=None,
        sample_id=refusal.sample_id,
        where=refusal.where,
        reason=refusal.reason,
        message=refusal.message,
    )
    return row.model_dump_json().encode() + b"\n"


def check_quarantine(totals: Totals, *, allowed_fraction: float, listed_in: str) -> None:
    """Raises ConfigError where too many rows were refused, or all of them."""
    refused = totals.quarantined.total()
    too_many = refused - totals.quarantined[TOO_LONG] > allowed_fraction * totals.rows_in
    if totals.samples and not too_many:
        return
    lines = []
    for reason, count in totals.quarantined.most_common():
        shown = "; ".join(f"{example.where}: {example.message[:200]}" for example in totals.examples[reason])
        lines.append(f"  {reason}: {count} ({shown}{'; ...' if count > len(totals.examples[reason]) else ''})")
    limit = (
        f"over spec.failurePolicy.maxQuarantinedFraction {allowed_fraction:g}" if too_many else "which leaves no sample"
    )
    raise ConfigError(
        "\n".join(
            [
                f"{refused} of {totals.rows_in} rows ({100 * refused / totals.rows_in:.3g} %) were refused, {limit}:",
                *lines,
                f"all are listed in {listed_in}",
            ]
        ),
        reason="TooManyQuarantined",
    )


def write_shards(
    spool: Spool,
    totals: Totals,
    output: Store,
    meter: Meter,
    *,
    shards: int,
    states: StatesLayout,
    hidden_size: int,
    part_target_bytes: int,
    scratch: Path,
) -> list[ShardPlan]:
    """The second pass: one file of tokens a shard, each written to the output as soon as it is whole."""
    plans: list[ShardPlan] = []
    first_row = 0
    path = scratch / "shard.arrow"
    pieces = _pieces(spool, ShardCutter(shards=shards, samples=totals.samples, tokens=totals.tokens))
    upcoming = next(pieces, None)
    while upcoming is not None:
        shard = upcoming[0]
        lengths: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        with tokens_writer(path) as writer:
            while upcoming is not None and upcoming[0] == shard:
                lengths.append(_copy(writer, *upcoming[1:]))
                upcoming = next(pieces, None)
        started = time.perf_counter()
        written = output.write_file(tokens_key(shard), path)
        meter.uploaded(size_bytes=written.size_bytes, seconds=time.perf_counter() - started)
        path.unlink()
        all_lengths = np.concatenate(lengths)
        parts = cut_parts(
            all_lengths, bytes_per_token=states.bytes_per_token(hidden_size), target_bytes=part_target_bytes
        )
        plans.append(
            ShardPlan(
                index=shard,
                first_row=first_row,
                samples=len(all_lengths),
                tokens=int(all_lengths.sum()),
                parts=len(parts),
            )
        )
        first_row += len(all_lengths)
    return plans


def _pieces(spool: Spool, cutter: ShardCutter) -> Iterator[tuple[int, SpooledBlock, slice]]:
    for block in spool.blocks():
        for shard, samples in cutter.split(block.lengths):
            yield shard, block, samples


def _copy(writer: TokensWriter, block: SpooledBlock, samples: slice) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(block.lengths)])
    tokens = slice(int(offsets[samples.start]), int(offsets[samples.stop]))
    lengths = block.lengths[samples]
    writer.write(block.input_ids[tokens], block.loss_mask[tokens], lengths, block.sample_ids[samples])
    return lengths
