"""Hidden states of SmolLM2 over real chats as a finished dataset, computed by plain Transformers with hooks.

Small enough for a CPU within a minute, and real enough that a head predicts the text and a drafter learns from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from synthetic_output import SyntheticOutput, write_finished
from tiny_models import smollm2_gguf, smollm2_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from headframe_api.plan import ModelIdentity
from headframe_api.spec import ModelSpec, S3Spec
from headframe_worker.engine.gguf_files import gguf_read_once
from headframe_worker.model_source import locate_model
from headframe_worker.prepare.model_structure import describe_model

LAYERS = 30
DFLASH = (1, 8, 14, 20, 27)
_CHATS = Path(__file__).parents[1] / "examples/data/chats.jsonl"


@cache
def smollm2() -> Any:
    """The model in float32."""
    file = smollm2_gguf()
    with gguf_read_once(file.name):
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@cache
def identity() -> ModelIdentity:
    """As prepare would state it."""
    spec = ModelSpec(source=str(smollm2_gguf()), dtype="float32", gpus=0)
    return describe_model(locate_model(spec, S3Spec(), scratch=Path(), weights=False), spec)[0]


def chats(count: int, max_length: int) -> list[NDArray[np.int64]]:
    """Token ids of the first chats of the examples."""
    messages = [json.loads(line)["messages"] for line in _CHATS.read_text().splitlines()[:count]]
    rendered = [smollm2_tokenizer().apply_chat_template(chat, return_dict=True)["input_ids"] for chat in messages]
    return [np.array(ids[:max_length], np.int64) for ids in rendered]


def states_of(layers: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """From tokens [T] to outputs of decoder layers [T, S, H], before any final norm."""
    return lambda tokens: torch.stack([_all_states(tuple(tokens.tolist()))[layer] for layer in layers], dim=1)


@cache
def _all_states(tokens: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """Output [T, H] of every layer that a test wants."""
    found: dict[int, torch.Tensor] = {}

    def keep(number: int) -> Any:
        return lambda _module, _inputs, output: found.update(
            {number: (output[0] if isinstance(output, tuple) else output).reshape(len(tokens), -1)}
        )

    layers = smollm2().model.layers
    hooks = [layers[layer].register_forward_hook(keep(layer)) for layer in (*DFLASH, LAYERS - 2, LAYERS - 1)]
    try:
        with torch.no_grad():
            smollm2().model(torch.tensor([tokens]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def write_smollm2(
    directory: Path,
    *,
    samples: int = 24,
    max_length: int = 160,
    last: str = "preNorm",
    last_from: Callable[[torch.Tensor], torch.Tensor] | None = None,
    norm_gain: str = "weight",
    **options: Any,
) -> SyntheticOutput:
    """A finished dataset; `last_from` changes the last state, and `norm_gain` what the plan says of the norm, for tests of mistakes."""
    compute = states_of((*DFLASH, LAYERS - 1))

    def states(tokens: torch.Tensor) -> torch.Tensor:
        found = compute(tokens)
        if last_from is not None:
            found[:, -1] = last_from(tokens)
        return found

    return write_finished(
        directory,
        tokens=chats(samples, max_length),
        states_of=states,
        layers=DFLASH,
        last=last,
        model=identity().model_copy(update={"norm_gain": norm_gain}),
        model_source=identity().source,
        part_target_bytes=2_000_000,
        refuse=False,
        **options,
    )


def save_smollm2(directory: Path) -> Path:
    """The model as a safetensors checkpoint: a model loaded from GGUF cannot be saved as it is."""
    config = AutoConfig.from_pretrained(smollm2_gguf().parent, gguf_file=smollm2_gguf().name)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(smollm2().state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    smollm2_tokenizer().save_pretrained(directory)
    return directory
