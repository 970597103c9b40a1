"""A model made ready to fill parts: loaded, fused, checked on real samples, its budget found. And what is worth telling of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headframe_api.errors import ConfigError
from headframe_api.plan import StatesLayout
from headframe_worker.engine.budget import TokenBudget, default_tokens, fit
from headframe_worker.engine.capture import Capture
from headframe_worker.engine.fusion import FusionReport, apply_fusions, nothing_packed, slow_path, torch_reference
from headframe_worker.engine.loading import Checkpoint, load_stack
from headframe_worker.engine.long_attention import attention_in_blocks
from headframe_worker.engine.parts import FilledPart, TokenPart
from headframe_worker.engine.pipeline import Pipeline
from headframe_worker.engine.placement import Placement
from headframe_worker.engine.pointwise import compute_in_pieces
from headframe_worker.engine.self_check import check_stack
from headframe_worker.engine.spread import spread
from headframe_worker.engine.states import TORCH_DTYPE
from headframe_worker.engine.structure import DecoderStack
from headframe_worker.meter import Meter


@dataclass(frozen=True)
class EngineSettings:
    """What decides how the states are computed."""

    checkpoint: Checkpoint
    devices: Sequence[torch.device]
    """One, or several that the layers are spread over."""
    dtype: torch.dtype
    """What the forward computes in."""
    states: StatesLayout
    attention: str = "auto"
    trust_remote_code: bool = False
    batch_tokens: int | None = None
    """Padded tokens of a batch; None finds what fits."""
    fuse: bool = True
    """False keeps plain Transformers."""
    grace_seconds: float = 20.0
    """After the wish to stop."""


@dataclass(frozen=True)
class StartSeconds:
    """What making a model ready takes, step by step."""

    weights: float
    fusions: float
    """Building fused modules and checking them; their kernels compile here unless a cache has them."""
    self_check: float
    warm_up: float
    """Finding the budget with the most demanding batch; nothing on the CPU."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.fusions + self.self_check + self.warm_up


@dataclass(frozen=True)
class EngineFacts:
    """How this engine computes, for the manifest."""

    device: str
    placement: Placement | None
    """How the layers are spread; None on one device."""
    attention: str
    fusions: FusionReport
    slow_path: tuple[str, ...]
    self_check_error: float
    start_seconds: StartSeconds

    @property
    def load_seconds(self) -> float:
        """From the call to a model that is ready."""
        return self.start_seconds.total


class Engine:
    """Fills parts, shard after shard."""

    def __init__(
        self, settings: EngineSettings, samples: Sequence[NDArray[np.int32]], *, meter: Meter, stop: threading.Event
    ) -> None:
        """Load and check the model. `samples`: token ids of some samples of the data, the longest of them first.

        Raises ConfigError for a checkpoint or a model that cannot be used.
        """
        with ExitStack() as opened:  # closed again where the model turns out to be of no use
            self._make_ready(opened, settings, samples, meter=meter, stop=stop)
            self._open = opened.pop_all()

    def _make_ready(
        self,
        opened: ExitStack,
        settings: EngineSettings,
        samples: Sequence[NDArray[np.int32]],
        *,
        meter: Meter,
        stop: threading.Event,
    ) -> None:
        times = [time.perf_counter()]
        layout, device = settings.states, settings.devices[0]
        meter.set_state("loading")
        if settings.dtype == torch.float32:
            torch.backends.cudnn.allow_tf32 = False  # convolutions would round to 10 bits
        stack = load_stack(
            settings.checkpoint,
            devices=settings.devices,
            dtype=settings.dtype,
            attention=settings.attention,
            trust_remote_code=settings.trust_remote_code,
            last_layer=max([0, *layout.layers]) if layout.last == "none" else None,
        )
        _check_against_plan(stack.num_layers, layout)
        times.append(time.perf_counter())
        meter.set_state("warming")
        opened.enter_context(attention_in_blocks(stack.model))
        if device.type == "cpu":
            opened.enter_context(torch_reference(stack.model))
        else:
            opened.enter_context(nothing_packed())
        ways = None if stack.placement is None else spread(stack, stack.placement)
        fusions = FusionReport((), {})
        if device.type == "cuda" and settings.fuse:
            fusions = apply_fusions(stack.model, device=device)
        times.append(time.perf_counter())
        slow = tuple(slow_path(stack.model))
        compute_in_pieces(stack)
        capture = Capture(stack, layers=layout.layers, last=layout.last, ways=ways)
        _check_ids(samples, stack.vocab_size)
        error = check_stack(capture, samples, layout.slot_names)
        times.append(time.perf_counter())
        budget = TokenBudget(settings.batch_tokens or default_tokens(device))
        stored = TORCH_DTYPE[layout.dtype]
        lengths = [len(sample) for sample in samples]
        if settings.batch_tokens is None and device.type == "cuda":
            meter.count_retry("out_of_memory_retries", fit(budget, capture, np.concatenate(samples), lengths, stored))
        times.append(time.perf_counter())
        self._budget = budget
        self._pipeline = Pipeline(
            capture,
            dtype=stored,
            slot_names=layout.slot_names,
            budget=budget,
            meter=meter,
            stop=stop,
            grace_seconds=settings.grace_seconds,
        )
        self.vocab_size = stack.vocab_size
        config: Any = stack.model.config
        self.facts = EngineFacts(
            device=_name(settings.devices),
            placement=stack.placement,
            attention=str(config._attn_implementation or "none"),  # noqa: SLF001  # Transformers has no public name for it
            fusions=fusions,
            slow_path=slow,
            self_check_error=error,
            start_seconds=StartSeconds(*(end - start for start, end in itertools.pairwise(times))),
        )
        meter.model_load_seconds = self.facts.load_seconds
        meter.slow_path = slow

    @property
    def stack(self) -> DecoderStack:
        """The model as it computes here: fused, with its hooks, which do nothing outside `run`."""
        return self._pipeline.capture.stack

    @property
    def batch_tokens(self) -> int:
        """The budget as it is now."""
        return self._budget.tokens

    def run(self, parts: Iterable[TokenPart], *, largest_part_tokens: int, write: Callable[[FilledPart], None]) -> None:
        """See Pipeline.run."""
        self._pipeline.run(parts, largest_part_tokens=largest_part_tokens, write=write)

    def close(self) -> None:
        """Release the buffers and undo what was set for this engine; the model goes with the last reference."""
        self._pipeline.close()
        self._open.close()


def _name(devices: Sequence[torch.device]) -> str:
    name = torch.cuda.get_device_name(devices[0]) if devices[0].type == "cuda" else "CPU"
    return name if len(devices) == 1 else f"{len(devices)} x {name}"


def _check_against_plan(num_layers: int, layout: StatesLayout) -> None:
    if num_layers != layout.last_layer + 1:
        raise ConfigError(
            f"spec.model.source: the checkpoint has {num_layers} layers, the plan was made for {layout.last_layer + 1}; "
            "use another output, or delete what is there and begin anew",
            reason="PlanMismatch",
        )


def _check_ids(samples: Sequence[NDArray[np.int32]], vocab_size: int) -> None:
    largest = max(int(sample.max()) for sample in samples)
    if largest >= vocab_size:
        raise ConfigError(
            f"tokens/ holds token id {largest}, but the model's embedding has {vocab_size} rows: tokenizer and model do not "
            "belong together",
            reason="TokenizerMismatch",
        )
