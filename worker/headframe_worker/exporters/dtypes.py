"""Which dtype an export's states have."""

from __future__ import annotations

import torch

from headframe_api.errors import ConfigError
from headframe_api.plan import Plan
from headframe_api.spec import StateDtype
from headframe_worker.reader.sample import TORCH_DTYPE


def export_dtype(plan: Plan, asked: StateDtype | None, *, trainer: str) -> torch.dtype:
    """The asked dtype, else the stored one, with float8 decoded to bfloat16. Raises ConfigError for float8: it would need scales."""
    if asked == "float8_e4m3fn":
        raise ConfigError(f"--dtype float8_e4m3fn: {trainer}'s files have no place for its scales; take bfloat16")
    stored = plan.states.dtype
    return TORCH_DTYPE[asked or ("bfloat16" if stored == "float8_e4m3fn" else stored)]
