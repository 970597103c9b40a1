"""Transformers looks into the position ids of every forward for packed sequences, and waits for the device to see the answer.

That wait empties the queue of launches between two batches. Whoever never packs can leave the question out.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import masking_utils

_QUESTION = "find_packed_sequence_indices"


@contextmanager
def nothing_packed() -> Iterator[None]:
    """While the context is open, every forward of this process takes its position ids for those of unpacked sequences."""
    asked = getattr(masking_utils, _QUESTION, None)
    if asked is None:  # a later version asks no more
        yield
        return
    setattr(masking_utils, _QUESTION, lambda *_args, **_options: None)
    try:
        yield
    finally:
        setattr(masking_utils, _QUESTION, asked)
