"""Long samples in pieces: what is cut, what is not, and that nothing has the size of all tokens by all tokens.

That the states are the same is proved for every family in test_parity.
"""

from typing import Any

import pytest
import tiny_models
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headframe_worker.engine import pieces
from headframe_worker.engine.long_attention import attention_in_blocks
from headframe_worker.engine.pointwise import compute_in_pieces
from headframe_worker.engine.structure import find_stack

LENGTH = 600


class LargestTensor(TorchDispatchMode):
    """Values of the largest tensor that any operation gave; views count by what they can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, torch.Tensor):
                self.values = max(self.values, value.untyped_storage().nbytes() // value.element_size())
        return output


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "exaone4"])
def test_nothing_grows_with_the_square_of_the_length(family: str) -> None:
    """Full attention, sliding windows, and eager attention with and without them."""
    stack = find_stack(tiny_models.build(family, max_position_embeddings=2 * LENGTH))
    ids = torch.randint(3, tiny_models.VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attention_in_blocks(stack.model), LargestTensor() as whole:
        expected = stack.forward(ids).last_hidden_state
    with torch.no_grad(), attention_in_blocks(stack.model), pieces.at_most(128), LargestTensor() as parted:
        found = stack.forward(ids).last_hidden_state
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert parted.values < LENGTH**2 / 2
    assert (whole.values >= LENGTH**2) == (family != "llama"), "what needs a mask makes one for a short sample"


class Mixing(nn.Module):
    """A feed-forward block that looks, only slightly, at the token before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1e-3 * x.roll(1, dims=1)


def test_only_what_computes_each_token_by_itself_is_cut() -> None:
    stack = find_stack(tiny_models.build("llama"))
    stack.layers[1].mlp = Mixing(stack.layers[1].mlp)
    names = compute_in_pieces(stack)
    assert {name for name in names if name.startswith(("0.", "1."))} == {
        *("0.mlp", "0.input_layernorm", "0.post_attention_layernorm"),
        *("1.mlp.inner", "1.input_layernorm", "1.post_attention_layernorm"),
    }
    assert not any("attn" in name for name in names)
    lengths: list[int] = []
    stack.layers[0].mlp.gate_proj.register_forward_hook(lambda _module, args, _out: lengths.append(args[0].shape[1]))
    ids = torch.zeros((1, 50), dtype=torch.long)
    with torch.no_grad(), pieces.at_most(20):
        stack.forward(ids)
    assert lengths == [20, 20, 10]
