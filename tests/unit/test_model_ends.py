"""The final norm and head, loaded alone, make of the last layer's output exactly what the whole model makes of it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from smollm2_output import DFLASH, LAYERS, identity, smollm2, states_of, write_smollm2
from synthetic_output import write_finished
from tiny_models import VOCABULARY, save
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from typer.testing import CliRunner

from headframe_api.errors import ConfigError, DataError
from headframe_api.plan import ModelIdentity
from headframe_api.spec import ModelSpec, S3Spec
from headframe_worker.cli.main import app
from headframe_worker.engine.structure import find_stack
from headframe_worker.model_ends.checkpoint import ModelAccess
from headframe_worker.model_ends.ends import ModelEnds, load_ends
from headframe_worker.model_ends.head_check import HeadCheck, head_check
from headframe_worker.model_ends.unit_states import share_after_norm
from headframe_worker.model_source import ModelFiles, locate_model
from headframe_worker.prepare.model_structure import describe_model
from headframe_worker.reader import StatesDataset


def described_files(directory: Path) -> ModelFiles:
    return locate_model(_spec(directory), S3Spec(), scratch=directory, weights=False)


def described(directory: Path) -> ModelIdentity:
    return describe_model(described_files(directory), _spec(directory))[0]


def _spec(directory: Path) -> ModelSpec:
    return ModelSpec(source=str(directory), dtype="float32", gpus=0)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "opt",
        "lfm2",
        "granite",
        "cohere2",
        "falcon_h1",
        "recurrent_gemma",
        "granitemoehybrid",
        "mamba2",
        "qwen3_moe",
    ],
)
def test_norm_and_head_are_the_models_own(family: str, tmp_path: Path) -> None:
    import_module("fla")  # registers classes of its own for some of these model types, wherever it is imported
    model = save(family, tmp_path)
    assert type(described_files(tmp_path).config()) is type(model.config)
    last: list[torch.Tensor] = []
    layer = find_stack(model).layers[-1]
    layer.register_forward_hook(lambda _m, _i, output: last.append(output[0] if isinstance(output, tuple) else output))
    with torch.inference_mode():
        logits = model(torch.randint(3, VOCABULARY, (1, 20)), use_cache=False).logits
    ends = load_ends(described(tmp_path), ModelAccess(), head=True)
    assert ends.head is not None
    torch.testing.assert_close(ends.head.logits(ends.normed(last[0][0])), logits[0], rtol=1e-5, atol=1e-5)


def test_the_norm_of_a_hybrid_is_its_own(tmp_path: Path) -> None:
    """Without a GPU the model does not run here, and its gain of 1 + w is what trainers got wrong."""
    model = save("qwen3_5_text", tmp_path)
    states = torch.randn(7, model.config.hidden_size)
    ends = load_ends(described(tmp_path), ModelAccess(), head=False)
    assert described(tmp_path).norm_gain == "1+weight"
    with torch.inference_mode():
        assert torch.equal(ends.normed(states), model.get_submodule("model.norm")(states))


def test_a_sharded_checkpoint_of_a_larger_model_is_read_by_its_index(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    ends = load_ends(described(tmp_path / "sharded"), ModelAccess(), head=False)
    assert torch.equal(ends.norm.get_parameter("weight"), model.get_parameter("model.norm.weight"))


def test_a_gguf_model_is_read_too() -> None:
    ends = smollm2_ends()
    assert torch.equal(ends.norm.get_parameter("weight"), smollm2().model.norm.weight)
    assert ends.head is not None
    assert torch.equal(ends.head.weight, smollm2().get_output_embeddings().weight)


def test_another_model_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path / "one")
    save("llama", tmp_path / "two", seed=1)
    with pytest.raises(ConfigError, match="not the model that the states came from"):
        load_ends(described(tmp_path / "one"), ModelAccess(source=str(tmp_path / "two")), head=False)


@cache
def smollm2_ends() -> ModelEnds:
    return load_ends(identity(), ModelAccess(), head=True)


def checked(directory: Path) -> HeadCheck:
    return head_check(StatesDataset(directory), smollm2_ends())


def test_right_states_predict_the_text(tmp_path: Path) -> None:
    check = checked(write_smollm2(tmp_path, samples=10, max_length=80).directory)
    assert check.faults == []
    assert check.notes == [], "SmolLM2 would have shown the mistakes that are tried out"
    assert check.loss < 0.8 * check.frequency_loss
    assert check.correct > 0.3
    assert check.temperature in (1.0, 1.25)


@pytest.mark.parametrize(
    ("last_from", "options", "message"),
    [
        (lambda tokens: states_of((LAYERS - 2,))(tokens)[:, 0], {}, "another layer"),
        (lambda tokens: states_of((LAYERS - 1,))(tokens)[:, 0].roll(1, 0), {}, "that of the token before"),
        (lambda tokens: states_of((LAYERS - 1,))(tokens)[:, 0].roll(-1, 0), {}, "that of the token after"),
        (
            lambda tokens: smollm2().model.norm(states_of((LAYERS - 1,))(tokens)[:, 0]),
            {},
            "a state after the final norm",
        ),
        (None, {"last": "postNorm"}, "a state before the final norm"),
    ],
    ids=["one layer early", "one token late", "one token early", "normed already", "not normed"],
)
def test_a_mistaken_convention_is_told(
    tmp_path: Path, last_from: Callable[[torch.Tensor], torch.Tensor] | None, options: dict[str, str], message: str
) -> None:
    with torch.inference_mode():
        output = write_smollm2(
            tmp_path, samples=10, max_length=48, last_from=last_from, last=options.get("last", "preNorm")
        )
    [fault] = checked(output.directory).faults
    assert message in fault.problem


def test_a_wrong_gain_is_told(tmp_path: Path) -> None:
    """The plan says 1 + w of a GGUF whose norm is w: the norm that is loaded is then another."""
    dataset = StatesDataset(write_smollm2(tmp_path, samples=10, max_length=48).directory)
    norm = copy.deepcopy(smollm2_ends().norm)
    norm.get_parameter("weight").data += 1
    faults = head_check(dataset, dataclasses.replace(smollm2_ends(), norm=norm)).faults
    assert faults


def test_a_model_that_knows_nothing_is_not_blamed_for_its_states(tmp_path: Path) -> None:
    """Random weights: the states are right, the check cannot know, and says so."""
    model = save("llama", tmp_path / "model")
    layer = find_stack(model).layers[-1]
    last: list[torch.Tensor] = []
    layer.register_forward_hook(lambda _m, _i, output: last.append(output[0] if isinstance(output, tuple) else output))

    def states(tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            model(tokens.unsqueeze(0), use_cache=False)
        return last.pop().reshape(len(tokens), 1, -1)

    identity_of_model = described(tmp_path / "model")
    output = write_finished(
        tmp_path,
        tokens=[np.random.default_rng(row).integers(0, VOCABULARY, 60) for row in range(20)],
        states_of=states,
        layers=(),
        model=identity_of_model,
        model_source=identity_of_model.source,
        refuse=False,
    )
    with pytest.raises(DataError, match=r"1 faults(.|\n)*cannot read this text(.|\n)*--deep computes samples again"):
        CliRunner().invoke(app, ["verify", str(output.directory), "--with-head"], catch_exceptions=False)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_lengths_tell_states_after_the_norm_from_those_before(stored: torch.dtype) -> None:
    """Without a model that can predict: RMS norms with w and 1 + w, layer norms, gains of all sizes."""
    torch.manual_seed(0)
    size = 2048
    before = torch.randn(500, size) * torch.linspace(0.5, 40, 500).unsqueeze(1)

    def kept(states: torch.Tensor) -> torch.Tensor:
        scale = states.abs().amax(1, keepdim=True) / 448 if stored == torch.float8_e4m3fn else 1.0
        return (states / scale).to(stored).float() * scale

    for norm in (LlamaRMSNorm(size), Gemma3RMSNorm(size), nn.LayerNorm(size)):
        for parameter in norm.parameters():
            parameter.data = torch.randn(size)
        assert share_after_norm(kept(norm(before)), norm) == 1.0
        assert (share_after_norm(kept(before), norm) or 0) < 0.05
    assert share_after_norm(before, nn.Identity()) is None


def test_layers_of_the_example_are_the_preset() -> None:
    from headframe_api.layers import preset_layers

    assert preset_layers("dflash", LAYERS) == DFLASH
