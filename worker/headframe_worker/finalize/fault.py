"""What finalize and verify find wrong: where, and what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_FAULTS_SHOWN = 40


@dataclass(frozen=True, order=True)
class Fault:
    """One fault of a dataset."""

    place: str
    """Key of the object, with the row where one is meant: `states/shard-00000/part-00001.safetensors row 17`."""
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


def fault_list(faults: Sequence[Fault]) -> str:
    """One fault a line; of very many the first ones and how many more there are."""
    lines = [f"  {fault}" for fault in faults[:MOST_FAULTS_SHOWN]]
    if len(faults) > MOST_FAULTS_SHOWN:
        lines.append(f"  and {len(faults) - MOST_FAULTS_SHOWN:,} more")
    return "\n".join(lines)
