"""The engine on a GPU: the same states as on the CPU, page-locked copies, no wait for the device, recovery from too little memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from numpy.typing import NDArray

from headframe_api.layers import hugging_face_indexes
from headframe_api.plan import StatesLayout
from headframe_api.spec import StateDtype
from headframe_worker.engine import pieces
from headframe_worker.engine.engine import Engine, EngineSettings
from headframe_worker.engine.loading import Checkpoint
from headframe_worker.engine.parts import FilledPart, TokenPart
from headframe_worker.engine.states import TORCH_DTYPE
from headframe_worker.meter import Meter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
LAYERS = [-1, 0, 3]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "head_dim": 16},
    "qwen3": {"hidden_size": 64, "head_dim": 16},
    "qwen3_moe": {"hidden_size": 64, "head_dim": 16},
    "gemma3_text": {"hidden_size": 64, "head_dim": 16},
    "gpt2": {},
    "qwen3_5_text": {"hidden_size": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
}


def make_parts(parts: int = 6, samples: int = 40, longest: int = 90) -> list[TokenPart]:
    """Random token ids, longest sample first."""
    random = np.random.default_rng(0)
    made = []
    for part in range(parts):
        lengths = -np.sort(-random.integers(1, longest, samples))
        made.append(
            TokenPart(
                part,
                np.arange(samples, dtype=np.int64) + part * samples,
                lengths.astype(np.int64),
                random.integers(3, tiny_models.VOCABULARY, int(lengths.sum())).astype(np.int32),
                np.ones(int(lengths.sum()), np.uint8),
            )
        )
    return made


def open_engine(
    directory: Path,
    device: torch.device | Sequence[torch.device],
    parts: list[TokenPart],
    *,
    dtype: torch.dtype = torch.float32,
    stored: StateDtype = "float32",
    batch_tokens: int | None = 512,
    meter: Meter | None = None,
    fuse: bool = True,
) -> Engine:
    """An engine on a saved tiny checkpoint."""
    layout = StatesLayout(
        layers=LAYERS,
        hugging_face_indexes=list(hugging_face_indexes(LAYERS)),
        last="preNorm",
        last_layer=tiny_models.LAYERS - 1,
        dtype=stored,
    )
    devices = [device] if isinstance(device, torch.device) else device
    settings = EngineSettings(Checkpoint(directory), devices, dtype, layout, batch_tokens=batch_tokens, fuse=fuse)
    first = parts[0]
    samples: list[NDArray[np.int32]] = np.split(first.token_ids, np.cumsum(first.lengths)[:-1])
    return Engine(settings, samples, meter=meter or Meter("extract"), stop=threading.Event())


def run(engine: Engine, parts: list[TokenPart], stored: StateDtype = "float32") -> dict[int, torch.Tensor]:
    """Part -> its states in float32, copied out of the buffers."""
    found: dict[int, torch.Tensor] = {}

    def write(filled: FilledPart) -> None:
        assert filled.refused == ()
        states = torch.from_numpy(filled.states.copy()).view(TORCH_DTYPE[stored]).float()
        states = states.view(len(filled.token_ids), len(LAYERS) + 1, -1)
        found[filled.part] = (
            states if filled.scales is None else states * torch.from_numpy(filled.scales.copy())[..., None]
        )

    engine.run(parts, largest_part_tokens=max(part.tokens for part in parts), write=write)
    return found


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2."""
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def _whole_memory() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.empty_cache()


@contextmanager
def no_waits() -> Iterator[None]:
    """PyTorch raises on every implicit synchronisation in here."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("family", SHAPES)
def test_the_gpu_gives_the_states_of_the_cpu(tmp_path: Path, family: str, fuse: bool) -> None:
    tiny_models.save(family, tmp_path, **SHAPES[family])
    parts = make_parts()
    expected = run(open_engine(tmp_path, CPU, parts), parts)
    engine = open_engine(tmp_path, GPU, parts, fuse=fuse)
    found = run(engine, parts)
    engine.close()
    assert sorted(found) == sorted(expected)
    # Kernels for hybrids compute their products in TF32.
    limit = 5e-3 if family == "qwen3_5_text" else 1e-4
    assert max(relative_error(found[part], expected[part]) for part in expected) <= limit


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_in_pieces_the_states_are_the_same(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.save(family, tmp_path, **SHAPES[family])
    parts = make_parts()
    expected = run(open_engine(tmp_path, GPU, parts), parts)
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 64)
    found = run(open_engine(tmp_path, GPU, parts), parts)
    limit = 1e-3 if family == "qwen3_5_text" else 1e-5
    assert max(relative_error(found[part], expected[part]) for part in expected) <= limit


@pytest.mark.parametrize("stored", ["bfloat16", "float8_e4m3fn"])
def test_stored_dtypes(tmp_path: Path, stored: StateDtype) -> None:
    tiny_models.save("llama", tmp_path, **SHAPES["llama"])
    parts = make_parts()
    expected = run(open_engine(tmp_path, CPU, parts), parts)
    found = run(open_engine(tmp_path, GPU, parts, dtype=torch.bfloat16, stored=stored), parts, stored)
    assert max(relative_error(found[part], expected[part]) for part in expected) <= 0.06


def test_buffers_are_page_locked_and_released(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path, **SHAPES["llama"])
    parts = make_parts()
    engine = open_engine(tmp_path, GPU, parts)
    run(engine, parts)
    states = [buffer.tokens(0, 1).states for buffer in engine._pipeline._buffers]
    assert len(states) == 3
    assert all(state.is_pinned() for state in states)
    engine.close()
    assert not any(state.is_pinned() for state in states)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_no_forward_waits_for_the_device(tmp_path: Path, family: str) -> None:
    """PyTorch raises on every implicit synchronisation while this runs."""
    tiny_models.save(family, tmp_path, **SHAPES[family])
    parts = make_parts()
    engine = open_engine(tmp_path, GPU, parts)
    run(engine, parts)
    with no_waits():
        run(engine, parts)


@pytest.mark.parametrize("stages", [1, 3])
def test_too_little_memory_is_found_at_start_and_in_the_run(tmp_path: Path, stages: int) -> None:
    """A real shortage: the allocator is only given a part of the device."""
    # One wide layer norm away from nothing: the states themselves are what needs memory.
    tiny_models.save("llama", tmp_path, hidden_size=2048, intermediate_size=4096, num_attention_heads=16)
    parts = make_parts(parts=2, samples=64, longest=500)
    expected = run(open_engine(tmp_path, GPU, parts, batch_tokens=2048), parts)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    meter = Meter("extract")
    allowed = torch.cuda.memory_allocated() + (1600 << 20)
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    engine = open_engine(tmp_path, [torch.device("cuda", 0)] * stages, parts, batch_tokens=None, meter=meter)
    at_start = engine.batch_tokens
    assert 1 <= at_start < 16_384
    assert meter.out_of_memory_retries >= 1
    # Another tenant arrives. The budget was halved until it went through, so it needs more than a quarter of what was free.
    torch.cuda.empty_cache()
    free = allowed - torch.cuda.memory_reserved()
    ballast = torch.empty((free * 3 // 4,), dtype=torch.uint8, device=GPU)
    found = run(engine, parts)
    del ballast
    assert engine.batch_tokens < at_start
    assert max(relative_error(found[part], expected[part]) for part in expected) <= 1e-4


def spread_over() -> list[list[torch.device]]:
    """One GPU as three stages, and two GPUs where there are two."""
    first = torch.device("cuda", 0)
    two = [[first, torch.device("cuda", 1)]] if torch.cuda.device_count() > 1 else []
    return [[first] * 3, *two]


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("family", SHAPES)
def test_a_spread_model_gives_the_states_of_one_gpu(tmp_path: Path, family: str, fuse: bool) -> None:
    """Bit by bit, every part of several rounds: a copy that came too late would differ."""
    tiny_models.save(family, tmp_path, **SHAPES[family])
    parts = make_parts(parts=12)
    one = open_engine(tmp_path, torch.device("cuda", 0), parts, fuse=fuse)
    expected = run(one, parts)
    one.close()
    for devices in spread_over():
        engine = open_engine(tmp_path, devices, parts, fuse=fuse)
        assert engine.facts.fusions == one.facts.fusions
        for _ in range(3):
            found = run(engine, parts)
            assert all(torch.equal(found[part], states) for part, states in expected.items())
        engine.close()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text", "qwen3_moe"])
def test_no_spread_forward_waits_for_a_device(tmp_path: Path, family: str) -> None:
    """In bfloat16: PyTorch groups the products of experts without asking for their sizes in no other dtype."""
    tiny_models.save(family, tmp_path, **SHAPES[family])
    parts = make_parts()
    for devices in spread_over():
        engine = open_engine(tmp_path, devices, parts, dtype=torch.bfloat16)
        run(engine, parts)
        with no_waits():
            run(engine, parts)
        engine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_weights_go_straight_to_their_gpus(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path, hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    parts = make_parts(parts=1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    before = [torch.cuda.memory_allocated(index) for index in range(2)]
    engine = open_engine(tmp_path, [torch.device("cuda", index) for index in range(2)], parts, fuse=False)
    held = [torch.cuda.memory_allocated(index) - before[index] for index in range(2)]
    peak = torch.cuda.max_memory_allocated(0) - before[0]
    assert 0.8 < held[1] / held[0] < 1.25, "three layers each; the embedding is small"
    # As much again as it holds, which Transformers reserves while it loads; with the second one's layers it would be three times.
    assert peak < 2.2 * held[0], "the first GPU never held the second one's layers"
    engine.close()
