"""verify --deep agrees with states that Transformers itself returned, and catches a wrong layer, norm and weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_output import write_finished
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

from headframe_api.errors import ConfigError
from headframe_api.plan import ModelIdentity
from headframe_api.spec import ModelSpec, S3Spec
from headframe_worker.finalize.deep import DeepCheck, deep_check
from headframe_worker.model_source import locate_model
from headframe_worker.stores.local import LocalStore

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 6}
GROUPED = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
CONFIGURATIONS = {
    "llama": LlamaConfig(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED),
    "gemma3": Gemma3TextConfig(**GROUPED, sliding_window=8),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_head=4, n_layer=6),
}


def check(
    directory: Path,
    family: str,
    *,
    last: str = "preNorm",
    change: Callable[[torch.Tensor], torch.Tensor] = lambda s: s,
    **options: Any,
) -> DeepCheck:
    """Deep check of a dataset whose states come from `output_hidden_states=True`, changed by `change`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGURATIONS[family]).eval()
    for parameter in model.parameters():  # norms' gains and biases too, so that pre and post norm differ
        parameter.data += 0.1 * torch.randn_like(parameter)
    source = directory / "model"
    model.save_pretrained(source)
    files = locate_model(ModelSpec(source=str(source)), S3Spec(), scratch=directory / "scratch", weights=False)
    identity = ModelIdentity(
        source=str(source),
        revision=files.revision,
        architecture=type(model).__name__,
        model_type=family,
        num_layers=6,
        hidden_size=32,
        vocab_size=97,
        context_length=None,
        dtype="float32",
        norm_type="Norm",
        norm_gain="weight",
        norm_epsilon=None,
    )
    before_norm: list[torch.Tensor] = []
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 6)
    layers[-1].register_forward_hook(
        lambda _m, _i, output: before_norm.append(output[0] if isinstance(output, tuple) else output)
    )

    @torch.inference_mode()
    def states_of(tokens: torch.Tensor) -> torch.Tensor:
        hidden = model(tokens[None], output_hidden_states=True).hidden_states
        final = hidden[-1] if last == "postNorm" else before_norm[-1]
        return change(torch.stack([hidden[0], hidden[2], hidden[5], final], dim=2)[0].clone())

    output = write_finished(
        directory,
        model=identity,
        model_source=str(source),
        vocabulary=97,
        states_of=states_of,
        last=last,
        **{"dtype": "float32"} | options,
    )
    return deep_check(
        output.plan,
        output.job,
        str(output.directory),
        scratch=directory / "scratch",
        seed=1,
        on_size=lambda count: None,
        on_sample=lambda: None,
    )


@pytest.mark.parametrize("family", CONFIGURATIONS)
@pytest.mark.parametrize("last", ["preNorm", "postNorm"])
def test_transformers_own_hidden_states_pass(tmp_path: Path, family: str, last: str) -> None:
    result = check(tmp_path, family, last=last)
    assert result.faults == []
    assert result.samples == 8
    assert max(result.worst.values()) < 1e-5
    assert list(result.worst) == ["embeddings", "layer.1", "layer.4", f"last.{last}"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_rounding_to_the_stored_dtype_passes(tmp_path: Path, dtype: str) -> None:
    result = check(tmp_path, "llama", dtype=dtype)
    assert result.faults == []
    assert 0 < max(result.worst.values()) < result.tolerance


def another_layer(states: torch.Tensor) -> torch.Tensor:
    return states[:, [0, 2, 2, 3]]


def one_token_late(states: torch.Tensor) -> torch.Tensor:
    return states.roll(1, dims=0)


def slightly_off(states: torch.Tensor) -> torch.Tensor:
    return states * 1.001


@pytest.mark.parametrize(
    ("change", "slots"),
    [(another_layer, {"layer.1"}), (slightly_off, {"embeddings", "layer.1", "layer.4", "last.preNorm"})],
)
def test_wrong_states_are_found_by_their_slot(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], slots: set[str]
) -> None:
    result = check(tmp_path, "llama", change=change)
    assert {fault.problem.split()[0] for fault in result.faults} == slots
    assert all("shard-0000" in fault.place and " row " in fault.place for fault in result.faults)


def test_a_shift_by_one_token_is_found_even_in_float8(tmp_path: Path) -> None:
    assert check(tmp_path, "llama", change=one_token_late, dtype="float8_e4m3fn").faults


def test_a_model_that_changed_is_refused(tmp_path: Path) -> None:
    check(tmp_path, "llama")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    from headframe_worker.documents import read_plan

    store = LocalStore(tmp_path / "output")
    from headframe_worker.job_file import parse_text

    with pytest.raises(ConfigError, match="nothing to compare with"):
        deep_check(
            read_plan(store),
            parse_text(store.read("job.json").decode(), where="job.json"),
            store.uri,
            scratch=tmp_path / "scratch",
            seed=0,
            on_size=lambda count: None,
            on_sample=lambda: None,
        )
