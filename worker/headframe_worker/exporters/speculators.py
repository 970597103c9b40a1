"""speculators' offline training data: a `save_to_disk` directory, and one safetensors file of states a row.

Checked against speculators 0.9.0 and hs-connectors 0.9.0: speculators/train/{data,vocab_mapping}.py,
hs_connectors/{transfer,fp8_utils}.py.

    dataset_info.json state.json shard-00000.arrow ...    tokens/ as it is: rows keep their numbers
    token_freq.pt                                         how often each token is supervised, for a reduced draft vocabulary
    hidden_states/hs_{row}.safetensors                    hidden_states [T, L + 1, H], the last slot BEFORE the final norm,
                                                          token_ids [T] int64; for fp8 hidden_states_scales float32 too

Layers are numbered as Hugging Face's tuple: `--target-layer-ids` are Headframe's layers plus one. A scale is [T, L + 1, 1], one a
token and slot, where the dataset is float8; [T, 1, 1], as their own writer makes it, where it is made float8 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from headframe_api.errors import ConfigError
from headframe_api.names import TOKENS_PREFIX, tokens_key
from headframe_api.plan import Plan, StatesLayout
from headframe_api.spec import StateDtype
from headframe_worker.exporters.export import FilePerSample, PartDone, SourceKey
from headframe_worker.exporters.kept_layers import need_ascending
from headframe_worker.exporters.last_state import need_last
from headframe_worker.exporters.samples import Sample, SourceDataset
from headframe_worker.exporters.torch_files import saved
from headframe_worker.prepare.tokens_file import DATASET_INFO_KEY, STATE_KEY, read_tokens
from headframe_worker.reader.sample import TORCH_DTYPE
from headframe_worker.stores.base import Store
from headframe_worker.stores.local import LocalStore

_FLOAT8 = torch.float8_e4m3fn
_SMALLEST_SCALE = 1e-12


class Speculators(FilePerSample):
    """See the module."""

    def __init__(self, plan: Plan, *, dtype: StateDtype | None = None) -> None:
        need_representable(plan.states)
        self._dtype = TORCH_DTYPE[dtype or plan.states.dtype]

    @property
    def options(self) -> dict[str, Any]:
        """See Exporter."""
        return {"to": "speculators", "dtype": str(self._dtype)}

    def key(self, row: int) -> str:
        """See FilePerSample."""
        return f"hidden_states/hs_{row}.safetensors"

    def content(self, sample: Sample) -> bytes:
        """See FilePerSample."""
        tensors = {"token_ids": sample.token_ids}
        if self._dtype != _FLOAT8:
            tensors["hidden_states"] = sample.decoded(self._dtype).contiguous()
        elif sample.scales is not None:
            tensors |= {
                "hidden_states": sample.states,
                "hidden_states_scales": sample.scales.unsqueeze(-1).contiguous(),
            }
        else:
            tensors["hidden_states"], tensors["hidden_states_scales"] = _to_float8(sample.states)
        return save(tensors)

    def finish(self, source: SourceDataset, target: Store, done: Iterator[tuple[SourceKey, PartDone]]) -> None:  # noqa: ARG002
        """See Exporter."""
        write_tokens_directory(source, target)


def need_representable(states: StatesLayout) -> None:
    """Raise ConfigError unless the layers ascend and the last state is the one before the norm: the trainer applies it itself."""
    need_last(states, "speculators")
    if states.last != "preNorm":
        raise ConfigError(
            "speculators applies the final norm itself, and this dataset holds the last state after it (spec.states.last: "
            f"{states.last}); a norm cannot be undone: extract with last: preNorm",
            reason="NotRepresentable",
        )
    need_ascending(states, "speculators")


def write_tokens_directory(source: SourceDataset, target: Store) -> None:
    """What speculators' `--data-path` must hold beside the states: tokens/ (hard-linked where it can be) and token_freq.pt."""
    frequencies = np.zeros(source.plan.model.vocab_size, np.int64)
    with TemporaryDirectory(prefix="headframe-tokens-") as scratch:
        for shard in source.plan.shards:
            path = source.store.fetch(tokens_key(shard.index), Path(scratch))
            tokens = read_tokens(path)
            supervised = tokens.input_ids[tokens.loss_mask.astype(bool)]
            counts = np.bincount(supervised, minlength=len(frequencies))
            frequencies = np.pad(frequencies, (0, max(0, len(counts) - len(frequencies)))) + counts
            _place(path, target, tokens_key(shard.index).removeprefix(TOKENS_PREFIX))
            if not isinstance(source.store, LocalStore):
                path.unlink()
    for key in (DATASET_INFO_KEY, STATE_KEY):
        target.write(key.removeprefix(TOKENS_PREFIX), [memoryview(source.store.read(key))])
    seen = {int(token): int(frequencies[token]) for token in np.flatnonzero(frequencies)}
    target.write("token_freq.pt", [saved(seen)])


def _place(path: Path, target: Store, key: str) -> None:
    """A hard link where both lie on one file system, else a copy."""
    if isinstance(target, LocalStore):
        link = target.directory / key
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.hardlink_to(path)
        except FileExistsError:
            return
        except OSError:  # another file system, or one without links
            pass
        else:
            return
    target.write_file(key, path)


def _to_float8(states: Tensor) -> tuple[Tensor, Tensor]:
    wide = states.float()
    scales = (wide.abs().amax(dim=(1, 2), keepdim=True) / torch.finfo(_FLOAT8).max).clamp(min=_SMALLEST_SCALE)
    return (wide / scales).to(_FLOAT8), scales
