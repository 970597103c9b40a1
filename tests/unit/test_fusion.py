"""Fusions on tiny random models: what is found by structure, that it computes the same, and that hooks see the same."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from headframe_worker.engine import pieces
from headframe_worker.engine.fusion import (
    FUSIONS,
    apply_fusions,
    mlp,
    nothing_packed,
    remove_fusions,
    slow_path,
    torch_reference,
)
from headframe_worker.engine.fusion.install import is_installed

CPU = torch.device("cpu")
DENSE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 2,
}
MODELS = {
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": DELTA_NET | EXPERTS,
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "smollm3": {},
    "olmo2": {},
    "gemma2": {},
    "granite": {"residual_multiplier": 0.3},
}
ALL = set(FUSIONS)
DENSE_FUSIONS = {"packed_qkv", "rotary", "packed_gate_up", "swiglu", "residual_norm", "residual_matmul"}
WHOLE = {"qwen3_5_text": ALL, "qwen3_next": ALL} | dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), DENSE_FUSIONS)


def tiny(name, dtype=torch.float32):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**DENSE, **MODELS[name]})
    stack = AutoModel.from_config(config).eval()
    for parameter in stack.parameters():  # norms and biases begin as ones and zeros, which would hide a mistake
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return stack.to(dtype)


def states(stack, tokens):
    """The residual stream after every layer, by forward hooks."""
    seen = {}

    def keep(index):
        return lambda _module, _args, output: seen.__setitem__(
            index, output[0] if isinstance(output, tuple) else output
        )

    hooks = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(stack.layers)]
    with torch.inference_mode(), torch_reference(stack):
        stack(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([seen[i] for i in range(len(stack.layers))])


def error(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture
def tokens():
    return torch.randint(128, (3, 37), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_fused_states_are_the_plain_ones_after_every_layer(name, tokens):
    stack = tiny(name)
    plain = states(stack, tokens)
    apply_fusions(stack, device=CPU)
    fused = states(stack, tokens)
    assert all(error(f, p) < 1e-5 for f, p in zip(fused, plain, strict=True))
    remove_fusions(stack)
    assert not any(map(is_installed, stack.modules()))
    assert error(states(stack, tokens), plain) < 1e-6


@pytest.mark.parametrize("name", WHOLE)
def test_every_fusion_a_model_has_a_use_for_is_applied_everywhere(name):
    stack = tiny(name)
    report = apply_fusions(stack, device=CPU)
    assert set(report.applied) == WHOLE[name]
    assert set(report.skipped) == ALL - WHOLE[name]
    assert all(reason == "no module of this structure" for reason in report.skipped.values())
    for layer in stack.layers:
        assert is_installed(layer)
        assert any(is_installed(child) for child in layer.children())


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3"])
def test_the_fused_forward_is_the_one_that_runs(name, tokens):
    stack = tiny(name)
    plain = states(stack, tokens)
    apply_fusions(stack, device=CPU)
    fused_mlp = stack.layers[1].mlp.forward.__closure__
    assert fused_mlp is not None
    projection = next(
        cell.cell_contents for cell in fused_mlp if isinstance(cell.cell_contents, mlp.FusedMLP)
    ).projection
    projection.weight.mul_(2)
    changed = states(stack, tokens)
    assert error(changed[0], plain[0]) < 1e-5
    assert error(changed[1], plain[1]) > 1e-3


def test_merged_weights_are_held_once():
    stack = tiny("qwen3_5_text")
    before = {name: parameter.clone() for name, parameter in stack.named_parameters()}
    apply_fusions(stack, device=CPU)
    after = dict(stack.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    for parts in ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"):
        owner = stack.layers[0].mlp if parts[0] == "gate_proj" else stack.layers[0].linear_attn
        assert len({getattr(owner, part).weight.untyped_storage().data_ptr() for part in parts}) == 1


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "mistral"])
def test_long_samples_are_computed_in_pieces(name):
    """Pieces of 64 tokens of each of two samples; the delta rule's state and the convolution's reach go from one to the next."""
    stack = tiny(name)
    tokens = torch.randint(128, (2, 200), generator=torch.Generator().manual_seed(2))
    plain = states(stack, tokens)
    apply_fusions(stack, device=CPU)
    with pieces.at_most(128):
        in_pieces = states(stack, tokens)
    assert all(error(f, p) < 1e-5 for f, p in zip(in_pieces, plain, strict=True))


@pytest.mark.parametrize("name", FUSIONS)
def test_each_fusion_works_alone(name, tokens):
    stack = tiny("qwen3_5_text")
    plain = states(stack, tokens)
    report = apply_fusions(stack, device=CPU, only={name})
    needs = {"packed_delta_net": "delta_rule", "convolution": "delta_rule", "gated_norm": "delta_rule"}
    if name in needs:
        assert report.applied == ()
        assert f"needs {needs[name]}" in report.skipped[name]
    elif name == "residual_matmul":  # has nothing to add from without a fused feed-forward block
        assert report.applied == ()
    else:
        assert report.applied == (name,)
    assert error(states(stack, tokens), plain) < 1e-5


def test_a_structure_that_computes_something_else_is_left_alone():
    smollm3 = apply_fusions(tiny("smollm3"), device=CPU)  # every fourth layer has no rotary positions
    assert "rotary" in smollm3.applied
    assert smollm3.skipped["rotary"].startswith("layer 3 self_attn: relative error")
    granite = apply_fusions(tiny("granite"), device=CPU)  # scales what it adds to the stream
    assert granite.skipped["residual_norm"].startswith("layer 0: relative error")
    gemma2 = apply_fusions(tiny("gemma2"), device=CPU)  # gelu, and norms after each block too
    assert gemma2.applied == ("residual_norm",)  # the norm after the layers is alone
    assert gemma2.skipped["swiglu"].startswith("layer 0 mlp: relative error")
    assert "6 children" in gemma2.skipped["residual_norm"]


def test_bfloat16_is_no_further_from_float32_than_the_plain_model(tokens):
    exact = states(tiny("qwen3_5_text"), tokens)
    stack = tiny("qwen3_5_text", torch.bfloat16)
    plain = states(stack, tokens)
    assert set(apply_fusions(stack, device=CPU).applied) == ALL
    fused = states(stack, tokens)
    for f, p, e in zip(fused, plain, exact, strict=True):
        assert error(f, e) <= 1.1 * error(p, e)


def test_right_padding_leaves_real_tokens_alone(tokens):
    stack = tiny("qwen3_5_text")
    apply_fusions(stack, device=CPU)
    alone = states(stack, tokens[:1, :20])
    padded = tokens.clone()
    padded[0, 20:] = 0
    assert error(states(stack, padded)[:, :1, :20], alone) < 1e-5


def test_a_pre_hook_may_replace_what_a_layer_sees(tokens):
    def lift(_module, args):
        return (args[0] + 1.0, *args[1:])

    stack = tiny("qwen3")
    hook = stack.layers[2].register_forward_pre_hook(lift)
    plain = states(stack, tokens)
    hook.remove()
    apply_fusions(stack, device=CPU)
    stack.layers[2].register_forward_pre_hook(lift)
    assert error(states(stack, tokens), plain) < 1e-5


def test_calls_with_a_cache_or_with_autograd_take_the_plain_forward(tokens):
    stack = tiny("qwen3")
    plain = states(stack, tokens)[-1]
    apply_fusions(stack, device=CPU)
    with torch.inference_mode():
        first = stack(input_ids=tokens[:, :20], use_cache=True)
        cache = first["cache"] if "cache" in first else first["past_key_values"]
        keyword = "cache" if "cache" in first else "past_key_values"
        rest = stack(input_ids=tokens[:, 20:], use_cache=True, **{keyword: cache}).last_hidden_state
        assert error(rest, stack.norm(plain[:, 20:])) < 1e-5
    embedded = stack.get_input_embeddings()(tokens).detach().requires_grad_()
    stack(inputs_embeds=embedded, use_cache=False).last_hidden_state.sum().backward()
    assert float(embedded.grad.norm()) > 0


def test_the_packing_question_is_left_out_only_while_asked(tokens):
    stack = tiny("qwen3")
    plain = states(stack, tokens)
    packed = torch.arange(37).remainder(20)[None]

    def read():
        with torch.inference_mode():
            return stack(input_ids=tokens[:1], position_ids=packed, use_cache=False).last_hidden_state

    apart = read()
    with nothing_packed():
        assert error(states(stack, tokens), plain) == 0
        assert error(read(), apart) > 1e-3
    assert error(read(), apart) == 0


def test_unknown_names_and_other_stacks_are_refused():
    with pytest.raises(ValueError, match=r"unknown fusions \['magic'\]"):
        apply_fusions(tiny("llama"), device=CPU, only={"magic"})
    stack = tiny("llama")
    stack.layers = nn.ModuleList(list(stack.layers)[:2])
    with pytest.raises(ValueError, match="no list of 4 modules"):
        apply_fusions(stack, device=CPU)


def test_the_slow_path_is_named():
    stack = tiny("qwen3_5_text")
    named = [f"layers.{i}.linear_attn (torch_chunk_gated_delta_rule)" for i in range(3)]
    assert slow_path(stack) == named
    with torch_reference(stack), torch_reference(stack):
        assert slow_path(stack) == named
    assert slow_path(stack) == named
    assert slow_path(tiny("qwen3")) == []
