"""A model spread over several devices: which layers go where, and states equal to those of one device, bit by bit.

Here two or three stages share the CPU. All that crosses from one stage to the next is copied all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from prepared_output import extractor, random_samples, write_prepared
from safetensors.torch import load_file

from headframe_api.errors import ConfigError
from headframe_api.manifests import StagePlacement
from headframe_api.names import part_key
from headframe_worker.engine.fusion import torch_reference
from headframe_worker.engine.loading import Checkpoint, load_stack
from headframe_worker.engine.placement import Placement, layer_costs, place
from headframe_worker.engine.spread import spread
from headframe_worker.engine.structure import DecoderStack, prune

CPU, META = torch.device("cpu"), torch.device("meta")
LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34, 55, 8, 30, 31]


@pytest.mark.parametrize(
    ("costs", "devices", "bounds"),
    [
        ([1.0] * 80, 2, (0, 40, 80)),
        ([1.0] * 7, 3, (0, 2, 4, 7)),
        ([3.0, 1.0, 1.0, 1.0], 2, (0, 1, 4)),
        ([1.0, 1.0, 1.0, 3.0], 2, (0, 3, 4)),
        ([1.0, 5.0, 1.0, 1.0, 1.0, 1.0], 3, (0, 1, 2, 6)),
        ([0.1] * 3 + [1.0] * 58, 2, (0, 32, 61)),
        ([2.0, 2.0], 2, (0, 1, 2)),
        ([1.0, 2.0, 3.0], 1, (0, 3)),
    ],
)
def test_the_busiest_device_has_as_little_as_possible(
    costs: list[float], devices: int, bounds: tuple[int, ...]
) -> None:
    placement = place(costs, [CPU] * devices)
    assert placement.bounds == bounds
    assert [placement.stage_of(layer) for stage in range(devices) for layer in placement.layers(stage)] == [
        stage for stage in range(devices) for _ in placement.layers(stage)
    ]
    assert placement.stage_of(-1) == 0


def test_experts_cost_what_a_token_sees_of_them() -> None:
    many = tiny_models.build("qwen3_moe", num_experts=8, num_experts_per_tok=2).model
    two = tiny_models.build("qwen3_moe", num_experts=2, num_experts_per_tok=2).model
    router = 6 * 32  # it chooses among six experts more
    assert layer_costs(many.layers, many.config)[0] == layer_costs(two.layers, two.config)[0] + router


def stored(directory: Path, checkpoint: Path, stages: int, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """(all states of an extraction over so many stages by part, how the run was placed)."""
    samples = random_samples(LENGTHS, tiny_models.VOCABULARY)
    job, plan, store = write_prepared(
        directory, checkpoint, samples, batch_tokens=96, part_target_bytes=60_000, **options
    )
    work = extractor(job, plan, store, devices=[CPU] * stages)
    manifest = work.run(0)
    work.close()
    found = {}
    for part in range(len(manifest.parts)):
        for name, tensor in load_file(directory / part_key(0, part)).items():
            found[f"{part}.{name}"] = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    return found, manifest.runs[0]


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_5_text", "gemma3_text", "qwen3_moe", "opt", "mamba2"],
)
def test_spread_states_are_those_of_one_device(tmp_path: Path, family: str) -> None:
    """Slots in every stage, the embeddings and the final norm among them, stored as float8 with its scales."""
    tiny_models.save(family, tmp_path / "model")
    options: dict[str, Any] = {
        "states": {"layers": [-1, 0, 2, 3, 5], "last": "postNorm", "dtype": "float8_e4m3fn"},
    }
    alone, placed_alone = stored(tmp_path / "one", tmp_path / "model", 1, **options)
    apart, placed_apart = stored(tmp_path / "three", tmp_path / "model", 3, **options)
    assert placed_alone.placement == []
    assert placed_apart.device == "3 x CPU"
    assert [stage.last_layer for stage in placed_apart.placement][-1] == tiny_models.LAYERS - 1
    assert alone.keys() == apart.keys()
    for name, expected in alone.items():
        assert torch.equal(apart[name], expected), name


def test_layers_after_the_last_needed_one_are_not_placed(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path / "model")
    states = {"layers": [1, 3], "last": "none"}
    alone, _ = stored(tmp_path / "one", tmp_path / "model", 1, states=states)
    apart, run = stored(tmp_path / "two", tmp_path / "model", 2, states=states)
    assert run.placement == [
        StagePlacement(device="cpu", first_layer=0, last_layer=1),
        StagePlacement(device="cpu", first_layer=2, last_layer=3),
    ]
    assert all(torch.equal(apart[name], expected) for name, expected in alone.items())


def test_more_gpus_than_layers(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"spec\.model\.gpus: 7, but only 6 layers") as error:
        load_stack(Checkpoint(tmp_path), devices=[CPU] * 7, dtype=torch.float32)
    assert error.value.exit_code == 78


def test_layers_that_share_weights_cannot_be_spread(tmp_path: Path) -> None:
    """Zamba2's attention blocks are one block, called again and again."""
    tiny_models.save(
        "zamba2",
        tmp_path,
        layers_block_type=["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"],
        num_mem_blocks=1,
        mamba_d_state=8,
        mamba_headdim=8,
        n_mamba_heads=8,
        mamba_ngroups=1,
        chunk_size=8,
        adapter_rank=4,
        num_key_value_heads=4,
    )
    with pytest.raises(ConfigError, match=r"layers 1 and 4 share the weight .*set spec\.model\.gpus to 1") as error:
        load_stack(Checkpoint(tmp_path), devices=[CPU] * 2, dtype=torch.float32)
    assert error.value.exit_code == 78


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_nothing_stays_behind(family: str) -> None:
    """Between two devices that refuse each other's tensors: the CPU, and the one that computes shapes only."""
    stack, placement = over_cpu_and_meta(family)
    with torch_reference(stack.model), torch.inference_mode():
        spread(stack, placement)
        output = stack.forward(torch.randint(3, tiny_models.VOCABULARY, (2, 9)))
    assert output.last_hidden_state.device == META


def test_a_model_that_hands_tensors_from_layer_to_layer_is_named() -> None:
    """Late layers of Gemma 4 take keys and values of earlier ones, past the layers' arguments."""
    stack, placement = over_cpu_and_meta(
        "gemma4_text",
        head_dim=8,
        num_kv_shared_layers=3,
        layer_types=["sliding_attention", "full_attention"] * 3,
        vocab_size_per_layer_input=tiny_models.VOCABULARY,
    )
    with pytest.raises(ConfigError, match=r"Gemma4TextModel cannot be spread over 2 GPUs .*after layers\.3") as error:
        spread(stack, placement)
    assert error.value.exit_code == 78


def over_cpu_and_meta(family: str, **overrides: Any) -> tuple[DecoderStack, Placement]:
    """A tiny model whose second half lies on the meta device."""
    stack = prune(tiny_models.build(family, **overrides))
    middle = len(stack.layers) // 2
    for layer in stack.layers[middle:]:
        layer.to(META)
    return stack, Placement((CPU, META), (0, middle, len(stack.layers)))


def test_a_placement_tells_itself() -> None:
    assert str(Placement((CPU, torch.device("cuda", 1)), (0, 3, 6))) == "layers 0-2 on cpu, layers 3-5 on cuda:1"
