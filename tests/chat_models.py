"""Tiny models with real tokenizers and the chat templates whose traits matter, saved as directories."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headframe_api.job import ExtractionJob
from headframe_api.parse import parse_job

EXAMPLES = Path(__file__).parent.parent / "examples" / "data" / "chats.jsonl"
SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|head|>", "<|eot|>", "<|end|>", "<|return|>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes thinking into the turns after the last question only, and an empty thought into the last one without any.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set thought = m.reasoning_content or '' %}{% set answer = m.content %}"
    "{% if '</think>' in answer %}"
    "{% set thought = answer.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set answer = answer.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ answer }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Begins with a BOS of its own and trims contents.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|head|>\n\n{% endif %}"
)
# Refuses a system role and roles that do not alternate.
REFUSING = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No header of its own, as Llama 2 and Mistral: the answer follows the question's closing bracket.
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
)
# Ends the last turn otherwise than the earlier ones, and drops earlier analysis, as gpt-oss.
CHANNELS = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% if loop.last and m.reasoning_content %}<|start|>assistant<|head|>analysis {{ m.reasoning_content }}<|end|>{% endif %}"
    "<|start|>assistant<|head|>final {{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|head|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Its generation prompt opens a thought that rendered turns never hold, as DeepSeek-R1.
OPENS_THOUGHT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|head|>{{ m.content.split('</think>')[-1] }}<eos>{% else %}<|start|>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|head|><think>\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@cache
def tokenizer_json(trim_offsets: bool = True, adds_bos: bool = True) -> str:
    """A byte-level BPE tokenizer, trained on the example chats, that adds a BOS like Llama's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(EXAMPLES.read_text(encoding="utf-8").splitlines(), trainer)
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if adds_bos:
        steps.append(processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)]))
    tokenizer.post_processor = processors.Sequence(steps)
    text: str = tokenizer.to_str()
    return text


def tiny_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """The tokenizer with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json()), bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_config(**changes: Any) -> LlamaConfig:
    """A Llama of 8 layers of 16."""
    values: dict[str, Any] = {
        "vocab_size": 2000,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    }
    return LlamaConfig(**{**values, **changes})


def save_tiny_model(directory: Path, template: str | None = CHATML, **changes: Any) -> Path:
    """Weights, configuration and tokenizer in one directory."""
    LlamaForCausalLM(tiny_config(**changes)).save_pretrained(directory)
    tiny_tokenizer(template).save_pretrained(directory)
    return directory


def job_of(model: Path | str, dataset: Path | str, output: Path | str, **spec: Any) -> ExtractionJob:
    """A job on the CPU; `dataset_` and `model_` hold further fields of those parts."""
    document = {
        "apiVersion": "headframe.dev/v1alpha1",
        "kind": "ExtractionJob",
        "metadata": {"name": "test"},
        "spec": {
            "model": {"source": str(model), "gpus": 0, **spec.pop("model_", {})},
            "dataset": {"source": str(dataset), **spec.pop("dataset_", {})},
            "states": {"layers": [1, 5]},
            "output": {"uri": str(output)},
            **spec,
        },
    }
    return parse_job(document)


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
