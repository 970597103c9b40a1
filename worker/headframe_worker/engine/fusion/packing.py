"""Several linear layers over one input as one matrix product."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Projection:
    """One or more linear layers applied to the same input, side by side in one output, with or without a merged weight."""

    parts: tuple[nn.Linear, ...]
    weight: Tensor | None
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., sum of the parts' output widths]."""
        if self.weight is None:
            return torch.cat([part(x) for part in self.parts], dim=-1)
        return functional.linear(x, self.weight, self.bias)

    def starts(self) -> list[int]:
        """The column at which each part begins."""
        widths = [part.out_features for part in self.parts]
        return [sum(widths[:i]) for i in range(len(widths))]


def separate(parts: Sequence[nn.Linear]) -> Projection:
    """The parts as they are; each call copies their outputs together."""
    return Projection(tuple(parts), None, None)


def pack(parts: Sequence[nn.Linear]) -> Projection:
    """Merge the weights, and let each part's parameters be views of the merged ones: nothing is held twice.

    The parts must be plain linear layers of one dtype on one device (`can_pack`). Do not move or resize them afterwards.
    """
    with torch.inference_mode(mode=False), torch.no_grad():  # as before, the parameters are ordinary tensors
        return _pack(parts)


def can_pack(parts: Sequence[object]) -> bool:
    """Whether these are plain linear layers, not a quantised or adapted kind, with the same input, dtype and device."""
    if not all(type(part) is nn.Linear for part in parts):
        return False
    kinds = {(p.in_features, p.weight.dtype, p.weight.device) for p in parts if isinstance(p, nn.Linear)}
    return len(kinds) == 1 and next(iter(kinds))[2].type != "meta"


def _pack(parts: Sequence[nn.Linear]) -> Projection:
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([weight.new_zeros(p.out_features) if p.bias is None else p.bias.detach() for p in parts])
    start = 0
    for part in parts:
        end = start + part.out_features
        part.weight = nn.Parameter(weight[start:end], requires_grad=False)
        if part.bias is not None and bias is not None:
            part.bias = nn.Parameter(bias[start:end], requires_grad=False)
        start = end
    return Projection(tuple(parts), weight, bias)
