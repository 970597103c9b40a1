"""Forward plus upload against forward alone: the engine's pipeline over a stand-in for a model on a GPU, into a store.

On a small machine a forward on the CPU and the S3 server would compete for the cores, and the ratio would say nothing of the
pipeline. So the stand-in takes time, not cores: as with a GPU, the host waits for a device that is busy until a moment. All
else is the pipeline that extracts: its hooks, its measures, its buffers, its writers.
"""

from __future__ import annotations

import threading
import time
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import psutil
import torch
from pipeline import open_pipeline, token_parts, writer
from torch import Tensor, nn

from headframe_api.layers import hugging_face_indexes, preset_layers
from headframe_api.plan import StatesLayout
from headframe_worker.bench.commits import CommitMeter, steady_bytes_per_second
from headframe_worker.engine.budget import default_tokens
from headframe_worker.engine.capture import Capture
from headframe_worker.engine.parts import FilledPart
from headframe_worker.engine.structure import DecoderStack
from headframe_worker.stores.base import Store

HIDDEN_SIZE = 2048
LAYERS = 24
VOCABULARY = 1000
PART_BYTES = 64 << 20
PARTS = 16
_SETTLED = 6
"""Commits after which all buffers and connections are there."""


class DeviceLike(nn.Module):
    """A decoder stack whose forward is a device's that makes so many tokens a second. Its states are made up."""

    def __init__(self, tokens_per_second: float, most_tokens: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=HIDDEN_SIZE, num_hidden_layers=LAYERS, vocab_size=VOCABULARY)
        self.embedding = nn.Embedding(VOCABULARY, 1)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
        self._states = torch.randn(most_tokens, HIDDEN_SIZE, dtype=torch.bfloat16)
        self._tokens_per_second = tokens_per_second
        self._busy_until = 0.0
        self._never = threading.Event()

    def get_input_embeddings(self) -> nn.Embedding:
        """As Transformers' models have it."""
        return self.embedding

    def forward(self, input_ids: Tensor, **_: object) -> Any:
        """Hand out states at once, and return when the device would be done."""
        started = max(self._busy_until, time.perf_counter())
        self._busy_until = started + input_ids.numel() / self._tokens_per_second
        hidden = self._states[: input_ids.numel()].view(*input_ids.shape, HIDDEN_SIZE)
        for layer in self.layers:
            hidden = layer(hidden)
        self._never.wait(max(0.0, self._busy_until - time.perf_counter()))
        return SimpleNamespace(last_hidden_state=hidden)


def forward_and_upload(store: Store, bytes_per_second: float, rounds: int) -> dict[str, float]:
    """Steady rates of the pipeline into the store and into nothing, in turns; the forward makes so many bytes of states a second."""
    layers = list(preset_layers("dflash", LAYERS))
    layout = StatesLayout(
        layers=layers,
        hugging_face_indexes=list(hugging_face_indexes(layers)),
        last="preNorm",
        last_layer=LAYERS - 1,
        dtype="bfloat16",
    )
    token_bytes = layout.bytes_per_token(HIDDEN_SIZE)
    parts = token_parts(VOCABULARY, PARTS, token_bytes, PART_BYTES)
    budget = max(default_tokens(torch.device("cpu")), *(int(part.lengths[0]) for part in parts))
    model = DeviceLike(bytes_per_second / token_bytes, budget)
    capture = Capture(DecoderStack(cast("Any", model), model.layers, LAYERS), layers=layers, last="preNorm")
    rates: dict[bool, list[float]] = {True: [], False: []}
    growth = 0
    for turn in range(2 * rounds):
        uploads = turn % 2 == 1
        meter, memory = CommitMeter(), list[int]()
        write = writer(layout, HIDDEN_SIZE, store if uploads else None, meter)

        def write_and_look(filled: FilledPart, write: Any = write, memory: list[int] = memory) -> None:
            write(filled)
            memory.append(psutil.Process().memory_info().rss)

        pipeline = open_pipeline(capture, layout, budget, meter)
        pipeline.run(iter(parts), largest_part_tokens=max(part.tokens for part in parts), write=write_and_look)
        pipeline.close()
        rates[uploads].append(steady_bytes_per_second(meter.commits) or 0.0)
        if uploads:
            growth = max(growth, max(memory[_SETTLED:]) - memory[_SETTLED - 1])
    return {
        "forward_mib_per_second": median(rates[False]) / 2**20,
        "forward_and_upload_mib_per_second": median(rates[True]) / 2**20,
        "forward_and_upload_ratio": median(rates[True]) / median(rates[False]),
        "run_memory_growth_bytes": growth,
    }
