"""NVIDIA Model Optimizer's offline states: one `torch.save` dictionary a sample.

Checked against NVIDIA/Model-Optimizer a2fbac7: modelopt/torch/speculative/eagle/utils.py (OfflineSupervisedDataset) and
examples/speculative_decoding/collect_hidden_states/compute_hidden_states_hf.py, whose convention this is: layers are 0-based
outputs, and `hidden_states` is the last state AFTER the final norm (their vLLM script's is not, and numbers layers one earlier).

    rows_0-2000/17.pt   input_ids [T] int64, hidden_states [T, H], aux_hidden_states [T, L*H], loss_mask [T] int64,
                        conversation_id (the sample's id), hidden_states_prenorm (False)
"""

from __future__ import annotations

from typing import Any

from headframe_api.plan import Plan
from headframe_api.spec import StateDtype
from headframe_worker.exporters.dtypes import export_dtype
from headframe_worker.exporters.export import FilePerSample
from headframe_worker.exporters.kept_layers import layers_side_by_side, need_decoder_layers
from headframe_worker.exporters.last_state import PostNorm
from headframe_worker.exporters.samples import Sample
from headframe_worker.exporters.torch_files import rows_folder, saved
from headframe_worker.model_ends.checkpoint import ModelAccess


class ModelOpt(FilePerSample):
    """See the module."""

    def __init__(self, plan: Plan, access: ModelAccess, *, dtype: StateDtype | None = None) -> None:
        need_decoder_layers(plan.states, "Model Optimizer")
        self._layers = len(plan.states.layers)
        self._dtype = export_dtype(plan, dtype, trainer="Model Optimizer")
        self._last = PostNorm.prepare(plan, access, trainer="Model Optimizer")

    @property
    def options(self) -> dict[str, Any]:
        """See Exporter."""
        return {"to": "modelopt", "dtype": str(self._dtype)}

    def key(self, row: int) -> str:
        """See FilePerSample."""
        return f"{rows_folder(row)}/{row}.pt"

    def content(self, sample: Sample) -> memoryview:
        """See FilePerSample."""
        return saved(
            {
                "input_ids": sample.token_ids,
                "hidden_states": self._last.of(sample, self._dtype),
                "aux_hidden_states": layers_side_by_side(sample, self._layers, self._dtype),
                "loss_mask": sample.loss_mask,
                "conversation_id": sample.sample_id,
                "hidden_states_prenorm": False,
            }
        )
