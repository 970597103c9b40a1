"""The delta rule's running sums of log decays within a chunk, in plain torch, for any number of sequences.

fla's kernel for them takes the number of sequences as a constant of its code: each new number costs four compilations and their
tuning, seconds in which the GPU stands still, and batches of a token budget have nearly as many numbers as lengths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@contextmanager
def any_batch_size() -> Iterator[None]:
    """While the context is open, fla's chunked gated delta rule takes its sums from here."""
    from fla.ops.gated_delta_rule import chunk  # noqa: PLC0415  # a dense model needs no fla

    original = getattr(chunk, "chunk_local_cumsum", None)
    if original is None:  # a later version sums elsewhere
        yield
        return

    def sums(
        g: Tensor, chunk_size: int, *, scale: float | None = None, cu_seqlens: Any = None, **options: Any
    ) -> Tensor:
        if cu_seqlens is not None or options.get("reverse"):
            return original(g, chunk_size, scale=scale, cu_seqlens=cu_seqlens, **options)  # type: ignore[no-any-return]
        return chunk_sums(g, chunk_size, 1.0 if scale is None else scale)

    chunk.chunk_local_cumsum = sums
    try:
        yield
    finally:
        chunk.chunk_local_cumsum = original


def chunk_sums(g: Tensor, chunk_size: int, scale: float) -> Tensor:
    """Running sums of g [B, T, H] over T that begin anew with each chunk, times `scale`: float32, contiguous."""
    length = g.shape[1]
    chunks: Tensor = functional.pad(g, (0, 0, 0, -length % chunk_size)).unflatten(1, (-1, chunk_size))
    sums = chunks.cumsum(2, dtype=torch.float32) * scale
    return sums.flatten(1, 2)[:, :length].contiguous()
