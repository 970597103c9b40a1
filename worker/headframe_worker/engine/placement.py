"""Which device computes which layers of a model that is spread over several: consecutive runs of about equal work.

By layers, not by tensor parallelism: forwards are independent of each other, so every device can have a batch of its own in
the works. Nothing is summed across devices, the kernels are those of one device, and so are the states, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from headframe_api.errors import ConfigError

_EXPERTS_TOTAL = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True)
class Placement:
    """Stage k is devices[k] with the layers from bounds[k] up to, not including, bounds[k + 1]."""

    devices: tuple[torch.device, ...]
    bounds: tuple[int, ...]

    @property
    def last_stage(self) -> int:
        """The stage whose layers come last."""
        return len(self.devices) - 1

    def layers(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of(self, layer: int) -> int:
        """The stage of a layer; what comes before the layers (-1) belongs to the first."""
        return next(stage for stage in range(len(self.devices)) if layer < self.bounds[stage + 1])

    def device_of(self, layer: int) -> torch.device:
        """The device of a layer."""
        return self.devices[self.stage_of(layer)]

    def __str__(self) -> str:
        runs = [f"{layers.start}-{layers.stop - 1}" for layers in map(self.layers, range(len(self.devices)))]
        return ", ".join(f"layers {run} on {device}" for run, device in zip(runs, self.devices, strict=True))


def place(costs: Sequence[float], devices: Sequence[torch.device]) -> Placement:
    """Spread layers, given what each costs in order, so that the busiest device has as little as possible.

    Raises ConfigError where there are fewer layers than devices.
    """
    if len(costs) < len(devices):
        raise ConfigError(
            f"spec.model.gpus: {len(devices)}, but only {len(costs)} layers are needed: a layer is not split; "
            f"set spec.model.gpus to at most {len(costs)}",
            reason="CannotSpread",
        )
    return Placement(tuple(devices), _bounds(costs, len(devices)))


def _bounds(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Where each stage begins, and the end. best[i] is (the busiest stage, sum of squares, bounds) of the first i layers."""
    upto = [0.0, *accumulate(costs)]
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, (0,))] + [None] * len(costs)
    for _ in range(stages):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (len(costs) + 1)
        for end in range(1, len(costs) + 1):
            options = [
                (max(before[0], upto[end] - upto[start]), before[1] + (upto[end] - upto[start]) ** 2, (*before[2], end))
                for start, before in enumerate(best[:end])
                if before is not None
            ]
            following[end] = min(options, default=None)
        best = following
    found = best[-1]
    assert found is not None, "there are at least as many layers as stages"  # noqa: S101
    return found[2]


def layer_costs(layers: nn.ModuleList, config: Any) -> list[float]:
    """Multiplications a token in each layer's weights, those of experts by the share of them that a token sees."""
    share = expert_share(config)
    return [
        sum(
            parameter.numel() * (share if is_expert(name) else 1.0)
            for name, parameter in layer.named_parameters()
            if parameter.dim() > 1
        )
        for layer in layers
    ]


def expert_share(config: Any) -> float:
    """Of a mixture's experts, the share that one token goes through; 1 for a dense model."""
    total, used = (
        next((n for name in names if isinstance(n := getattr(config, name, None), int) and n > 0), 1)
        for names in (_EXPERTS_TOTAL, _EXPERTS_USED)
    )
    return min(1.0, used / total)


def is_expert(name: str) -> bool:
    """Whether the parameter of this name holds a mixture's experts."""
    return ".experts." in f".{name}"


def refuse_shared_weights(layers: nn.ModuleList, placement: Placement, model_name: str) -> None:
    """Raises ConfigError where layers of different devices own one weight together."""
    owners: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            first, _ = owners.setdefault(id(parameter), (index, name))
            if placement.stage_of(first) != placement.stage_of(index):
                raise ConfigError(
                    f"spec.model.gpus: {model_name} cannot be spread over {len(placement.devices)} GPUs: layers {first} and "
                    f"{index} share the weight {name}; set spec.model.gpus to 1",
                    reason="CannotSpread",
                )
