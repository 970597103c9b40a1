"""Attention over a long sample without a mask of all its tokens by all its tokens.

Full causal attention through sdpa has no mask. A sliding window, a chunked window and eager attention have one of T x T, 16 GiB
for 131,072 tokens before any score is computed. Here such a mask stays a description until a block of queries needs its rows,
and a block sees only the keys that its window reaches. Each query's softmax is computed whole, so the result is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headframe_worker.engine import pieces

_QUERIES_PER_PIECE = 8
"""A block has at most this part of PIECE_TOKENS as queries, and as many scores a head as that many queries have over a whole piece."""
_EAGER = "eager_attention_forward"
"""What every modeling file calls its own eager attention."""


@dataclass(frozen=True)
class LongMask:
    """The causal mask of a long sample, made block by block by Transformers' own function."""

    make: Callable[..., Tensor]
    options: dict[str, Any]

    def attend(
        self,
        attention: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **options: Any,
    ) -> Tensor:
        """`attention` of query [B, H, T, D] to key and value, a block of queries at a time; [B, T, H, D]."""
        length, window = query.shape[2], self.options.get("local_size")
        most = max(1, pieces.PIECE_TOKENS // _QUERIES_PER_PIECE)
        keys_seen = length if window is None else min(length, int(window) + most)
        block = max(1, min(most, most * pieces.PIECE_TOKENS // keys_seen))
        blocks = []
        for start in range(0, length, block):
            stop = min(start + block, length)
            first = 0 if window is None else max(0, start - int(window) + 1)
            mask = self.make(
                **self.options
                | {"q_length": stop - start, "kv_length": stop - first, "q_offset": start, "kv_offset": first}
                | {"allow_is_causal_skip": False, "device": query.device}
            )
            keys = slice(first, stop)
            blocks.append(
                attention(module, query[:, :, start:stop], key[:, :, keys], value[:, :, keys], mask, **options)[0]
            )
        return torch.cat(blocks, dim=1)


@contextmanager
def attention_in_blocks(stack: nn.Module) -> Iterator[None]:
    """While the context is open, attention that needs a mask computes samples above PIECE_TOKENS in blocks of queries."""
    homes = [sys.modules[name] for name in {type(module).__module__ for module in stack.modules()}]
    eager = [home for home in homes if hasattr(home, _EAGER)]
    with ExitStack() as replaced:
        masks = {"sdpa": False, "eager": True} if eager else {"sdpa": False}
        for name, is_eager in masks.items():
            make = ALL_MASK_ATTENTION_FUNCTIONS[name]
            ALL_MASK_ATTENTION_FUNCTIONS[name] = _lazy(make, is_eager=is_eager)
            replaced.callback(ALL_MASK_ATTENTION_FUNCTIONS.__setitem__, name, make)
        attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = _in_blocks(attention)
        replaced.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, "sdpa", attention)
        for home in eager:
            plain = getattr(home, _EAGER)
            setattr(home, _EAGER, _in_blocks(plain))
            replaced.callback(setattr, home, _EAGER, plain)
        yield


def _lazy(make: Callable[..., Any], *, is_eager: bool) -> Callable[..., Any]:
    def mask(**options: Any) -> Any:
        length, window = options.get("q_length"), options.get("local_size")
        if (
            isinstance(length, int)
            and length == options.get("kv_length")
            and length > pieces.PIECE_TOKENS
            and (is_eager or (window is not None and window < length))
            and options.get("allow_is_causal_skip", False)  # it is not where the mask is more than causal and local
            and options.get("attention_mask") is None
            and not options.get("use_vmap")
            and options.get("q_offset") == options.get("kv_offset") == 0
        ):
            return LongMask(make, options)
        return make(**options)

    return mask


def _in_blocks(attention: Callable[..., Any]) -> Callable[..., Any]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
    ) -> Any:
        if isinstance(attention_mask, LongMask):
            return attention_mask.attend(attention, module, query, key, value, **options), None
        return attention(module, query, key, value, attention_mask, *args, **options)

    return attend
