"""Every stored slot of every sample equals what plain Transformers gives for that sample alone, for every family.

The reference is the whole model (head and all), one sample at a time, with `output_hidden_states`, and a hook of its own
for the last layer's output, which Transformers does not give.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from numpy.typing import NDArray
from prepared_output import extractor, random_samples, write_prepared
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headframe_api.errors import ConfigError
from headframe_api.names import part_key
from headframe_api.plan import Plan
from headframe_worker.engine import pieces
from headframe_worker.engine.fusion import torch_reference
from headframe_worker.engine.gguf_files import gguf_read_once
from headframe_worker.stores.local import LocalStore

LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34, 55, 8, 30, 31]
FLOAT32_LIMIT = 1e-5
BFLOAT16_RATIO = 1.25
"""Of plain Transformers' own error in bfloat16; the two round differently, and experts are chosen by rounded scores."""
FLOAT8_LIMIT = 0.04
"""float8_e4m3fn has 4 significant bits, a relative error of at most 2^-4 a value, and about 2.6 % in L2."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error in float32."""
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))


def plain_states(model: PreTrainedModel, sample: NDArray[np.int64], plan: Plan) -> list[torch.Tensor]:
    """The plan's slots [t, H] of one sample by plain Transformers."""
    count = model.config.get_text_config().num_hidden_layers
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    kept: list[Any] = []
    hook = layers[-1].register_forward_hook(lambda _module, _args, output: kept.append(output))
    try:
        with torch.no_grad(), torch_reference(model):
            output = model(input_ids=torch.from_numpy(sample)[None], output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    last = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    named = list(output.hidden_states)
    assert len(named) == count + 1
    if (
        model.config.model_type == "mamba2"
    ):  # gives no embeddings, but the last layer's output before and after the norm
        named = [model.get_input_embeddings()(torch.from_numpy(sample)[None]), *named[: count - 1], named[count]]
    slots = [last[0] if layer == count - 1 else named[layer + 1][0] for layer in plan.states.layers]
    if plan.states.last != "none":
        slots.append(last[0] if plan.states.last == "preNorm" else named[-1][0])
    return slots


def stored_states(store: LocalStore, plan: Plan, parts: int) -> dict[int, torch.Tensor]:
    """Row -> states [t, S, H] in float32, as a reader of the format gets them."""
    rows = {}
    for part in range(parts):
        tensors = load_file(store.directory / part_key(0, part))
        states = tensors["hidden_states"].float()
        if "scales" in tensors:
            states = states * tensors["scales"][..., None]
        offsets = tensors["offsets"].tolist()
        for index, row in enumerate(tensors["rows"].tolist()):
            rows[row] = states[offsets[index] : offsets[index + 1]]
    return rows


def extract(
    directory: Path, reference: PreTrainedModel, lengths: list[int] = LENGTHS, **options: Any
) -> tuple[list[NDArray[np.int64]], Plan, list[torch.Tensor]]:
    """(samples, plan, states [t, S, H] of each sample) of an extraction in small batches and parts."""
    samples = random_samples(lengths, reference.config.get_text_config().vocab_size)
    job, plan, store = write_prepared(
        directory / "output", directory / "model", samples, batch_tokens=96, part_target_bytes=60_000, **options
    )
    manifest = extractor(job, plan, store).run(0)
    stored = stored_states(store, plan, len(manifest.parts))
    assert sorted(stored) == list(range(len(samples)))
    return samples, plan, [stored[row] for row in range(len(samples))]


def largest_error(
    directory: Path, reference: PreTrainedModel, lengths: list[int] = LENGTHS, **options: Any
) -> tuple[float, Plan]:
    """The largest error of any slot of any sample against plain Transformers, and the plan."""
    samples, plan, stored = extract(directory, reference, lengths, **options)
    errors = [
        relative_error(states[:, slot], expected)
        for sample, states in zip(samples, stored, strict=True)
        for slot, expected in enumerate(plain_states(reference, sample, plan))
    ]
    return max(errors), plan


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_float32_states_equal_plain_transformers(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short samples whole, and longer ones in pieces."""
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 20)
    model = tiny_models.save(family, tmp_path / "model")
    error, plan = largest_error(tmp_path, model, states={"layers": [-1, 0, 2, tiny_models.LAYERS - 1]})
    assert plan.states.slot_names == ("embeddings", "layer.0", "layer.2", "layer.5", "last.preNorm")
    assert error <= FLOAT32_LIMIT


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "gemma3_text", "mamba2", "gpt2"])
@pytest.mark.parametrize(
    "states",
    [
        {"preset": "eagle3", "last": "postNorm"},
        {"preset": "dflash"},
        {"layers": [1, 3], "last": "none"},
        {"layers": [4, 0], "last": "postNorm"},
    ],
    ids=["eagle3-postNorm", "dflash", "none", "out-of-order"],
)
def test_presets_and_norms(tmp_path: Path, family: str, states: dict[str, Any]) -> None:
    model = tiny_models.save(family, tmp_path / "model", **deeper(family))
    error, _ = largest_error(tmp_path, model, lengths=[3, 17, 40, 9], states=states)
    assert error <= FLOAT32_LIMIT


def deeper(family: str) -> dict[str, Any]:
    """Nine layers: the smallest number on which both presets name different layers in order."""
    return {"n_layer": 9} if family == "gpt2" else {"num_hidden_layers": 9}


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "gpt_oss", "falcon_h1"])
def test_bfloat16_is_no_worse_than_plain_bfloat16(tmp_path: Path, family: str) -> None:
    """Against float32, over all samples, for each slot: our error and that of plain Transformers in bfloat16."""
    model = tiny_models.save(family, tmp_path / "model")
    samples, plan, stored = extract(
        tmp_path, model, model={"dtype": "bfloat16"}, states={"layers": [-1, 2, 5], "dtype": "bfloat16"}
    )
    exact = [plain_states(model, sample, plan) for sample in samples]
    plain_model = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    plain = [plain_states(plain_model, sample, plan) for sample in samples]
    for slot in range(plan.states.slots):
        expected = torch.cat([states[slot] for states in exact])
        ours = relative_error(torch.cat([states[:, slot] for states in stored]), expected)
        theirs = relative_error(torch.cat([states[slot] for states in plain]), expected)
        assert ours <= BFLOAT16_RATIO * theirs + 1e-3, plan.states.slot_names[slot]


def test_float8_costs_what_is_documented(tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path / "model")
    error, plan = largest_error(tmp_path, model, states={"layers": [-1, 2, 5], "dtype": "float8_e4m3fn"})
    assert plan.states.dtype == "float8_e4m3fn"
    assert 0.01 < error <= FLOAT8_LIMIT


def test_smollm2_from_gguf(tmp_path: Path) -> None:
    """Real weights, from a GGUF file."""
    path = tiny_models.smollm2_gguf()
    with gguf_read_once(path.name):  # a cache that spares Transformers a minute
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    samples = random_samples([3, 64, 17], 49_000)
    job, plan, store = write_prepared(tmp_path / "output", path, samples, states={"preset": "dflash"})
    extractor(job, plan, store).run(0)
    stored = stored_states(store, plan, 1)
    for row, sample in enumerate(samples):
        for slot, expected in enumerate(plain_states(model, sample, plan)):
            assert relative_error(stored[row][:, slot], expected) <= FLOAT32_LIMIT


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    model = tiny_models.save_multimodal(tmp_path / "model")
    error, _ = largest_error(tmp_path, model, states={"layers": [-1, 1, 5]})
    assert error <= FLOAT32_LIMIT


@pytest.mark.parametrize("family", ["bert", "t5gemma"])
def test_what_is_not_causal_is_refused(tmp_path: Path, family: str) -> None:
    """An encoder and an encoder-decoder."""
    tiny_models.save_encoder(family, tmp_path / "model")
    samples = random_samples([3, 17, 40, 9], 100)
    job, plan, store = write_prepared(tmp_path / "output", tmp_path / "model", samples, states={"layers": [1, 2]})
    with pytest.raises(ConfigError, match=r"not causal|encoder-decoder"):
        extractor(job, plan, store).run(0)
    assert not list((tmp_path / "output" / "states").glob("**/*.safetensors"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder_with_bidirectional_attention_is_refused(tmp_path: Path, dtype: str) -> None:
    """Its class is a decoder's; only its behaviour is not."""
    tiny_models.save("llama", tmp_path / "model", is_causal=False)
    samples = random_samples([3, 17, 40, 9], tiny_models.VOCABULARY)
    job, plan, store = write_prepared(
        tmp_path / "output", tmp_path / "model", samples, states={"layers": [1, 2]}, model={"dtype": dtype}
    )
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(ConfigError, match="not causal") as error:
        extractor(job, plan, store).run(0)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attention, "what was set for this model is undone"
    assert error.value.reason == "NotCausal"
    assert error.value.exit_code == 78
