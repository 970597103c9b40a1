"""How many tokens are computed at once where each token is computed by itself: it bounds the memory that a long sample takes.

Batches stay below it; only a sample that is longer than a batch may be is cut, and only where cutting changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PIECE_TOKENS = 16_384
"""Matrix products are at their peak from about 4,096 rows on."""


def pieces(tokens: int) -> Iterator[slice]:
    """Consecutive pieces of `tokens` tokens, of at most PIECE_TOKENS each."""
    return (slice(start, min(start + PIECE_TOKENS, tokens)) for start in range(0, tokens, PIECE_TOKENS))


@contextmanager
def at_most(tokens: int) -> Iterator[None]:
    """While the context is open, pieces have at most so many tokens: to try on short samples what long ones will need."""
    global PIECE_TOKENS  # noqa: PLW0603  # read by every module of every layer
    before, PIECE_TOKENS = PIECE_TOKENS, tokens
    try:
        yield
    finally:
        PIECE_TOKENS = before
