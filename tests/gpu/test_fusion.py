"""Fusions on a GPU: every one passes its check, and the states stay as close to float32 as plain Transformers' are."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from headframe_worker.engine.fusion import FUSIONS, apply_fusions, nothing_packed, slow_path, torch_reference

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA_NET = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
DENSE = {"packed_qkv", "rotary", "packed_gate_up", "swiglu", "residual_norm", "residual_matmul"}


def states(stack, tokens):
    kept = []
    hooks = [layer.register_forward_hook(lambda _module, _args, output: kept.append(output)) for layer in stack.layers]
    with torch.inference_mode():
        stack(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [state[0] if isinstance(state, tuple) else state for state in kept]


def error(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture(params=["qwen3_5_text", "qwen3_next", "llama"])
def model(request):
    torch.manual_seed(0)
    extra = (
        {} if request.param == "llama" else DELTA_NET | ({"num_experts": 0} if request.param == "qwen3_next" else {})
    )
    config = AutoConfig.for_model(request.param, **SHAPE, **extra)
    exact = AutoModel.from_config(config, dtype=torch.float32).eval().to(DEVICE)
    stack = AutoModel.from_config(config, dtype=torch.bfloat16).eval().to(DEVICE)
    stack.load_state_dict(exact.state_dict())
    exact.load_state_dict(stack.state_dict())  # the same rounded weights
    return exact, stack, DENSE if request.param == "llama" else set(FUSIONS)


def test_fused_states_are_no_further_from_float32_than_plain_ones(model):
    exact, stack, wanted = model
    tokens = torch.randint(1000, (3, 333), device=DEVICE)
    with torch_reference(exact):
        reference = states(exact, tokens)
    plain = states(stack, tokens)
    assert set(apply_fusions(stack, device=DEVICE).applied) == wanted
    assert slow_path(stack) == []
    fused = states(stack, tokens)
    for f, p, r in zip(fused, plain, reference, strict=True):
        assert error(f, r) <= 1.1 * error(p, r)


def test_padding_and_company_leave_real_tokens_alone(model):
    _, stack, _ = model
    apply_fusions(stack, device=DEVICE)
    tokens = torch.randint(1000, (4, 190), device=DEVICE)
    alone = states(stack, tokens[:1, :77])
    together = states(stack, tokens)
    for a, t in zip(alone, together, strict=True):
        assert error(t[:1, :77], a) < 0.01  # other tiles of the same products round differently in bf16


def test_a_forward_never_waits_for_the_gpu(model):
    _, stack, _ = model
    apply_fusions(stack, device=DEVICE)
    tokens = torch.randint(1000, (2, 128), device=DEVICE)
    with torch.inference_mode(), nothing_packed():
        stack(input_ids=tokens, use_cache=False)
        torch.cuda.set_sync_debug_mode("error")
        try:
            stack(input_ids=tokens, use_cache=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
