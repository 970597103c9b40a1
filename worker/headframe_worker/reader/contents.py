"""What `headframe inspect` tells of a dataset: a summary of the whole, and one sample token by token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from headframe_api.errors import ConfigError
from headframe_api.names import part_key
from headframe_worker.reader.dataset import StatesDataset


@dataclass(frozen=True)
class TokenLine:
    """One token of a sample."""

    position: int
    token_id: int
    text: str | None
    """What it decodes to; None without the tokenizer."""
    learned: bool
    """Whether the loss mask counts it."""
    norms: list[float]
    """L2 norm of its state in each slot."""


@dataclass(frozen=True)
class SampleContents:
    """One sample, laid open."""

    row: int
    sample_id: str
    part: str
    """Key of the part that holds it."""
    first_token: int
    """Where it begins in the part."""
    slots: list[str]
    tokens: list[TokenLine]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def sample_contents(dataset: StatesDataset, row: int, tokenizer: Any = None) -> SampleContents:
    """The stored sample of a row of tokens/. Raises ConfigError where there is none."""
    found = (dataset.index.rows == row).nonzero()[0]
    if not len(found):
        raise ConfigError(
            f"row {row}: not in this dataset of rows {dataset.index.rows[0] if len(dataset) else 0} to "
            f"{dataset.index.rows[-1] if len(dataset) else 0}; it may be in quarantine",
            reason="NoSuchRow",
        )
    position = int(found[0])
    sample = dataset[position]
    states = sample.hidden_states if sample.last is None else torch.cat([sample.hidden_states, sample.last[:, None]], 1)
    norms = torch.linalg.vector_norm(states.float(), dim=-1).tolist()
    ids, learned = sample.token_ids.tolist(), sample.loss_mask.tolist()
    index = dataset.index
    return SampleContents(
        row=row,
        sample_id=sample.sample_id,
        part=part_key(int(index.shards[position]), int(index.parts[position])),
        first_token=int(index.starts[position]),
        slots=dataset.slot_names,
        tokens=[
            TokenLine(
                at, ids[at], None if tokenizer is None else tokenizer.decode([ids[at]]), bool(learned[at]), norms[at]
            )
            for at in range(len(ids))
        ],
    )
