"""What one GPU does with a model's shape: matmul ceiling, its matmuls alone, plain Transformers, the fused forward, a naive script.

    python benchmarks/gpu.py --shape hybrid-27b --layers 16 --out benchmarks/results/hybrid.json

All rows come from one process, so their ratios hold on a machine whose clocks move. Weights are random: speed does not depend on
them, and nothing is downloaded. Rates are of real tokens; padding counts as time, not as work.
"""

import argparse
import copy
import json
import platform
import random
import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pipeline import MEDIA, end_to_end
from shapes import SHAPES, build, chat_lengths
from torch import nn
from torch.profiler import ProfilerActivity, profile
from trace_times import idle_share, kernel_times
from transformers import AutoModel

from headframe_worker.bench.matmuls import ceiling, record_products, replay_seconds
from headframe_worker.bench.timing import median_seconds
from headframe_worker.engine.fusion import apply_fusions, nothing_packed, slow_path, torch_reference

CUDA = torch.device("cuda", 0)
BUDGET = 16384  # tokens a batch
KERNELS = {
    "matmul": r"gemm|nvjet|cutlass|xmma|splitK",
    "attention": r"flash|fmha|attention_forward|sdpa|cudnn_generated",
    "delta rule": r"chunk_|gdn_|recompute_w_u|beta_sigmoid|l2norm|solve_tril|merge_|kkt",
    "our kernels": r"_(rms_norm|swiglu|rotary|attention_gate|convolution|gated_norm)_kernel",
}


@dataclass(frozen=True)
class Batch:
    """Token ids [B, T] on the device, right-padded, of `tokens` real ones."""

    ids: torch.Tensor
    tokens: int


def workloads(vocabulary: int, batches: int) -> dict[str, list[Batch]]:
    """Batches of at most BUDGET padded tokens: equal lengths of 1024 and 2048, and chat lengths sorted within 20,000 samples."""
    chat = sorted(chat_lengths(20_000, seed=0))
    groups: list[list[int]] = [[]]
    for length in chat:
        if (len(groups[-1]) + 1) * length > BUDGET:
            groups.append([])
        groups[-1].append(length)
    groups = random.Random(1).sample(groups, batches)
    named = {"1024": [[1024] * 16], "2048": [[2048] * 8], "chat": groups}
    return {
        name: [Batch(torch.randint(vocabulary, (len(group), max(group)), device=CUDA), sum(group)) for group in groups]
        for name, groups in named.items()
    }


def padding(batches: list[Batch]) -> float:
    """The share of padded tokens."""
    return 1 - sum(batch.tokens for batch in batches) / sum(batch.ids.numel() for batch in batches)


def forward_rates(stack: nn.Module, loads: dict[str, list[Batch]]) -> dict[str, float]:
    """Real tokens per second of the stack alone, for each workload."""
    return {
        name: sum(batch.tokens for batch in batches)
        / median_seconds(lambda batches=batches: run(stack, batches), [CUDA])
        for name, batches in loads.items()
    }


def run(stack: nn.Module, batches: list[Batch]) -> None:
    for batch in batches:
        stack(input_ids=batch.ids, use_cache=False)


def matmul_rates(stack: nn.Module, loads: dict[str, list[Batch]]) -> tuple[dict[str, float], float]:
    """Tokens per second if the stack were its matrix products and nothing else; and FLOPs a token of them."""
    rates, flops = {}, 0.0
    for name, batches in loads.items():
        products = record_products(lambda batches=batches: run(stack, batches))
        rates[name] = sum(batch.tokens for batch in batches) / replay_seconds(products)
        flops = sum(product.flops for product in products) / sum(batch.ids.numel() for batch in batches)
    return rates, flops


def naive_rate(stack: nn.Module, vocabulary: int, samples: int) -> dict[str, float]:
    """The script most people write first: one sample at a time, every layer kept, stacked, copied, saved."""
    lengths = chat_lengths(samples, seed=1)
    ids = [torch.randint(vocabulary, (1, length), device=CUDA) for length in lengths]
    stack(input_ids=ids[0], output_hidden_states=True)
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        for i, sample in enumerate(ids):
            states = stack(input_ids=sample, output_hidden_states=True).hidden_states
            torch.save(torch.stack(states, dim=2)[0].cpu(), Path(folder) / f"{i}.pt")
        elapsed = time.perf_counter() - start
    return {"tokens_per_second": sum(lengths) / elapsed, "samples_per_second": samples / elapsed}


def breakdown(stack: nn.Module, batch: Batch) -> dict[str, object]:
    """Device time of one forward by kind of kernel, in milliseconds, and the share of it in which the GPU had nothing to do."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        stack(input_ids=batch.ids, use_cache=False)
        torch.cuda.synchronize()
    kernels = kernel_times(trace)
    spent: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for name, start, end in kernels:
        kind = next((k for k, pattern in KERNELS.items() if re.search(pattern, name)), "other")
        spent[kind] += end - start
        names[name[:90]] += end - start
    return {
        "milliseconds": {kind: round(us / 1000, 2) for kind, us in spent.most_common()},
        "idle_share": idle_share(kernels),
        "kernels": {name: round(us / 1000, 2) for name, us in names.most_common(25)},
    }


def states(stack: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out: kept.append(out[0] if isinstance(out, tuple) else out))
        for layer in stack.layers
    ]
    stack(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return kept


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((f.float() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]


class Record(dict[str, Any]):
    """The raw numbers by row. Each is written to the file as soon as it is known: a run that is cut off loses one row."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._started = path, time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)

    def keep(self, **rows: object) -> None:
        self |= rows
        self._path.write_text(json.dumps(self, indent=1) + "\n")
        print(f"[{time.perf_counter() - self._started:6.1f} s] {', '.join(rows)}", flush=True)


def measure(options: argparse.Namespace, result: Record) -> None:
    """Every row of one shape, in the order that keeps the plain model plain as long as it is needed."""
    stack = build(options.shape, options.layers, CUDA)
    vocabulary = stack.config.vocab_size
    loads = {name: batches for name, batches in workloads(vocabulary, options.batches).items() if name in options.loads}
    result.keep(
        shape=options.shape,
        layers=stack.config.num_hidden_layers,
        padding={name: padding(batches) for name, batches in loads.items()},
        ceiling_tflops=ceiling(CUDA, torch.bfloat16) / 1e12,
    )
    ids = torch.randint(vocabulary, (2, 500), device=CUDA)
    with torch.inference_mode():
        if options.naive:
            result.keep(naive=naive_rate(stack, vocabulary, options.naive))
        if not options.no_plain:
            result.keep(plain=forward_rates(stack, loads))
        before = states(stack, ids) if options.parity else []
    started = time.perf_counter()
    report = apply_fusions(stack, device=CUDA)
    result.keep(
        fuse_seconds=time.perf_counter() - started,
        applied=report.applied,
        skipped=report.skipped,
        slow=slow_path(stack),
    )
    with torch.inference_mode(), nothing_packed():
        result.keep(fused=forward_rates(stack, loads))
    matmuls, flops = matmul_rates(stack, loads)
    result.keep(matmuls=matmuls, flops_per_token=flops)
    with torch.inference_mode(), nothing_packed():
        result.keep(trace=breakdown(stack, next(iter(loads.values()))[0]))
        if options.parity:
            result.keep(parity=compare_with_float32(stack, ids, before, states(stack, ids)))
    rows: dict[str, object] = {}
    if options.end_to_end:
        with nothing_packed():
            for medium, row in end_to_end(stack, options.end_to_end, parts=options.parts, folder=options.folder):
                rows[medium] = row
                result.keep(end_to_end=rows)
    result.keep(peak_gib=torch.cuda.max_memory_allocated() / 2**30)


def compare_with_float32(
    stack: nn.Module, ids: torch.Tensor, plain: list[torch.Tensor], fused: list[torch.Tensor]
) -> dict[str, list[float]]:
    """Relative L2 error of each layer's states against the same weights in plain float32 Transformers."""
    with CUDA:
        exact = AutoModel.from_config(copy.deepcopy(stack.config), dtype=torch.float32).eval()
    exact.load_state_dict({name: tensor.float() for name, tensor in stack.state_dict().items()})
    with torch_reference(exact):
        reference = states(exact, ids)
    return {"plain": errors(plain, reference), "fused": errors(fused, reference)}


def end_to_end_text(row: dict) -> str:
    writer = f", {row['writer_bytes_per_second'] / 1e9:.2f} a writer" if row["writer_bytes_per_second"] else ""
    return (
        f"{row['tokens_per_second']:,.0f} tokens/s, {row['of_forward']:.3f} of {row['forward_tokens_per_second']:,.0f} for the same "
        f"batches alone; {row['bytes_per_second'] / 1e9:.2f} GB/s{writer}; GPU idle {row['idle_share']}; {row['stage_shares']}"
    )


def table(result: dict) -> str:
    matmuls, naive, parity, trace = (result.get(key) for key in ("matmuls", "naive", "parity", "trace"))
    limit = result["ceiling_tflops"] * 1e12 / result["flops_per_token"]
    head = f"{result['shape']}, {result['layers']} layers: ceiling {result['ceiling_tflops']:.0f} TFLOP/s = {limit:,.0f} tokens/s"
    lines = [head, f"{'tokens/s':<16}" + "".join(f"{load:>12}" for load in matmuls)]
    for row in ("matmuls", "plain", "fused"):
        if row not in result:
            continue
        lines.append(f"{row:<16}" + "".join(f"{result[row][load]:>12,.0f}" for load in matmuls))
        lines.append(
            f"{'  of matmuls':<16}" + "".join(f"{result[row][load] / matmuls[load]:>12.3f}" for load in matmuls)
        )
    if naive and "chat" in result["fused"]:
        ratio = result["fused"]["chat"] / naive["tokens_per_second"]
        lines.append(
            f"naive {naive['tokens_per_second']:,.0f} tokens/s; fused on chat lengths is {ratio:.1f} times that"
        )
    for medium, row in result.get("end_to_end", {}).items():
        lines.append(f"end to end, {medium}: {row.get('skipped') or end_to_end_text(row)}")
    if parity:
        worst = max(f / p for f, p in zip(parity["fused"], parity["plain"], strict=True))
        last = f"last layer {parity['fused'][-1]:.2e} against {parity['plain'][-1]:.2e}"
        lines.append(f"parity: worst ratio of fused to plain error {worst:.3f}, {last}")
    lines.append(
        f"trace: {trace['milliseconds']}, idle {trace['idle_share']:.3f}; padding {max(result['padding'].values()):.3f}"
    )
    lines.append(
        f"applied {result['applied']} in {result['fuse_seconds']:.1f} s; skipped {result['skipped']}; slow {result['slow']}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="hybrid-27b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=int, default=8, help="batches of the chat workload")
    parser.add_argument("--loads", nargs="+", choices=("1024", "2048", "chat"), default=["1024", "2048", "chat"])
    parser.add_argument(
        "--no-plain", action="store_true", help="leave out plain Transformers, whose kernels tune for minutes"
    )
    parser.add_argument("--naive", type=int, default=0, help="samples for the naive script, 0 to leave it out")
    parser.add_argument(
        "--parity", action="store_true", help="compare every layer with float32 (needs three times the memory)"
    )
    parser.add_argument("--end-to-end", nargs="+", choices=MEDIA, default=[], help="chat lengths to committed parts")
    parser.add_argument("--parts", type=int, default=20, help="parts of about 1 GiB that each end-to-end row computes")
    parser.add_argument("--folder", type=Path, help="where `disk` lies; the folder for temporary files by default")
    parser.add_argument("--out", type=Path, required=True, help="where the raw numbers go, as JSON")
    options = parser.parse_args()
    result = Record(options.out)
    result.keep(
        machine={
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        }
    )
    measure(options, result)
    print(table(result))


if __name__ == "__main__":
    main()
