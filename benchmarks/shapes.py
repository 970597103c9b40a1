"""Shapes of models that the GPU benchmarks build with random weights, and lengths like those of real chat."""

from __future__ import annotations

import random

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

SHAPES = {
    "hybrid-27b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_value_heads": 48,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
    },
    "dense-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "dense-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "dense-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "sliding-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 4096,
        "vocab_size": 32768,
    },
    "tiny": {
        "model_type": "qwen3_5_text",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "vocab_size": 1000,
    },
}


def build(shape: str, layers: int | None, device: torch.device) -> nn.Module:
    """The decoder stack of a shape in bfloat16, with random weights; `layers` of them, or as many as the shape has."""
    values = dict(SHAPES[shape])
    values["num_hidden_layers"] = layers or values["num_hidden_layers"]
    config = AutoConfig.for_model(values.pop("model_type"), **values, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with device:
        return AutoModel.from_config(config, dtype=torch.bfloat16).eval()


def chat_lengths(samples: int, seed: int) -> list[int]:
    """Lengths like those of real chat: lognormal, 400 on average, up to 4096."""
    draw = random.Random(seed)
    return [min(4096, max(16, int(draw.lognormvariate(5.67, 0.8)))) for _ in range(samples)]
