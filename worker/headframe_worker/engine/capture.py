"""Hooks that take the residual stream where it is wanted, and nowhere else, while the stack runs.

Slot k of `layers` is the OUTPUT of decoder layer k (0-based), -1 what enters layer 0; `last` is the last layer's output
(preNorm) or what the final norm makes of it (postNorm).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headframe_api.errors import ConfigError
from headframe_worker.engine.spread import Ways
from headframe_worker.engine.structure import DecoderStack

Sink = Callable[[int, Tensor], None]
"""Takes (slot, states [B, L, H]) as soon as the slot's states exist; must not keep the tensor."""


class Capture:
    """A stack with its hooks in place. One forward at a time."""

    def __init__(
        self,
        stack: DecoderStack,
        *,
        layers: Sequence[int],
        last: Literal["preNorm", "postNorm", "none"],
        ways: Ways | None = None,
    ) -> None:
        """`ways`: how the stack is spread over several devices, where it is."""
        self.stack = stack
        self.ways = ways
        self.slots = len(layers) + (last != "none")
        self.hidden_size = stack.hidden_size
        self._sink: Sink | None = None
        self._post_norm_slot = len(layers) if last == "postNorm" else None
        wanted: dict[int, list[int]] = {}
        for slot, layer in enumerate(layers):
            wanted.setdefault(layer, []).append(slot)
        if last == "preNorm":
            wanted.setdefault(stack.num_layers - 1, []).append(len(layers))
        placement = None if ways is None else ways.placement
        self._elsewhere = frozenset(
            slot for slot, layer in enumerate(layers) if placement and placement.stage_of(layer) != placement.last_stage
        )
        self._hooks = [self._hook(layer, slots) for layer, slots in wanted.items()]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the stack computes: token ids go to the first."""
        return (self.stack.device,) if self.ways is None else self.ways.placement.devices

    @property
    def last_device(self) -> torch.device:
        """Where a batch's states come together."""
        return self.devices[-1]

    def is_last_stage(self, slot: int) -> bool:
        """Whether a slot's states arise where they come together."""
        return slot not in self._elsewhere

    @torch.inference_mode()
    def run(self, input_ids: Tensor, sink: Sink) -> None:
        """Run the stack on token ids [B, L] and hand each slot's states [B, L, H] to `sink`."""
        self._sink, self._shape = sink, (*input_ids.shape, self.hidden_size)
        try:
            output = self.stack.forward(input_ids)
            if self._post_norm_slot is not None:
                self._deliver((self._post_norm_slot,), output.last_hidden_state)
        finally:
            self._sink = None

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int, slots: Sequence[int]) -> Any:
        if layer < 0:
            return self.stack.layers[0].register_forward_pre_hook(
                lambda _module, args, options: self._deliver(slots, args[0] if args else options["hidden_states"]),
                with_kwargs=True,
            )

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._deliver(slots, output[0] if isinstance(output, tuple) else output)

        return self.stack.layers[layer].register_forward_hook(after)

    def _deliver(self, slots: Sequence[int], states: Tensor) -> None:
        if self._sink is None:
            return
        if tuple(states.shape) != self._shape:
            raise ConfigError(
                f"spec.model.source: {type(self.stack.model).__name__} has layers that give {tuple(states.shape)} for "
                f"{self._shape}: its residual stream is not one vector a token",
                reason="UnsupportedModel",
            )
        for slot in slots:
            self._sink(slot, states)
