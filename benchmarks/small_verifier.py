"""A small language model made on the spot: where nothing can be downloaded, a drafter still needs a verifier that predicts its text.

The text is what every Python installation holds: the sources of its library and of the packages beside it. Files are split
into training and held-out ones by a digest of their path, so that nothing learned from is measured on.
"""

from __future__ import annotations

import hashlib
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|end|>", "<|mask|>")
_HELD_OUT_OF = 20
_SHORTEST_FILE, _LONGEST_FILE = 400, 200_000
_TOKENIZER_BYTES = 10_000_000


@dataclass(frozen=True)
class Corpus:
    """Files' texts."""

    training: list[str]
    held_out: list[str]


@dataclass(frozen=True)
class VerifierSize:
    """Of the model and of its training."""

    vocabulary: int
    hidden_size: int
    layers: int
    context: int
    batch: int
    seconds: float


def python_sources(limit_bytes: int) -> Corpus:
    """Texts of Python files of this installation, in an order that only their paths decide, up to about so many bytes."""
    roots = {Path(sysconfig.get_path("stdlib")), *(Path(package.__path__[0]) for package in (torch, transformers))}
    paths = {str(path) for root in roots for path in root.rglob("*.py")}
    ordered = sorted((hashlib.sha256(path.encode()).digest(), path) for path in paths)
    found = Corpus([], [])
    taken = 0
    with ThreadPoolExecutor(32) as threads:  # the files of a container's image may come from far
        for batch in range(0, len(ordered), 1024):
            chunk = ordered[batch : batch + 1024]
            for (digest, _), text in zip(chunk, threads.map(_text, (path for _, path in chunk)), strict=True):
                if _SHORTEST_FILE <= len(text) <= _LONGEST_FILE:
                    (found.held_out if digest[-1] % _HELD_OUT_OF == 0 else found.training).append(text)
                    taken += len(text)
                if taken > limit_bytes:
                    return found
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (UnicodeDecodeError, OSError):
        return ""


def pieces(texts: list[str], characters: int) -> Iterator[str]:
    """Texts cut at line ends into samples of about so many characters; shorter rests are left out."""
    for text in texts:
        piece = ""
        for line in text.splitlines(keepends=True):
            piece += line
            if len(piece) >= characters:
                yield piece
                piece = ""


def train_tokenizer(corpus: Corpus, vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts, size = [], 0
    for text in corpus.training:
        texts.append(text)
        size += len(text)
        if size > _TOKENIZER_BYTES:
            break
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], mask_token=SPECIAL[1])


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """[T] int64: all texts one after the other, each followed by the end token."""
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    end = tokenizer.eos_token_id
    return torch.tensor([token for text in encoded for token in (*text.ids, end)])


def train_verifier(
    tokenizer: PreTrainedTokenizerFast, corpus: Corpus, size: VerifierSize, device: torch.device
) -> tuple[LlamaForCausalLM, dict[str, float]]:
    """A Llama trained for `size.seconds` on random windows; with it, what its training was like."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.hidden_size * 8 // 3 // 32 * 32,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden_size // 32 if size.hidden_size < 256 else size.hidden_size // 64,
        num_key_value_heads=2,
        max_position_embeddings=2 * size.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).to(device)
    stream = token_stream(tokenizer, corpus.training).to(device)
    window = torch.arange(size.context, device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.05, fused=device.type == "cuda"
    )
    started, steps = time.monotonic(), 0
    while (spent := (time.monotonic() - started) / size.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, steps / 100) * (1 - spent)
        places = torch.randint(len(stream) - size.context, (size.batch, 1), device=device)
        batch = stream[places + window]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 10 == 0:
            loss.item()  # waits for the GPU, so that the time spent is known
    report = {
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
        "corpus_tokens": float(len(stream)),
        "steps": float(steps),
        "tokens_trained_on": float(steps * size.batch * size.context),
        "loss": loss.item(),
        "held_out_loss": _held_out_loss(model.eval(), token_stream(tokenizer, corpus.held_out), size, device),
    }
    return model.to(torch.bfloat16), report


@torch.inference_mode()
def _held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor, size: VerifierSize, device: torch.device) -> float:
    count = min(64, len(stream) // size.context)
    windows = stream[: count * size.context].view(count, size.context).to(device)
    losses = [float(model(input_ids=rows, labels=rows, use_cache=False).loss) for rows in windows.split(8)]
    return sum(losses) / len(losses)
