"""SpecForge's offline features: one `torch.save` dictionary a sample, found by its suffix.

Checked against sgl-project/SpecForge a6b6b02: specforge/runtime/data_plane/offline_reader.py,
specforge/algorithms/{eagle3/data,common/dflash_family_data}.py, scripts/prepare_hidden_states.py.

    rows_0-2000/data_17.ckpt    input_ids [T] int64, loss_mask [T] int64, and
      eagle3:          aux_hidden_state [1, T, L*H], hidden_state [1, T, H] (after the final norm)
      dflash, domino:  hidden_states [1, T, L*H]
      dspark:          the same, and target_last_hidden_states [1, T, H] (after the final norm)

Layers are numbered as Headframe's: k is the output of decoder layer k. The DFlash family's reader raises for a sample
without two supervised tokens in a row, so such samples are left out, and counted.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from headframe_api.errors import ConfigError
from headframe_api.plan import Plan
from headframe_api.spec import StateDtype
from headframe_worker.exporters.dtypes import export_dtype
from headframe_worker.exporters.export import FilePerSample
from headframe_worker.exporters.kept_layers import layers_side_by_side, need_decoder_layers
from headframe_worker.exporters.last_state import PostNorm
from headframe_worker.exporters.samples import Sample
from headframe_worker.exporters.torch_files import rows_folder, saved
from headframe_worker.model_ends.checkpoint import ModelAccess
from headframe_worker.trainers.numbers import SPECFORGE_EAGLE3_LAYERS

Strategy = Literal["eagle3", "dflash", "domino", "dspark"]


class SpecForge(FilePerSample):
    """See the module."""

    def __init__(self, plan: Plan, access: ModelAccess, *, strategy: Strategy, dtype: StateDtype | None = None) -> None:
        need_decoder_layers(plan.states, "SpecForge")
        if strategy == "eagle3" and len(plan.states.layers) != SPECFORGE_EAGLE3_LAYERS:
            raise ConfigError(
                f"SpecForge's EAGLE-3 takes exactly {SPECFORGE_EAGLE3_LAYERS} layers; this dataset keeps spec.states.layers: "
                f"{plan.states.layers}; extract with preset: eagle3, or name another --strategy",
                reason="NotRepresentable",
            )
        self._strategy = strategy
        self._layers = len(plan.states.layers)
        self._dtype = export_dtype(plan, dtype, trainer="SpecForge")
        self._last = PostNorm.prepare(plan, access, trainer="SpecForge") if strategy in ("eagle3", "dspark") else None

    @property
    def options(self) -> dict[str, Any]:
        """See Exporter."""
        return {"to": "specforge", "strategy": self._strategy, "dtype": str(self._dtype)}

    def key(self, row: int) -> str:
        """See FilePerSample."""
        return f"{rows_folder(row)}/data_{row}.ckpt"

    def accepts(self, mask: Any) -> bool:
        """See FilePerSample."""
        return self._strategy == "eagle3" or bool(np.any(mask[1:] & mask[:-1]))

    def content(self, sample: Sample) -> memoryview:
        """See FilePerSample."""
        aux = layers_side_by_side(sample, self._layers, self._dtype).unsqueeze(0)
        features = {"input_ids": sample.token_ids, "loss_mask": sample.loss_mask}
        features["aux_hidden_state" if self._strategy == "eagle3" else "hidden_states"] = aux
        if self._last is not None:
            last = self._last.of(sample, self._dtype).unsqueeze(0)
            features["hidden_state" if self._strategy == "eagle3" else "target_last_hidden_states"] = last
        return saved(features)
