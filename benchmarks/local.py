"""What extraction costs over the bare forward pass, on this machine's CPU: ratios within one run, so that they compare.

    python benchmarks/local.py [--model small|smollm2] [--repeats 3] [--out result.json]

forward-only: the decoder stack alone on exactly the batches of the extraction, nothing captured, nothing stored.
end to end:   the extract stage from tokens/ to committed parts on disk (the model is loaded before the clock starts).
naive:        what most scripts do: one sample at a time, all hidden states, stacked, `torch.save`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import tiny_models
from prepared_output import write_prepared

from headframe_worker.engine.batches import cut_batches, pad_right
from headframe_worker.engine.budget import default_tokens
from headframe_worker.engine.loading import Checkpoint, load_stack
from headframe_worker.extract.stage import Extractor
from headframe_worker.format.cut import shard_parts
from headframe_worker.meter import Meter

CPU = torch.device("cpu")
SMALL = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


def chat_like(tokens: int, vocabulary: int) -> list[NDArray[np.int64]]:
    """Samples of lognormal length, mean about 400, up to 2048, until there are so many tokens."""
    random = np.random.default_rng(0)
    samples: list[NDArray[np.int64]] = []
    while sum(map(len, samples)) < tokens:
        length = int(np.clip(random.lognormal(5.7, 0.75), 8, 2048))
        samples.append(random.integers(3, vocabulary, length))
    return samples


def seconds(work: Callable[[], Any]) -> float:
    """Wall clock of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("small", "smollm2"), default="small")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--batch-tokens", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headframe-benchmark-") as folder:
        result = measure(Path(folder), arguments)
    print_table(result)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All three ways, alternating, so that a noisy machine disturbs them alike."""
    if arguments.model == "small":
        source = folder / "model"
        tiny_models.save("llama", source, vocab_size=8000, **SMALL)
        checkpoint, vocabulary = Checkpoint(source), 8000
    else:
        source = tiny_models.smollm2_gguf()
        checkpoint, vocabulary = Checkpoint(source.parent, source.name), 49_000
    samples = chat_like(arguments.tokens, vocabulary)
    stack = load_stack(checkpoint, devices=[CPU], dtype=torch.float32)

    def prepared(index: int) -> Extractor:
        job, plan, store = write_prepared(
            folder / f"output-{index}",
            source,
            samples,
            states={"preset": "dflash", "dtype": "bfloat16"},
            batch_tokens=arguments.batch_tokens or "auto",
            part_target_bytes=16 << 20,
        )
        extraction = Extractor(
            job,
            plan,
            store,
            devices=[CPU],
            scratch=folder,
            meter=Meter("extract"),
            stop=threading.Event(),
        )
        extraction.load()
        return extraction

    extractions = [prepared(index) for index in range(arguments.repeats)]
    plan = extractions[0].plan
    budget = arguments.batch_tokens or default_tokens(CPU)
    batches = []
    for part in shard_parts(plan, [len(sample) for sample in samples]):
        for batch in cut_batches(part.lengths, budget):
            rows = part.rows[batch.first : batch.first + batch.samples]
            lengths = part.lengths[batch.first : batch.first + batch.samples]
            ids, _ = pad_right(np.concatenate([samples[row] for row in rows]).astype(np.int32), lengths)
            batches.append(torch.from_numpy(ids))
    layers = plan.states.layers

    def forward_only() -> None:
        with torch.inference_mode():
            for ids in batches:
                stack.forward(ids)

    def naive() -> None:
        with torch.no_grad():
            for row, sample in enumerate(samples):
                output = stack.forward(torch.from_numpy(sample)[None], output_hidden_states=True)
                states = torch.stack([output.hidden_states[layer + 1][0] for layer in layers])
                torch.save(states.to(torch.bfloat16).clone(), folder / f"naive-{row}.pt")

    forward_only()  # warm
    times: dict[str, list[float]] = {"forward-only": [], "end to end": [], "naive": []}
    for extraction in extractions:
        times["forward-only"].append(seconds(forward_only))
        times["end to end"].append(seconds(lambda extraction=extraction: extraction.run(0)))
        times["naive"].append(seconds(naive))
    ratios = [a / b for a, b in zip(times["forward-only"], times["end to end"], strict=True)]
    padded = sum(ids.numel() for ids in batches)
    return {
        "model": arguments.model,
        "tokens": plan.tokens,
        "samples": plan.samples,
        "batch_tokens": budget,
        "padding_fraction": round(1 - plan.tokens / padded, 4),
        "tokens_per_second": {
            name: round(plan.tokens / statistics.median(values), 1) for name, values in times.items()
        },
        "end_to_end_over_forward_only": round(statistics.median(ratios), 3),
        "end_to_end_over_naive": round(statistics.median(times["naive"]) / statistics.median(times["end to end"]), 3),
        "seconds": {name: [round(value, 3) for value in values] for name, values in times.items()},
        "stage_seconds": {key: round(value, 3) for key, value in extractions[-1].meter.seconds.items()},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def print_table(result: dict[str, Any]) -> None:
    """The numbers that matter."""
    print(f"{result['samples']} samples, {result['tokens']} tokens, {result['padding_fraction']:.1%} padding")
    for name, rate in result["tokens_per_second"].items():
        print(f"  {name:14s} {rate:10,.0f} tokens/s")
    print(f"  end to end / forward-only  {result['end_to_end_over_forward_only']:.3f}")
    print(f"  end to end / naive         {result['end_to_end_over_naive']:.3f}")


if __name__ == "__main__":
    main()
