"""The last state in the convention that a trainer wants: before or after the final norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headframe_api.errors import ConfigError
from headframe_api.plan import Plan, StatesLayout
from headframe_worker.exporters.samples import Sample
from headframe_worker.model_ends.checkpoint import ModelAccess
from headframe_worker.model_ends.ends import ModelEnds, load_ends


@dataclass(frozen=True)
class PostNorm:
    """Gives the last state after the final norm: as stored, or from the state before it by the model's own norm."""

    ends: ModelEnds | None

    @classmethod
    def prepare(cls, plan: Plan, access: ModelAccess, *, trainer: str) -> PostNorm:
        """Load the norm where it is needed. Raises ConfigError where the dataset holds no last state."""
        need_last(plan.states, trainer)
        return cls(load_ends(plan.model, access, head=False) if plan.states.last == "preNorm" else None)

    def of(self, sample: Sample, dtype: torch.dtype) -> Tensor:
        """[T, H]"""
        if self.ends is None:
            return sample.decoded(dtype)[:, -1].contiguous()
        wide = torch.float32 if sample.scales is not None else sample.states.dtype
        return self.ends.normed(sample.decoded(wide)[:, -1]).to(dtype)


def need_last(states: StatesLayout, trainer: str) -> None:
    """Raise ConfigError unless the dataset keeps a last state."""
    if states.last == "none":
        raise ConfigError(
            f"{trainer} needs the last state, and this dataset was extracted with spec.states.last: none; extract it with preNorm",
            reason="NotRepresentable",
        )
