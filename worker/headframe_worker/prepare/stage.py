"""prepare: from a manifest and text to tokens/, quarantine/ and plan.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headframe_api.job import ExtractionJob
from headframe_api.plan import PART_TARGET_BYTES, Plan
from headframe_worker.meter import Meter
from headframe_worker.stores.base import Store


@dataclass(frozen=True)
class Prepared:
    """What prepare made, or found."""

    plan: Plan
    reused: bool
    """True: an earlier run had made it, from the same inputs and spec."""
    notes: tuple[str, ...]
    """What a user should know: what `auto` decided, what was left out of masks."""


def prepare(
    job: ExtractionJob,
    output: Store,
    *,
    scratch: Path,
    meter: Meter,
    processes: int | None = None,
    fresh: bool = False,
    part_target_bytes: int = PART_TARGET_BYTES,
) -> Prepared:
    """Tokenise the dataset of a job and commit its plan; reuse what an earlier run of the same inputs made."""
    raise NotImplementedError((job, output, scratch, meter, processes, fresh, part_target_bytes))
