"""From a checkpoint's files to a decoder stack on its device: only the weights that are needed, each once, and none invented."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from headframe_api.errors import ConfigError
from headframe_worker.engine.gguf_files import gguf_read_once
from headframe_worker.engine.model_config import read_config
from headframe_worker.engine.placement import Placement, layer_costs, place, refuse_shared_weights
from headframe_worker.engine.structure import DecoderStack, prune
from headframe_worker.engine.weights import load_safetensors, read_entries

_NAMES_SHOWN = 5
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")
"""Buffers that old checkpoints carry and that the model computes itself."""
_ONE_AT_A_TIME = threading.Lock()
"""Transformers swaps methods of its classes while it loads: two threads at once can leave it unable to tie weights."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's files on this machine: a directory, and the GGUF file in it where there is one."""

    directory: Path
    gguf_file: str | None = None

    def __str__(self) -> str:
        return str(self.directory / self.gguf_file if self.gguf_file else self.directory)


def choose_devices(gpus: int) -> tuple[torch.device, ...]:
    """Where a replica runs: the CPU for 0 GPUs, else this process' first ones. Raises ConfigError where there are too few."""
    if gpus == 0:
        return (torch.device("cpu"),)
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        raise ConfigError(
            f"spec.model.gpus: {gpus}, but this machine has no usable CUDA device; set spec.model.gpus to 0 to run on the CPU",
            reason="NoGpu",
        )
    if visible < gpus:
        raise ConfigError(
            f"spec.model.gpus: {gpus}, but this process sees {visible}; ask for {gpus} GPUs a pod, or lower spec.model.gpus",
            reason="NoGpu",
        )
    return tuple(torch.device("cuda", index) for index in range(gpus))


def load_stack(
    checkpoint: Checkpoint,
    *,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    attention: str = "auto",
    trust_remote_code: bool = False,
    last_layer: int | None = None,
) -> DecoderStack:
    """Load the decoder stack of a checkpoint, in eval mode and without gradients, its layers spread over the devices.

    `last_layer`: 0-based, the last layer that is needed; later ones are never allocated. None keeps all.

    Raises ConfigError for an architecture that is unknown or no decoder, a damaged file, a weight that misses, has another
    shape, or has no place in the layers; for a model that cannot be spread.
    """
    files = [] if checkpoint.gguf_file else _weight_files(checkpoint.directory)
    for file in files:
        read_entries(file)
    with gguf_read_once(checkpoint.gguf_file):
        config = _read_config(checkpoint, trust_remote_code=trust_remote_code)
        model_class = _model_class(checkpoint, config, trust_remote_code=trust_remote_code)
        text_config = type(config).sub_configs.get("text_config")
        if text_config is not None and model_class.config_class is text_config:
            config = config.get_text_config()
        options: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
        if checkpoint.gguf_file is not None:
            # Whole weights: packed ones would compute in other kernels than the model's own.
            options |= {"gguf_file": checkpoint.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
        built: list[DecoderStack] = []
        try:
            with ExitStack() as around:
                around.enter_context(_ONE_AT_A_TIME)
                around.enter_context(_quiet())
                destinations = _Destinations(None, devices[0], {})
                if len(devices) > 1:
                    around.enter_context(_no_dispatch())
                    destinations = _spread(model_class, config, devices, last_layer)
                tensors = _on_devices(files, devices, destinations)
                loaded: Any = _pruned_class(model_class, last_layer, built).from_pretrained(
                    None if tensors else checkpoint.directory,
                    state_dict=tensors,
                    config=config,
                    dtype=dtype,
                    device_map=destinations.device_map,
                    ignore_mismatched_sizes=True,  # they are refused below, all at once
                    local_files_only=True,
                    output_loading_info=True,
                    **options,
                )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"spec.model.source: the weights of {checkpoint} do not fit the memory of {len(devices)} x {devices[0]}; take "
                f"devices with more memory, or spec.model.gpus above {len(devices)}",
                reason="ModelTooLarge",
            ) from error
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, SafetensorError) as error:
            raise ConfigError(
                f"spec.model.source: {checkpoint} cannot be loaded as {model_class.__name__}: {_first_line(error)}",
                reason="ModelNotLoadable",
            ) from error
    model, info = loaded
    _check_weights(checkpoint, model, built[-1], info)
    model.requires_grad_(False).eval()
    if devices[0].type == "cuda":
        torch.cuda.empty_cache()  # Transformers reserves the model's size once more before it loads
    return replace(built[-1], placement=destinations.placement)


@dataclass(frozen=True)
class _Destinations:
    """The device of each weight: that of its layer, or the first for all others."""

    placement: Placement | None
    first: torch.device
    by_layer_name: Mapping[str, torch.device]
    """For the layers that are not on the first device: name of the layer in the model."""

    @property
    def device_map(self) -> dict[str, torch.device]:
        """As Transformers wants it."""
        return {"": self.first, **self.by_layer_name}

    def device_of(self, name: str) -> torch.device:
        """Of a tensor by its name in the checkpoint, which may begin otherwise than in the model."""
        return next((self.by_layer_name[layer] for layer in self._candidates(name)), self.first)

    def _candidates(self, name: str) -> Iterator[str]:
        for layer in self.by_layer_name:
            path, _, number = layer.rpartition(".")
            if f".{path.rpartition('.')[2]}.{number}." in f".{name}":
                yield layer


def _spread(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    devices: Sequence[torch.device],
    last_layer: int | None,
) -> _Destinations:
    """Where the layers of such a model go, read off one without weights. Raises ConfigError where it cannot be spread."""
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    stack = prune(model, last_layer=last_layer)
    placement = place(layer_costs(stack.layers, stack.model.config), devices)
    refuse_shared_weights(stack.layers, placement, type(stack.model).__name__)
    path = next(name for name, module in model.named_modules() if module is stack.layers)
    elsewhere = range(placement.bounds[1], len(stack.layers))
    return _Destinations(placement, devices[0], {f"{path}.{index}": placement.device_of(index) for index in elsewhere})


class _Once:
    """A tensor that is given away: so the parts of a merged weight are freed as soon as they are merged."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def __getitem__(self, _all: object) -> Tensor | None:
        tensor, self._tensor = self._tensor, None
        return tensor


def _on_devices(
    files: Sequence[Path], devices: Sequence[torch.device], destinations: _Destinations
) -> dict[str, _Once] | None:
    """All tensors of safetensors files on their GPUs; None where Transformers' own reading is as good: it maps files into memory."""
    if devices[0].type != "cuda" or not files:
        return None

    def load(device: torch.device) -> dict[str, _Once]:
        loaded = load_safetensors(
            files, device=device, dtype=None, wanted=lambda name: destinations.device_of(name) == device
        )
        return {name: _Once(tensor) for name, tensor in loaded}

    distinct = list(dict.fromkeys(devices))
    with ThreadPoolExecutor(len(distinct), thread_name_prefix="weights-of") as pool:
        return {name: tensor for part in pool.map(load, distinct) for name, tensor in part.items()}


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the model, as Transformers chooses them; none for other kinds of checkpoint."""
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if (directory / SAFE_WEIGHTS_NAME).is_file():
        return [directory / SAFE_WEIGHTS_NAME]
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"spec.model.source: {index} is damaged: {error}", reason="DamagedCheckpoint") from error
    return [directory / name for name in names]


@contextmanager
def _no_dispatch() -> Iterator[None]:
    """Accelerate's hooks would move every layer's inputs anew and wait for the devices; `spread` does it instead."""
    modeling: Any = transformers.modeling_utils
    dispatch = modeling.accelerate_dispatch
    modeling.accelerate_dispatch = lambda *_args, **_options: None
    try:
        yield
    finally:
        modeling.accelerate_dispatch = dispatch


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' own report and bars: what matters of them becomes an error here."""
    logging: Any = transformers.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _pruned_class(
    model_class: type[PreTrainedModel], last_layer: int | None, built: list[DecoderStack]
) -> type[PreTrainedModel]:
    """The class with its dead weight gone as soon as it is built; Transformers builds models without allocating them."""

    def build(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        built.append(prune(self, last_layer=last_layer))

    # Transformers looks up conversions and recorders by the class' name: it must stay the same.
    names = ("__module__", "__qualname__", "__doc__")
    return type(
        model_class.__name__, (model_class,), {"__init__": build, **{k: getattr(model_class, k) for k in names}}
    )


def _read_config(checkpoint: Checkpoint, *, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        return read_config(checkpoint.directory, checkpoint.gguf_file, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"spec.model.source: the configuration of {checkpoint} cannot be read: {_first_line(error)}",
            reason="ModelNotLoadable",
        ) from error


def _model_class(checkpoint: Checkpoint, config: PreTrainedConfig, *, trust_remote_code: bool) -> type[PreTrainedModel]:
    remote: Mapping[str, str] = getattr(config, "auto_map", None) or {}
    reference = remote.get("AutoModelForCausalLM") or remote.get("AutoModel")
    if trust_remote_code and reference:
        return cast("type[PreTrainedModel]", get_class_from_dynamic_module(reference, checkpoint.directory))
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES):
        name = mapping.get(config.model_type)
        if name is not None:
            return cast("type[PreTrainedModel]", getattr(transformers, name if isinstance(name, str) else name[0]))
    if type(config) in AutoModelForCausalLM._model_mapping:  # noqa: SLF001  # registered by a package of the user's
        return cast("type[PreTrainedModel]", AutoModelForCausalLM._model_mapping[type(config)])  # noqa: SLF001
    raise ConfigError(
        f"spec.model.source: {checkpoint} is of type {config.model_type!r}, for which transformers "
        f"{transformers.__version__} has no text model",
        reason="UnsupportedModel",
    )


def _check_weights(
    checkpoint: Checkpoint, model: PreTrainedModel, stack: DecoderStack, info: Mapping[str, Any]
) -> None:
    problems = []
    missing = sorted(info["missing_keys"])
    if missing:
        problems.append(f"lacks {_listed(missing)}")
    mismatched = sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if mismatched:
        problems.append(f"has another shape than its configuration says for {_listed(mismatched)}")
    if info.get("error_msgs"):
        problems.append("cannot be converted: " + _listed([str(message) for message in info["error_msgs"]]))
    strays = _strays(model, stack, info["unexpected_keys"])
    if strays:
        problems.append(f"has weights that the model's layers have no place for: {_listed(strays)}")
    if problems:
        raise ConfigError(
            f"spec.model.source: {checkpoint} {'; it '.join(problems)}. The states would be wrong: check that files "
            "and configuration belong together",
            reason="IncompleteCheckpoint",
        )


def _strays(model: PreTrainedModel, stack: DecoderStack, unexpected: Sequence[str]) -> list[str]:
    """Unexpected weights of a layer that is in use: a bias or a scale that the forward would leave out."""
    path = next(name for name, module in model.named_modules() if module is stack.layers)
    within = re.compile(rf"(?:^|\.){re.escape(path.rpartition('.')[2])}\.(\d+)\.")
    strays = []
    for key in sorted(unexpected):
        match = within.search(key)
        is_ours = match is not None and path.startswith(key[: match.start()])
        if match and is_ours and int(match[1]) < len(stack.layers) and not _HARMLESS.search(key):
            strays.append(key)
    return strays


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
