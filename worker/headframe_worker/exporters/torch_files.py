"""Plain PyTorch: one `torch.load`-able dictionary a sample, for trainers of one's own.

rows_0-2000/row_17.pt   input_ids [T] int64, loss_mask [T] int64, hidden_states [T, S, H], row, sample_id,
                        layers (0-based outputs of decoder layers; -1 the embeddings), last (preNorm | postNorm | none)
"""

from __future__ import annotations

import io
from typing import Any

import torch

from headframe_api.plan import Plan
from headframe_api.spec import StateDtype
from headframe_worker.exporters.dtypes import export_dtype
from headframe_worker.exporters.export import FilePerSample
from headframe_worker.exporters.samples import Sample

_ROWS_PER_FOLDER = 2000


class TorchFiles(FilePerSample):
    """See the module."""

    def __init__(self, plan: Plan, *, dtype: StateDtype | None = None) -> None:
        self._states = plan.states
        self._dtype = export_dtype(plan, dtype, trainer="torch")

    @property
    def options(self) -> dict[str, Any]:
        """See Exporter."""
        return {"to": "torch", "dtype": str(self._dtype)}

    def key(self, row: int) -> str:
        """See FilePerSample."""
        return f"{rows_folder(row)}/row_{row}.pt"

    def content(self, sample: Sample) -> memoryview:
        """See FilePerSample."""
        return saved(
            {
                "input_ids": sample.token_ids,
                "loss_mask": sample.loss_mask,
                "hidden_states": sample.decoded(self._dtype),
                "row": sample.row,
                "sample_id": sample.sample_id,
                "layers": list(self._states.layers),
                "last": self._states.last,
            }
        )


def rows_folder(row: int) -> str:
    """`rows_2000-4000` for row 2500: no folder holds more than 2000 files."""
    first = row - row % _ROWS_PER_FOLDER
    return f"rows_{first}-{first + _ROWS_PER_FOLDER}"


def saved(value: dict[Any, Any]) -> memoryview:
    """What `torch.save` writes; `torch.load(weights_only=True)` reads it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()
