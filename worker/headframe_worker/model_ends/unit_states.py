"""Whether states have been through a norm already: read off their lengths, so it needs no model that predicts well.

RMSNorm and LayerNorm give g * u + b, where u has a mean square of 1 in every token. Take b and g away again, and states after the
norm have that mean square; those before it have another one in each token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_TOLERANCE = 0.03
"""Of the root mean square; float8 rounds single values by more, but not their mean."""
_SMALLEST_GAIN = 0.05
"""Of the median: what rounding left of smaller ones says nothing."""


@torch.inference_mode()
def share_after_norm(states: Tensor, normed: Callable[[Tensor], Tensor]) -> float | None:
    """The share of states [T, H] that came out of a norm; None where it does not bring them to one length.

    `normed`: the norm, of [..., H].
    """
    size = states.shape[-1]
    probe = torch.ones(size)
    probe[1::2] = -1  # a mean of 0 and a mean square of 1: what either norm leaves as it is
    zero, once, twice = normed(torch.stack([0 * probe, probe, 2 * probe])).float()
    if size % 2 or not torch.allclose(once, twice, rtol=0.01, atol=1e-3):
        return None
    gain = (once - zero) * probe
    usable = gain.abs() > _SMALLEST_GAIN * gain.abs().median()
    unit = ((states.float() - zero) / gain)[:, usable]
    lengths = unit.pow(2).mean(1).sqrt()
    return float(((lengths - 1).abs() < _TOLERANCE).float().mean())
