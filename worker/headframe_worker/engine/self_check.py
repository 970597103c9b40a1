"""What must hold on the loaded model before its states are worth storing, proved on samples of the data.

Right padding without a mask is exact only where no token sees what comes after it, and where no sample sees its batch. A
bidirectional encoder or a prefix-LM fails here, whatever its name says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headframe_api.errors import ConfigError
from headframe_worker.engine import pieces
from headframe_worker.engine.batches import pad_right
from headframe_worker.engine.capture import Capture

ALONE_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Relative L2 of a sample alone against the same one in a padded batch. Kernels round differently for other shapes, and in a
low precision the layers add that up, in a mixture of experts by whole experts."""
TF32_ALONE_LIMIT = 5e-3
"""The same in float32 on a GPU, where the kernels of hybrids multiply in TF32: three digits, and each shape is tuned to a kernel of
its own. Up to 1.0e-4 was seen on four layers."""
PADDING_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""The same for two batches of one shape that differ in the padding alone: a causal model hardly differs at all."""
NUMBERING_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_LONGEST = 512
_SHORTEST = 2
_TRIES = 8
_PIECE = 128


def check_stack(capture: Capture, samples: Sequence[NDArray[np.int32]], slot_names: Sequence[str]) -> float:
    """Largest relative L2 difference, over the slots, between a short sample alone and inside a padded batch.

    `samples`: token ids of some samples, of different lengths if there are any. Raises ConfigError where the stack is not
    causal under right padding, where a sample's states depend on its batch, or where they are not finite.
    """
    dtype = next(capture.stack.model.parameters()).dtype
    short, long = _pair(samples)
    for candidate in (short, *(_shortened(sample) for sample in samples[:_TRIES])):
        alone = _states(capture, [candidate])
        if all(bool(torch.isfinite(states).all()) for states in alone):
            short = candidate
            break
    else:
        raise ConfigError(
            f"spec.model.source: the first {min(_TRIES, len(samples))} samples all give NaN or infinity: the weights are "
            f"damaged, or {dtype} is too narrow for this model (spec.model.dtype)",
            reason="NonFinite",
        )
    batch = _states(capture, [long, short])
    error = _largest_error(alone, batch)
    _check_padding(capture, short, len(long), slot_names, PADDING_LIMIT[dtype])
    alone_limit = TF32_ALONE_LIMIT if alone[0].is_cuda and dtype == torch.float32 else ALONE_LIMIT[dtype]
    if not error <= alone_limit:
        raise ConfigError(
            f"spec.model.source: {type(capture.stack.model).__name__} gives a sample other states in a batch than alone "
            f"(relative difference {error:.1e}, at most {alone_limit:.0e} is rounding): it cannot be batched",
            reason="NotCausal",
        )
    longest = max(samples, key=len)
    if len(longest) > pieces.PIECE_TOKENS:
        _check_pieces(capture, longest, slot_names, alone_limit)
    _check_numbering(capture, short, alone, slot_names, NUMBERING_LIMIT[dtype])
    return error


def _check_padding(
    capture: Capture, short: NDArray[np.int32], length: int, slot_names: Sequence[str], limit: float
) -> None:
    """The same batch with two different paddings."""
    count = len(short)
    rows = np.empty((2, length), np.int64)
    rows[:, :count] = short
    # Tokens of the sample itself: valid ids that no model takes for its padding.
    rows[0, count:] = short[-1]
    rows[1, count:] = np.resize(short[::-1], length - count)
    if np.array_equal(rows[0], rows[1]):
        rows[1, count:] = (int(short[-1]) + 1) % capture.stack.vocab_size
    one, other = (_run(capture, np.repeat(row[None], 2, axis=0)) for row in rows)
    differences = [_error(a[:count], b[:count]) for a, b in zip(one, other, strict=True)]
    worst = int(np.argmax(differences))
    if not differences[worst] <= limit:
        raise ConfigError(
            f"spec.model.source: {type(capture.stack.model).__name__} is not causal under right padding: what stands after a "
            f"sample changes {slot_names[worst]} by {differences[worst]:.1e} (relative L2). Bidirectional models, prefix "
            "language models and encoders have no states that could be taken in batches",
            reason="NotCausal",
        )


def _check_pieces(capture: Capture, sample: NDArray[np.int32], slot_names: Sequence[str], limit: float) -> None:
    """The beginning of a long sample whole and in pieces."""
    ids = sample[None, :_LONGEST].astype(np.int64)
    whole = _run(capture, ids)
    with pieces.at_most(min(_PIECE, pieces.PIECE_TOKENS)):
        parted = _run(capture, ids)
    differences = [_error(a, b) for a, b in zip(parted, whole, strict=True)]
    worst = int(np.argmax(differences))
    if not differences[worst] <= limit:
        raise ConfigError(
            f"spec.dataset.maxLength: samples above {pieces.PIECE_TOKENS:,} tokens are computed in pieces, and "
            f"{type(capture.stack.model).__name__} gives other states for pieces than for the whole ({slot_names[worst]} differs "
            f"by {differences[worst]:.1e}, at most {limit:.0e} is rounding); set spec.dataset.maxLength to "
            f"{pieces.PIECE_TOKENS} or less",
            reason="UnsupportedModel",
        )


def _check_numbering(
    capture: Capture, sample: NDArray[np.int32], alone: Sequence[Tensor], slot_names: Sequence[str], limit: float
) -> None:
    """Our slots against what Transformers itself calls `hidden_states`, where the model gives them.

    Most models give the embeddings, then each layer's output, the last of them after the final norm; Mamba gives each
    layer's output and then the normed one.
    """
    count = len(capture.stack.layers)
    with torch.inference_mode():
        ids = torch.from_numpy(sample[None].astype(np.int64)).to(capture.stack.device)
        output = capture.stack.forward(ids, output_hidden_states=True)
    named = getattr(output, "hidden_states", None)
    if named is None or len(named) != count + 1:
        return

    def differing(shift: int) -> str | None:
        for name, states in zip(slot_names, alone, strict=True):
            kind, _, number = name.partition(".")
            index = {"embeddings": shift - 1, "last": count}.get(kind, int(number) + shift if number.isdigit() else -1)
            if name == "last.preNorm" or not 0 <= index < count + (name == "last.postNorm"):
                continue  # Transformers does not give it
            if not _error(states, named[index][0].float().to(states.device)) <= limit:
                return name
        return None

    name = differing(1)
    if name is not None and differing(0) is not None:
        raise ConfigError(
            f"spec.model.source: {name} of {type(capture.stack.model).__name__} is not among what Transformers calls "
            "hidden_states: its layers do not run in their order",
            reason="UnsupportedModel",
        )


def _pair(samples: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """A short and a longer sample; the longer one is made up where there is none."""
    long = max(samples, key=len)[:_LONGEST]
    short = _shortened(min((s for s in samples if len(s) >= _SHORTEST), key=len, default=long))
    if len(long) < len(short) + 2:
        long = np.resize(long, 2 * len(short) + 2)
    return short, long


def _shortened(sample: NDArray[np.int32]) -> NDArray[np.int32]:
    return sample[: _LONGEST // 4]


def _states(capture: Capture, samples: Sequence[NDArray[np.int32]]) -> list[Tensor]:
    """Each slot's states [t, H] in float32 of the last of the samples, all in one batch."""
    lengths = np.array([len(sample) for sample in samples], np.int64)
    ids, _ = pad_right(np.concatenate(samples), lengths)
    return [states[: len(samples[-1])] for states in _run(capture, ids)]


def _run(capture: Capture, ids: NDArray[np.int64]) -> list[Tensor]:
    """Each slot's states [L, H] in float32 of the batch's last row."""
    states: list[Tensor | None] = [None] * capture.slots
    capture.run(
        torch.from_numpy(ids).to(capture.stack.device),
        lambda slot, hidden: states.__setitem__(slot, hidden[-1].float().to(capture.stack.device, copy=True)),
    )
    return [slot for slot in states if slot is not None]


def _largest_error(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(_error(a, b) for a, b in zip(one, other, strict=True))


def _error(one: Tensor, other: Tensor) -> float:
    """Relative L2 difference; NaN where there is one."""
    scale = torch.linalg.vector_norm(one).clamp_min(torch.finfo(torch.float32).tiny)
    return float(torch.linalg.vector_norm(one - other) / scale)
