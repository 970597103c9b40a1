"""Several GPUs of one machine: one replica spread over two, and two workers against one.

    python benchmarks/multi_gpu.py split dense workers --out benchmarks/results/two-gpus.json

split:    layers of the 27B hybrid shape over two GPUs: states equal to one GPU's, and the cost against two replicas.
dense:    a dense 70B shape, which no single GPU holds: tokens/s, against its matrix products alone on the same GPUs.
workers:  `headframe run`'s processes on a checkpoint: one against two, to memory and to disk, and one of two killed.

Weights are random, made on the GPUs. All rows of a part come from one process, so their ratios hold.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModel

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from prepared_output import write_prepared
from shapes import SHAPES, chat_lengths

from headframe_api.manifests import ShardManifest
from headframe_api.names import shard_manifest_key
from headframe_worker.bench.matmuls import record_products, replay_seconds
from headframe_worker.engine.budget import TokenBudget
from headframe_worker.engine.capture import Capture
from headframe_worker.engine.fusion import apply_fusions, nothing_packed, torch_reference
from headframe_worker.engine.parts import FilledPart, TokenPart
from headframe_worker.engine.pipeline import Pipeline
from headframe_worker.engine.placement import Placement, layer_costs, place
from headframe_worker.engine.spread import spread
from headframe_worker.engine.structure import DecoderStack, find_stack
from headframe_worker.meter import Meter
from headframe_worker.run.pool import WorkerPool

BUDGET = 16384  # padded tokens a batch


@dataclass(frozen=True)
class Rig:
    """A model with random weights, ready to fill parts."""

    stack: DecoderStack
    capture: Capture
    pipeline: Pipeline
    seconds: dict[str, float]
    applied: tuple[str, ...]
    skipped: dict[str, str]


@contextmanager
def rig(shape: dict[str, Any], layers: int, devices: Sequence[torch.device], slots: Sequence[int]) -> Iterator[Rig]:
    """Build, spread and fuse; the same weights on any number of devices."""
    times = [time.perf_counter()]
    values = {**shape, "num_hidden_layers": layers, "vocab_size": min(shape["vocab_size"], 32768)}
    config = AutoConfig.for_model(values.pop("model_type"), **values, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.bfloat16).eval()
    stack = find_stack(model)
    placement = place(layer_costs(stack.layers, config), devices)
    initialise(stack, placement)
    model.requires_grad_(False)
    synchronize(devices)
    times.append(time.perf_counter())
    with nothing_packed() if devices[0].type == "cuda" else torch_reference(model):
        ways = spread(stack, placement) if len(devices) > 1 else None
        report = apply_fusions(model, device=devices[0])
        synchronize(devices)
        times.append(time.perf_counter())
        capture = Capture(stack, layers=slots, last="preNorm", ways=ways)
        pipeline = Pipeline(
            capture,
            dtype=torch.bfloat16,
            slot_names=[*(f"layer.{slot}" for slot in slots), "last.preNorm"],
            budget=TokenBudget(BUDGET if devices[0].type == "cuda" else 256),
            meter=Meter("extract"),
            stop=threading.Event(),
            grace_seconds=1.0,
        )
        seconds = {"build": times[1] - times[0], "fuse": times[2] - times[1]}
        yield Rig(replace(stack, placement=placement), capture, pipeline, seconds, report.applied, report.skipped)
        pipeline.close()
    del model, stack, capture, pipeline
    if devices[0].type == "cuda":
        torch.cuda.empty_cache()


def initialise(stack: DecoderStack, placement: Placement) -> None:
    """Random weights straight on each layer's device, the same ones wherever a layer lies."""
    places = {layer: placement.device_of(index) for index, layer in enumerate(stack.layers)}
    groups = [(layer, device, index) for index, (layer, device) in enumerate(places.items())]
    others = [child for child in stack.model.children() if child is not stack.layers]
    groups += [(child, placement.devices[0], 1000 + index) for index, child in enumerate(others)]
    for module, device, seed in groups:
        module.to_empty(device=device)
        torch.manual_seed(seed)
        module.apply(stack.model._init_weights)  # noqa: SLF001  # Transformers' own values for norms, gates and rotary positions


def synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def token_parts(count: int, tokens: int, lengths: Sequence[int], vocabulary: int) -> list[TokenPart]:
    """Parts of about so many tokens each, longest sample first."""
    random = np.random.default_rng(0)
    parts, drawn = [], iter(np.resize(np.array(lengths), count * tokens))
    for number in range(count):
        chosen: list[int] = []
        while sum(chosen) < tokens:
            chosen.append(int(next(drawn)))
        sizes = -np.sort(-np.array(chosen, np.int64))
        ids = random.integers(3, vocabulary, int(sizes.sum())).astype(np.int32)
        rows = np.arange(len(sizes), dtype=np.int64) + 100_000 * number
        parts.append(TokenPart(number, rows, sizes, ids, np.ones(len(ids), np.uint8)))
    return parts


def flow(work: Rig, parts: Sequence[TokenPart], keep: int = 0) -> tuple[float, list[np.ndarray]]:
    """(tokens/s from the first part's end to the last's, the states' bytes of the first `keep` parts)."""
    ends: list[tuple[float, int]] = []
    kept: dict[int, np.ndarray] = {}
    lock = threading.Lock()

    def write(filled: FilledPart) -> None:
        with lock:
            ends.append((time.perf_counter(), len(filled.token_ids)))
        assert not filled.refused
        if filled.part < keep:
            kept[filled.part] = filled.states.copy()

    work.pipeline.run(parts, largest_part_tokens=max(part.tokens for part in parts), write=write)
    tokens = sum(count for _, count in ends[1:])
    return tokens / (ends[-1][0] - ends[0][0]), [kept[number] for number in sorted(kept)]


def matmul_seconds(work: Rig, batch: int, length: int) -> float:
    """Seconds of one batch's matrix products alone, each on its own device, all devices at work at once."""
    devices = work.capture.devices
    ids = torch.randint(3, 1000, (batch, length), device=devices[0])
    products = record_products(lambda: work.stack.forward(ids))
    return replay_seconds(products)


def describe(work: Rig) -> dict[str, Any]:
    peak = {
        str(d): round(torch.cuda.max_memory_allocated(d) / 2**30, 1) for d in work.capture.devices if d.type == "cuda"
    }
    return {
        "placement": str(work.stack.placement),
        "seconds": work.seconds,
        "applied": work.applied,
        "skipped": work.skipped,
        "peak_gib": peak,
    }


def measure_split(options: argparse.Namespace, devices: Sequence[torch.device]) -> dict[str, Any]:
    """The hybrid on one device and spread over all of them: equal states, tokens/s."""
    shape = SHAPES["tiny" if options.tiny else "hybrid-27b"]
    layers = options.layers or (4 if options.tiny else 16)
    size, length = (512, 32) if options.tiny else (65_536, 1024)
    parts = token_parts(options.parts, size, [length], 1000)

    def measure(name: str, chosen: Sequence[torch.device]) -> tuple[dict[str, Any], list[np.ndarray]]:
        with rig(shape, layers, chosen, [1, layers // 2]) as work:
            _, states = flow(work, parts[:2], keep=2)  # and tunes the kernels for these shapes
            rate, _ = flow(work, parts)
            say(f"split, {name}: {rate:,.0f} tokens/s, {describe(work)}")
            return {"tokens_per_second": rate, **describe(work)}, states

    one, expected = measure("one", devices[:1])
    apart, found = measure("spread", devices)
    equal = all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
    ratio = apart["tokens_per_second"] / one["tokens_per_second"] / len(devices)
    say(f"split: states equal: {equal}, {ratio:.3f} of {len(devices)} replicas")
    result = {"layers": layers, "one": one, "spread": apart, "equal": equal, "of_replicas": ratio}
    lengths = [min(length, 100) for length in chat_lengths(20_000, 0)] if options.tiny else chat_lengths(20_000, 0)
    with rig(shape, layers, devices, [1, layers // 2]) as work:
        chat = token_parts(4, size, lengths, 1000)
        result["chat_tokens_per_second"] = [flow(work, chat)[0] for _ in range(2)]
        say(f"split, spread, chat lengths, at first and again: {result['chat_tokens_per_second']}")
    return result


def measure_dense(options: argparse.Namespace, devices: Sequence[torch.device]) -> dict[str, Any]:
    """70B over all devices; a copy of few layers against one device; matrix products alone."""
    shape = dict(SHAPES["tiny"], model_type="llama") if options.tiny else SHAPES["dense-70b"]
    layers, few = (8, 4) if options.tiny else (80, 4)
    length, samples = (16, 8) if options.tiny else (1024, 16)

    def parts(count: int) -> list[TokenPart]:
        return token_parts(count, samples * length, [length], 1000)

    def reduced(chosen: Sequence[torch.device]) -> list[np.ndarray]:
        with rig(shape, few, chosen, [1, few // 2]) as work:
            say(f"dense, {few} layers on {len(chosen)}: {describe(work)}")
            return flow(work, parts(3), keep=3)[1]

    equal = all(np.array_equal(a, b) for a, b in zip(reduced(devices[:1]), reduced(devices), strict=True))
    say(f"dense, {few} layers: states equal: {equal}")
    result: dict[str, Any] = {"layers": layers, "reduced_layers": few, "reduced_equal": equal}
    with rig(shape, layers, devices, [1, layers // 4, layers // 2, 3 * layers // 4, layers - 4]) as work:
        say(f"dense, {layers} layers are ready: {describe(work)}")
        flow(work, parts(3))
        rate, _ = flow(work, parts(options.batches))
        result |= {"tokens_per_second": rate, **describe(work)}
        say(f"dense, {layers} layers: {rate:,.0f} tokens/s, {describe(work)}")
        alone = samples * length / matmul_seconds(work, samples, length)
        result |= {"matmul_tokens_per_second": alone, "of_matmuls": rate / alone}
        say(f"dense: matmuls alone {alone:,.0f} tokens/s; {rate / alone:.3f} of them")
    return result


def measure_workers(options: argparse.Namespace, devices: Sequence[torch.device]) -> dict[str, Any]:
    """Processes of `headframe run` on a checkpoint in memory: their rates, and the loss of one."""
    shape = dict(SHAPES["tiny" if options.tiny else "hybrid-27b"])
    layers = options.layers or (4 if options.tiny else 8)
    shape |= {"num_hidden_layers": layers, "vocab_size": min(shape["vocab_size"], 32768)}
    result: dict[str, Any] = {"layers": layers, "cpus": os.cpu_count()}
    with (
        tempfile.TemporaryDirectory(dir=options.memory) as memory,
        tempfile.TemporaryDirectory(dir=options.disk) as disk,
    ):
        started = time.perf_counter()
        checkpoint = Path(memory) / "model"
        save_checkpoint(shape, checkpoint, devices[0])
        say(f"workers: checkpoint in {time.perf_counter() - started:.1f} s")
        for name, folder in (("memory", memory), ("disk", disk)):
            for workers in (1, 2) if name in options.runs else ():
                one = run_workers(options, checkpoint, Path(folder) / "output", devices, workers, layers)
                result[f"{name}-{workers}"] = one
                say(f"workers, {name}, {workers}: {one}")
    for name in ("memory", "disk"):
        if f"{name}-1" in result and f"{name}-2" in result:
            pair = [result[f"{name}-{n}"]["tokens_per_second"] for n in (1, 2)]
            result[f"{name}_scaling"] = pair[1] / pair[0]
            say(f"workers, {name}: two are {pair[1] / pair[0]:.3f} times one")
    return result


def save_checkpoint(shape: dict[str, Any], folder: Path, device: torch.device) -> None:
    values = dict(shape)
    config = AutoConfig.for_model(values.pop("model_type"), **values, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with device:
        model = AutoModel.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_workers(
    options: argparse.Namespace,
    checkpoint: Path,
    output: Path,
    devices: Sequence[torch.device],
    workers: int,
    layers: int,
) -> dict[str, Any]:
    """The sum of each worker's own rate over two shards; of two workers the second is killed in its third shard."""
    length, batch, parts = (32, 4, 8) if options.tiny else (1024, 16, options.shard_parts)
    shards = 2 if workers == 1 else 3 * workers
    random = np.random.default_rng(0)
    samples = [random.integers(3, 1000, length) for _ in range(2 * batch * parts * shards)]
    hidden_size = int(SHAPES["tiny" if options.tiny else "hybrid-27b"]["hidden_size"])
    token_bytes = 2 * hidden_size  # one slot in bfloat16: at this depth as many bytes a second as six at 64 layers
    gpus = 0 if devices[0].type == "cpu" else 1
    job, plan, store = write_prepared(
        output,
        checkpoint,
        samples,
        model={"gpus": gpus, "dtype": "bfloat16"},
        states={"layers": [layers - 1], "last": "none", "dtype": "bfloat16"},
        shards=shards,
        part_target_bytes=2 * batch * length * token_bytes,
    )
    places = [[str(index)] if gpus else [] for index in range(workers)]
    pool = WorkerPool(job, plan, places, scratch=output / "scratch", stop=threading.Event())
    watch = Watch(pool)
    begun = time.perf_counter()
    done = pool.run([shard.index for shard in plan.shards], watch)
    tokens = {shard.index: shard.tokens for shard in plan.shards}
    rates = [
        sum(tokens[shard] for shard in watch.shards[index][:2]) / (watch.second_end[index] - watch.begin[index])
        for index in range(workers)
    ]
    manifests = [ShardManifest.model_validate_json(store.read(shard_manifest_key(i))) for i in tokens]
    result = {
        "tokens_per_second": sum(rates),
        "each": [round(rate) for rate in rates],
        "wall_seconds": round(time.perf_counter() - begun, 1),
        "ready_seconds": [round(watch.begin[index] - begun, 1) for index in range(workers)],
        "bytes": sum(shard.bytes for shard in done.done.values()),
        "cpus_allowed": watch.cpus_allowed,
        "cpu_cores_used": [round(watch.cores(index), 2) for index in range(workers)],
        "resident_gib": [round(watch.resident_bytes[index] / 2**30, 1) for index in range(workers)],
        "waits": [
            {name: round(seconds, 2) for name, seconds in worker.meter.seconds.items()} for worker in pool.workers
        ],
    }
    if workers > 1:
        lost = manifests[watch.lost_shard]
        again = {part for run in lost.runs for part in run.parts}
        result |= {
            "lost_shard": lost.shard,
            "its_parts": len(lost.parts),
            "kept_from_the_killed": len(lost.parts) - len(again),
            "killed_after_seconds": round(watch.killed_at - begun, 1),
            "shards_of_each": watch.shards,
            "all_done": sorted(done.done) == sorted(tokens),
        }
    shutil.rmtree(output)
    return result


class Watch:
    """What each worker has done and what it uses, told several times a second; it kills the second one in its third shard."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        count = len(pool.workers)
        self.shards: list[list[int]] = [[] for _ in range(count)]
        self.begin, self.second_end, self.killed_at = [0.0] * count, [0.0] * count, 0.0
        self.resident_bytes, self.cpus_allowed = [0] * count, [0] * count
        self._ticks = [(0.0, 0.0)] * count
        self._first_ticks = [(0.0, 0.0)] * count
        self._at_work: list[int | None] = [None] * count
        self.lost_shard = -1

    def __call__(self) -> None:
        now = time.perf_counter()
        for index, worker in enumerate(self._pool.workers):
            before = self._at_work[index]
            if before is not None and before in self._pool.result.done and before not in self.shards[index]:
                self.shards[index].append(before)
                self.second_end[index] = now if len(self.shards[index]) <= 2 else self.second_end[index]
            self._at_work[index] = worker.shard
            if worker.shard is not None and not self.begin[index]:
                self.begin[index] = now
            if worker.process is not None and worker.process.pid and worker.shard is not None:
                self._look(index, worker.process.pid, now)
        if len(self._pool.workers) > 1 and not self.killed_at and len(self.shards[1]) == 2:
            second, meter = self._pool.workers[1], self._pool.workers[1].meter
            is_half_done = meter.shard == second.shard and 2 * meter.shard_tokens > meter.shard_tokens_total
            if second.shard is not None and second.process is not None and is_half_done:
                self.lost_shard, self.killed_at = second.shard, now
                os.kill(second.process.pid, signal.SIGKILL)

    def _look(self, index: int, pid: int, now: float) -> None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{pid}/status").read_text()
            self.cpus_allowed[index] = len(os.sched_getaffinity(pid))
        except OSError:
            return
        spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self._ticks[index] = (now, spent)
        if not self._first_ticks[index][0]:
            self._first_ticks[index] = (now, spent)
        peaks = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
        self.resident_bytes[index] = max([self.resident_bytes[index], *(1024 * kib for kib in peaks)])

    def cores(self, index: int) -> float:
        """CPU seconds a second while it worked."""
        (start, before), (end, after) = self._first_ticks[index], self._ticks[index]
        return (after - before) / (end - start) if end > start else 0.0


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


def link(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Whether the first two GPUs reach each other's memory, and GB/s of a large copy between them."""
    first, second = devices[:2]
    source = torch.randn(1 << 28, device=first)
    target = torch.empty_like(source, device=second)
    times = []
    for _ in range(4):
        synchronize(devices)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(devices)
        times.append(time.perf_counter() - start)
    peers = first != second and torch.cuda.can_device_access_peer(first, second)
    return {"peer_access": peers, "gigabytes_per_second": source.nbytes / min(times) / 1e9}


STARTED = time.perf_counter()
PARTS: dict[str, Callable[[argparse.Namespace, Sequence[torch.device]], dict[str, Any]]] = {
    "split": measure_split,
    "dense": measure_dense,
    "workers": measure_workers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", nargs="+", choices=PARTS)
    parser.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:1"], help="may repeat, and may be cpu")
    parser.add_argument("--layers", type=int, help="of the hybrid, instead of 16 (split) and 8 (workers)")
    parser.add_argument("--parts", type=int, default=6, help="parts of 65,536 tokens (split)")
    parser.add_argument("--batches", type=int, default=12, help="batches of 16,384 tokens (dense)")
    parser.add_argument("--shard-parts", type=int, default=16, help="parts of 32,768 tokens in a shard (workers)")
    parser.add_argument("--runs", nargs="+", choices=("memory", "disk"), default=["memory", "disk"])
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="memory-backed folder")
    parser.add_argument("--disk", type=Path, help="folder on disk; a temporary one by default")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the benchmark itself")
    parser.add_argument("--out", type=Path, help="where the raw numbers go, as JSON")
    options = parser.parse_args()
    faulthandler.register(signal.SIGTERM, chain=True)  # tells where it was when its time was up
    devices = [torch.device(name) for name in options.devices]
    result: dict[str, Any] = {
        "machine": {
            "gpus": [torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
        }
    }
    if devices[0].type == "cuda" and len(devices) > 1:
        result["link"] = link(devices)
        say(f"link: {result['link']}")
    failed = False
    for name in options.measure:
        try:
            result[name] = PARTS[name](options, devices)
        except Exception:  # noqa: BLE001  # the next part may still be measured
            traceback.print_exc()
            failed = True
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
