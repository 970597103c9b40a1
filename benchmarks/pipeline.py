"""End to end on a stack that is built, not loaded: token parts of chat lengths through the engine's pipeline into a store.

The parts are those of a real shard of 20,000 samples, cut as `extract` cuts them; evenly chosen ones are computed. What
comes out is encoded as parts and written by the same code, or encoded and dropped (`discard`).
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import chat_lengths
from torch import nn
from torch.profiler import ProfilerActivity, profile
from trace_times import idle_share, kernel_times

from headframe_api.layers import hugging_face_indexes, preset_layers
from headframe_api.manifests import PartMetadata
from headframe_api.names import part_key
from headframe_api.plan import PART_TARGET_BYTES, StatesLayout
from headframe_worker.bench.commits import CommitMeter, steady_bytes_per_second
from headframe_worker.bench.timing import seconds
from headframe_worker.engine.batches import cut_batches, pad_right
from headframe_worker.engine.budget import TokenBudget, default_tokens
from headframe_worker.engine.capture import Capture
from headframe_worker.engine.parts import FilledPart, TokenPart
from headframe_worker.engine.pipeline import Pipeline
from headframe_worker.engine.structure import DecoderStack
from headframe_worker.extract.part_object import part_arrays
from headframe_worker.format.cut import cut_parts
from headframe_worker.format.part import encode_part
from headframe_worker.meter import WAITS
from headframe_worker.stores.base import Store
from headframe_worker.stores.local import LocalStore

MEDIA = ("disk", "memory", "discard")
MEMORY = Path("/dev/shm")
TRACED_PARTS = 3


def end_to_end(
    model: nn.Module, media: list[str], *, parts: int, folder: Path | None, part_bytes: int = PART_TARGET_BYTES
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(medium, its rates beside those of the same batches alone), one by one; `dflash` layers in bfloat16."""
    count, hidden = model.config.num_hidden_layers, model.config.hidden_size
    layers = list(preset_layers("dflash", count))
    layout = StatesLayout(
        layers=layers,
        hugging_face_indexes=list(hugging_face_indexes(layers)),
        last="preNorm",
        last_layer=count - 1,
        dtype="bfloat16",
    )
    work = token_parts(model.config.vocab_size, parts, layout.bytes_per_token(hidden), part_bytes)
    stack = DecoderStack(model, model.layers, count)
    budget = default_tokens(stack.device)
    inputs = [ids.to(stack.device) for part in work for ids in batch_ids(part, budget)]

    @torch.inference_mode()
    def forward() -> None:
        for ids in inputs:
            stack.forward(ids)

    tokens = sum(part.tokens for part in work)
    capture = Capture(stack, layers=layout.layers, last=layout.last)
    meter = CommitMeter()
    pipeline = open_pipeline(capture, layout, budget, meter)
    largest = max(part.tokens for part in work)
    total_bytes = tokens * layout.bytes_per_token(hidden)

    def compute(some: list[TokenPart], store: LocalStore | None) -> None:
        pipeline.run(iter(some), largest_part_tokens=largest, write=writer(layout, hidden, store, meter))

    forward()  # kernels tune to these shapes
    try:
        for medium in media:
            top = MEMORY if medium == "memory" else folder or Path(tempfile.gettempdir())
            if medium != "discard" and shutil.disk_usage(top).free < 1.2 * total_bytes:
                yield medium, {"skipped": f"{top} has no room for {total_bytes / 1e9:.0f} GB"}
                continue
            with tempfile.TemporaryDirectory(dir=top) as place:
                store = None if medium == "discard" else LocalStore(Path(place))
                compute([max(work, key=lambda part: part.tokens)], store)  # makes the buffers
                forward_rate = tokens / seconds(forward, [stack.device])
                before, uploads, first = dict(meter.seconds), meter.upload_seconds.total, len(meter.commits)
                started = time.perf_counter()
                compute(work, store)
                elapsed = time.perf_counter() - started
                written = meter.commits[first:]
                size = sum(commit.bytes for commit in written)
                rate = (steady_bytes_per_second(written) or size / elapsed) * tokens / size
                stages = {name: meter.seconds[name] - before[name] for name in before}
                idle = (
                    idle_while(lambda store=store: compute(work[:TRACED_PARTS], store))
                    if pipeline.copy_stream
                    else None
                )
            yield (
                medium,
                {
                    "tokens_per_second": rate,
                    "forward_tokens_per_second": forward_rate,
                    "of_forward": rate / forward_rate,
                    "bytes_per_second": rate * size / tokens,
                    "writer_bytes_per_second": None if store is None else size / (meter.upload_seconds.total - uploads),
                    "seconds": elapsed,
                    "tokens": tokens,
                    "bytes": size,
                    "idle_share": idle,
                    "stage_seconds": stages,
                    "stage_shares": {name: round(stages[name] / elapsed, 4) for name in ("forward", *WAITS)},
                },
            )
    finally:
        pipeline.close()
        capture.close()


def idle_while(work: Callable[[], object]) -> float:
    """The share of the time in which no kernel ran."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    return round(idle_share(kernel_times(trace)), 5)


def token_parts(vocabulary: int, parts: int, token_bytes: int, part_bytes: int) -> list[TokenPart]:
    """Evenly chosen parts of a shard of 20,000 samples of chat lengths."""
    planned = cut_parts(chat_lengths(20_000, seed=0), bytes_per_token=token_bytes, target_bytes=part_bytes)
    chosen = (np.arange(min(parts, len(planned))) + 0.5) * len(planned) / min(parts, len(planned))
    random = np.random.default_rng(0)
    return [
        TokenPart(
            part=number,
            rows=planned[index].rows,
            lengths=planned[index].lengths,
            token_ids=random.integers(3, vocabulary, planned[index].tokens).astype(np.int32),
            loss_mask=np.ones(planned[index].tokens, np.uint8),
        )
        for number, index in enumerate(chosen.astype(int))
    ]


def batch_ids(part: TokenPart, budget: int) -> list[torch.Tensor]:
    """The part's batches as the pipeline lays them out."""
    return [
        torch.from_numpy(
            pad_right(
                part.token_ids[batch.start : batch.start + batch.tokens],
                part.lengths[batch.first : batch.first + batch.samples],
            )[0]
        )
        for batch in cut_batches(part.lengths, budget)
    ]


def open_pipeline(capture: Capture, layout: StatesLayout, budget: int, meter: CommitMeter) -> Pipeline:
    """The worker's pipeline in bfloat16, with batches of `budget` tokens, that nobody stops."""
    return Pipeline(
        capture,
        dtype=torch.bfloat16,
        slot_names=layout.slot_names,
        budget=TokenBudget(budget),
        meter=meter,
        stop=threading.Event(),
        grace_seconds=1,
    )


def writer(layout: StatesLayout, hidden: int, store: Store | None, meter: CommitMeter) -> Callable[[FilledPart], None]:
    """What the pipeline does with a filled part."""

    def write(filled: FilledPart) -> None:
        arrays = part_arrays(filled)
        metadata = PartMetadata(
            plan="benchmark",
            shard=0,
            part=filled.part,
            layers=layout.layers,
            last=layout.last,
            model="benchmark",
            revision="none",
            quarantined=[],
            statistics=list(filled.statistics),
        )
        buffers = encode_part(arrays, metadata, slots=layout.slots, hidden_size=hidden, dtype=layout.dtype)
        started = time.perf_counter()
        if store is not None:
            store.write(part_key(0, filled.part), buffers)
        meter.uploaded(
            size_bytes=sum(buffer.nbytes for buffer in buffers), seconds=max(1e-9, time.perf_counter() - started)
        )

    return write
