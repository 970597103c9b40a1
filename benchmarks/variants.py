"""What was tried on one GPU beside what the engine does: packing, float8 products, larger batches, CUDA graphs; and long samples.

    python benchmarks/variants.py packing float8 --shape hybrid-27b --layers 16 --out benchmarks/results/variants.json
    python benchmarks/variants.py long --shape dense-8b --layers 8 --out benchmarks/results/long.json
    python benchmarks/variants.py float8-checkpoint --checkpoint model.gguf --text docs/format.md --out error.json

Each part stands beside the engine's own way in the same process. docs/performance.md says which of them paid.
"""

import argparse
import copy
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from shapes import SHAPES, build, chat_lengths
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoTokenizer

from headframe_worker.bench.timing import median_seconds
from headframe_worker.engine import pieces
from headframe_worker.engine.fusion import apply_fusions, nothing_packed, torch_reference
from headframe_worker.engine.fusion.attention import FusedAttention
from headframe_worker.engine.fusion.delta_net import FusedDeltaNet
from headframe_worker.engine.fusion.install import install, installed, remove
from headframe_worker.engine.gguf_files import gguf_read_once
from headframe_worker.engine.long_attention import attention_in_blocks
from headframe_worker.engine.pointwise import compute_in_pieces
from headframe_worker.engine.structure import DecoderStack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU only proves that the parts run
BUDGET = 16_384


def plain_kernels(stack: nn.Module) -> AbstractContextManager[None]:
    return nullcontext() if DEVICE.type == "cuda" else torch_reference(stack)


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median time of `work`, after one run that compiles and warms."""
    return median_seconds(work, [DEVICE], repeats=repeats)


def sorted_groups(budget: int, batches: int, longest: int = 4096) -> list[list[int]]:
    """Every n-th batch of at most `budget` padded tokens, of chat lengths sorted within 20,000 samples."""
    groups: list[list[int]] = [[]]
    for length in sorted(min(longest, length) for length in chat_lengths(20_000, seed=0)):
        if (len(groups[-1]) + 1) * length > budget:
            groups.append([])
        groups[-1].append(length)
    return groups[len(groups) // (2 * batches) :: max(1, len(groups) // batches)][:batches]


def layer_states(stack: nn.Module, **inputs: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out: kept.append(out[0] if isinstance(out, tuple) else out))
        for layer in stack.layers
    ]
    stack(use_cache=False, **inputs)
    for hook in hooks:
        hook.remove()
    return kept


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


# Packing: all samples of a batch one after the other, without padding.


@dataclasses.dataclass(frozen=True)
class Packed:
    """One row of samples and where each begins and ends."""

    ids: Tensor
    positions: Tensor
    bounds: Tensor
    """int32 [N + 1] on the device."""
    bounds_for_fla: Tensor
    """The same in int64; one object a batch, because fla keeps what it derives from it by identity."""
    bounds_on_host: Tensor
    longest: int
    heads_of_samples: Tensor
    """int64 [N * (taps - 1)]: the tokens whose convolution would reach into the sample before."""


def pack(samples: list[Tensor], taps: int) -> Packed:
    lengths = [len(sample) for sample in samples]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    firsts = (bounds[:-1, None] + torch.arange(taps - 1)).flatten()
    return Packed(
        torch.cat(samples)[None],
        torch.cat([torch.arange(length) for length in lengths])[None].to(DEVICE),
        bounds.to(DEVICE),
        bounds.long().to(DEVICE),
        bounds,
        max(lengths),
        firsts.long().to(DEVICE),
    )


class PackedForward:
    """The fused stack with the parts that look across tokens told where samples begin."""

    def __init__(self, stack: nn.Module) -> None:
        self.stack = stack
        self.batch: Packed
        self.changed: list[tuple[nn.Module, Any]] = []
        for module in stack.modules():
            fused = installed(module)
            if isinstance(fused, FusedAttention):
                self._replace(module, fused, dataclasses.replace(fused, kernel=self._attention))
            elif isinstance(fused, FusedDeltaNet):
                ops = dataclasses.replace(
                    fused.ops,
                    convolution=self._convolution(fused.ops.convolution),
                    delta_rule=self._delta_rule(fused.ops.delta_rule),
                )
                self._replace(module, fused, dataclasses.replace(fused, ops=ops))

    def _replace(self, module: nn.Module, fused: Any, packed: Any) -> None:
        self.changed.append((module, fused))
        remove(module)
        install(module, packed)

    def undo(self) -> None:
        for module, fused in self.changed:
            remove(module)
            install(module, fused)

    def run(self, batch: Packed) -> None:
        self.batch = batch
        self.stack(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)

    def states(self, batch: Packed) -> list[Tensor]:
        self.batch = batch
        return layer_states(self.stack, input_ids=batch.ids, position_ids=batch.positions)

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        del module, mask, options
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return varlen_attention(query, key, value, self.batch, scaling)[None], None

    def _convolution(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def convolution(packed: Tensor, heads: Any, taps: Tensor, *sizes: int) -> tuple[Tensor, ...]:
            whole = plain(packed, heads, taps, *sizes)
            firsts = self.batch.heads_of_samples
            starts = packed[0].index_select(0, firsts).unflatten(0, (-1, taps.shape[0] - 1))
            for out, right in zip(whole, plain(starts, heads, taps, *sizes), strict=True):
                out[0].index_copy_(0, firsts, right.flatten(0, 1))
            return whole

        return convolution

    def _delta_rule(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def on_gpu(
            q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor, *_: object, **__: object
        ) -> tuple[Tensor, None]:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule

            out, _ = chunk_gated_delta_rule(q, k, v, g=decay, beta=step, cu_seqlens=self.batch.bounds_for_fla)
            return out, None

        def one_by_one(*inputs: Tensor, **_: object) -> tuple[Tensor, None]:
            bounds = self.batch.bounds_on_host.tolist()
            spans = [slice(a, b) for a, b in itertools.pairwise(bounds)]
            return torch.cat([plain(*(x[:, span] for x in inputs[:5]))[0] for span in spans], dim=1), None

        return on_gpu if DEVICE.type == "cuda" else one_by_one


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, batch: Packed, scaling: float) -> Tensor:
    """[T, H, D], causal within each sample."""
    if DEVICE.type == "cuda":
        out = torch.ops.aten._flash_attention_forward(  # noqa: SLF001  # what torch calls varlen in every version
            query, key, value, batch.bounds, batch.bounds, batch.longest, batch.longest, 0.0, True, False, scale=scaling
        )
        return out[0]
    parts = []
    bounds = batch.bounds_on_host.tolist()
    for a, b in itertools.pairwise(bounds):
        q, k, v = (x[a:b].transpose(0, 1)[None] for x in (query, key, value))
        parts.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat([part[0].transpose(0, 1) for part in parts])


def measure_packing(stack: nn.Module, batches: int) -> dict[str, Any]:
    """Padded and packed forwards over the same samples, and each sample packed against alone."""
    vocabulary = stack.config.vocab_size
    longest, budget = (4096, BUDGET) if DEVICE.type == "cuda" else (40, 100)
    groups = sorted_groups(budget, batches, longest)
    samples = [[torch.randint(vocabulary, (length,), device=DEVICE) for length in group] for group in groups]
    padded = [nn.utils.rnn.pad_sequence(group, batch_first=True) for group in samples]
    packed = [pack(group, taps=4) for group in samples]
    tokens = sum(map(sum, groups))

    def run_padded() -> None:
        for ids in padded:
            stack(input_ids=ids, use_cache=False)

    result: dict[str, Any] = {
        "padding": 1 - tokens / sum(ids.numel() for ids in padded),
        "padded_tokens_per_second": tokens / seconds(run_padded),
    }
    some = min(range(len(groups)), key=lambda i: abs(len(groups[i]) - 40))
    alone = [layer_states(stack, input_ids=sample[None])[-1][0] for sample in samples[some][:8]]
    in_padded = layer_states(stack, input_ids=padded[some])[-1]
    forward = PackedForward(stack)

    def run_packed() -> None:
        for batch in packed:
            forward.run(batch)

    result["packed_tokens_per_second"] = tokens / seconds(run_packed)
    together = forward.states(packed[some])[-1][0].split(groups[some])
    result["packed_error"] = max(relative(p, a) for p, a in zip(together[:8], alone, strict=True))
    result["padded_error"] = max(relative(in_padded[i, : len(a)], a) for i, a in enumerate(alone))
    forward.undo()
    result["gain"] = result["packed_tokens_per_second"] / result["padded_tokens_per_second"]
    return result


# Float8: every product of a layer in float8 with a scale a row and a scale a column.


class Float8Products(TorchDispatchMode):
    """Each product with a weight as a float8 product; weights are rounded when first seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("mm", "addmm", "addmm_") or args[-1].shape[1] < 64:
            return func(*args, **(kwargs or {}))
        left, right = args[-2:]
        key = (right.data_ptr(), tuple(right.shape))
        if key not in self.weights:
            rounded, scale = round_rows(right.t().contiguous())
            self.weights[key] = rounded, scale.t().contiguous()
        rounded, scale = self.weights[key]
        rows, row_scale = round_rows(left)
        out = torch._scaled_mm(rows, rounded.t(), row_scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: SLF001
        if name == "addmm_":
            return args[0].add_(out)
        return out if name == "mm" else out + args[0]


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] in float8 and its scales [M, 1]."""
    if DEVICE.type == "cuda":
        return _compiled_round_rows(x)
    return _round_rows(x)


def _round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


_compiled_round_rows = torch.compile(_round_rows, dynamic=True)


def measure_float8(stack: nn.Module) -> dict[str, Any]:
    """The fused forward with its products in bf16 and in float8, and the error of each layer against float32."""
    count, length = (16, 1024) if DEVICE.type == "cuda" else (2, 20)
    ids = torch.randint(stack.config.vocab_size, (count, length), device=DEVICE)
    small = ids[:2, :500]

    def run() -> None:
        stack(input_ids=ids, use_cache=False)

    bf16 = ids.numel() / seconds(run)
    fused = layer_states(stack, input_ids=small)
    float8 = Float8Products()
    with float8:
        rate = ids.numel() / seconds(run)
        rounded = layer_states(stack, input_ids=small)
    with torch.device(DEVICE):
        exact = AutoModel.from_config(copy.deepcopy(stack.config), dtype=torch.float32).eval()
    exact.load_state_dict({name: tensor.float() for name, tensor in stack.state_dict().items()})
    with torch_reference(exact):
        reference = layer_states(exact, input_ids=small)
    return {
        "bf16_tokens_per_second": bf16,
        "float8_tokens_per_second": rate,
        "gain": rate / bf16,
        "bf16_error": [relative(a, b) for a, b in zip(fused, reference, strict=True)],
        "float8_error": [relative(a, b) for a, b in zip(rounded, reference, strict=True)],
    }


def measure_checkpoint_in_float8(checkpoint: Path, text: Path) -> dict[str, Any]:
    """The same errors on real weights and a real text, without its first tokens, whose states are unlike all others."""
    gguf = {"gguf_file": checkpoint.name} if checkpoint.suffix == ".gguf" else {}
    directory = checkpoint.parent if gguf else checkpoint
    tokenizer = AutoTokenizer.from_pretrained(directory, **gguf)
    with gguf_read_once(gguf.get("gguf_file")):
        stack = AutoModel.from_pretrained(directory, dtype=torch.float32, **gguf).eval().to(DEVICE)
    ids = torch.tensor([tokenizer(text.read_text())["input_ids"][:1000]], device=DEVICE)
    reference = layer_states(stack, input_ids=ids)
    stack.bfloat16()
    plain = layer_states(stack, input_ids=ids)
    with Float8Products():
        rounded = layer_states(stack, input_ids=ids)
    return {
        "tokens": ids.shape[1],
        "bf16_error": [relative(a[:, 8:], b[:, 8:]) for a, b in zip(plain, reference, strict=True)],
        "float8_error": [relative(a[:, 8:], b[:, 8:]) for a, b in zip(rounded, reference, strict=True)],
    }


# Larger batches and CUDA graphs.


def measure_batches(stack: nn.Module) -> dict[str, Any]:
    """Tokens a second by tokens a batch, and of a replayed graph of one batch."""
    sizes = (8_192, 16_384, 24_576, 32_768, 49_152) if DEVICE.type == "cuda" else (64,)
    length = 1024 if DEVICE.type == "cuda" else 16
    result: dict[str, Any] = {"tokens_per_second": {}}
    for tokens in sizes:
        ids = torch.randint(stack.config.vocab_size, (tokens // length, length), device=DEVICE)
        taken = seconds(lambda ids=ids: stack(input_ids=ids, use_cache=False), repeats=5)
        result["tokens_per_second"][tokens] = tokens / taken
    if DEVICE.type == "cuda":
        ids = torch.randint(stack.config.vocab_size, (16, 1024), device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stack(input_ids=ids, use_cache=False)
        result["graph_tokens_per_second"] = ids.numel() / seconds(graph.replay, repeats=5)
    return result


def measure_kernels() -> dict[str, Any]:
    """Milliseconds: the delta net's convolution by block, and attention by backend."""
    import triton
    from triton.testing import do_bench

    from headframe_worker.engine.fusion import kernels
    from headframe_worker.engine.fusion.twins import L2_EPS, heads_at

    key_heads, value_heads, dim, batch, length = 16, 48, 128, 16, 1024
    packed = torch.randn(batch, length, 16_480, device=DEVICE, dtype=torch.bfloat16)
    heads = heads_at([head * dim for head in range(2 * key_heads + value_heads)], DEVICE)
    taps = torch.randn(4, (2 * key_heads + value_heads) * dim, device=DEVICE, dtype=torch.bfloat16)
    q, k = (packed.new_empty(batch, length, key_heads, dim) for _ in range(2))
    v = packed.new_empty(batch, length, value_heads, dim)
    result: dict[str, Any] = {}
    for tokens in (16, 32, 64, 128):
        for warps in (2, 4, 8):
            blocks = triton.cdiv(length, tokens)

            def run(tokens=tokens, warps=warps, blocks=blocks):
                kernels._convolution_kernel[(batch * blocks * (2 * key_heads + value_heads),)](  # noqa: SLF001
                    packed, heads.starts, taps, q, k, v, length, blocks, packed.stride(0), packed.stride(1), L2_EPS,
                    KEY_HEADS=key_heads, KEY_DIM=dim, VALUE_HEADS=value_heads, VALUE_DIM=dim, TAPS=4,
                    CHANNELS=taps.shape[1], ALIGN=heads.align, BLOCK=dim, TOKENS=tokens, num_warps=warps,
                )  # fmt: skip

            result[f"convolution, {tokens} tokens, {warps} warps"] = do_bench(run, return_mode="median")
    shapes = {"dense 16 x 1024": (16, 32, 8, 1024, 128), "dense 8 x 2048": (8, 32, 8, 2048, 128)}
    shapes |= {"dense 1 x 131072": (1, 32, 8, 131_072, 128), "hybrid 1 x 131072": (1, 24, 4, 131_072, 256)}
    shapes |= {"hybrid 16 x 1024": (16, 24, 4, 1024, 256), "hybrid 8 x 2048": (8, 24, 4, 2048, 256)}
    for name, (count, many, few, size, width) in shapes.items():
        query = torch.randn(count, size, many, width, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
        key, value = (
            torch.randn(count, size, few, width, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)
        )

        def attend(query=query, key=key, value=value):
            functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, True, enable_gqa=True)  # noqa: SLF001
        result[f"attention {name}, chosen ({SDPBackend(chosen).name})"] = do_bench(attend, return_mode="median")
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                result[f"attention {name}, {backend.name}"] = do_bench(attend, return_mode="median")
    return result


# Long samples.


def measure_long(stack: nn.Module, lengths: list[int], *, fused: bool) -> dict[str, Any]:
    """One sample alone, in pieces and whole: tokens a second, and the most memory above the weights."""
    result: dict[str, Any] = {}
    default = pieces.PIECE_TOKENS
    compute_in_pieces(DecoderStack(stack, stack.layers, len(stack.layers)))
    for length in lengths:
        ids = torch.randint(stack.config.vocab_size, (1, length), device=DEVICE)
        states: dict[str, Tensor] = {}
        for name, limit in (("pieces", default if DEVICE.type == "cuda" else 16), ("whole", 1 << 40)):
            row = result.setdefault(f"{length} {name}", {})
            pieces.PIECE_TOKENS = limit
            try:
                stack(input_ids=ids, use_cache=False)
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                row["tokens_per_second"] = length / seconds(lambda ids=ids: stack(input_ids=ids, use_cache=False), 1)
                if DEVICE.type == "cuda":
                    row["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
                states[name] = stack(input_ids=ids, use_cache=False).last_hidden_state
            except torch.OutOfMemoryError as error:
                row["failed"] = str(error).split(".")[0]
                torch.cuda.empty_cache()
            print(f"{'fused' if fused else 'plain'} {length} {name}: {row}", flush=True)
        if len(states) == 2:
            result[f"{length} error"] = relative(states["pieces"], states["whole"])
            print(f"  pieces against whole: {result[f'{length} error']:.2e}", flush=True)
    pieces.PIECE_TOKENS = default
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("packing", "float8", "float8-checkpoint", "batches", "kernels", "long", "long-plain")
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--checkpoint", type=Path, help="of float8-checkpoint: a directory or a GGUF file")
    parser.add_argument("--text", type=Path, help="of float8-checkpoint: what the model reads")
    parser.add_argument("--shape", choices=SHAPES, default="hybrid-27b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=int, default=8, help="batches of chat lengths")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_768, 65_536, 131_072])
    parser.add_argument("--out", type=Path, required=True, help="where the raw numbers go, as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.parts == ["float8-checkpoint"]:
        with torch.no_grad():
            write(options.out, measure_checkpoint_in_float8(options.checkpoint, options.text))
        return
    stack = build(options.shape, options.layers, DEVICE)
    result: dict[str, Any] = {"shape": options.shape, "layers": len(stack.layers)}
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "packing": lambda: measure_packing(stack, options.batches),
        "batches": lambda: measure_batches(stack),
        "kernels": measure_kernels,
        "long": lambda: measure_long(stack, options.lengths, fused=True),
        "float8": lambda: measure_float8(stack),
    }
    with plain_kernels(stack), attention_in_blocks(stack), nothing_packed(), torch.no_grad():
        if "long-plain" in options.parts:
            result["long-plain"] = measure_long(stack, options.lengths, fused=False)
            stack = build(options.shape, options.layers, DEVICE)
        if set(options.parts) & set(work):
            result["applied"] = apply_fusions(stack, device=DEVICE).applied
        for part, measure in work.items():
            if part in options.parts:
                started = time.perf_counter()
                try:
                    result[part] = measure()
                except Exception as error:  # noqa: BLE001  # the other parts still count
                    result[part] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
                print(options.shape, len(stack.layers), part, f"{time.perf_counter() - started:.0f} s", flush=True)
                print(json.dumps(result[part], indent=1), flush=True)
    write(options.out, result)


def write(path: Path, result: dict[str, Any]) -> None:
    """The numbers with what they were measured on."""
    result["machine"] = {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
