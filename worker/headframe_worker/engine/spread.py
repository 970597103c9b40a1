"""A forward that walks over the devices of a placement, without the host waiting for any of them.

Before each layer, what it is given is moved to its device: the residual stream once a stage, masks and rotary positions once a
stage and forward. The host only ever starts work, so while one device computes a batch's later layers, the one before it has the
next batch. Copies run on streams of their own: a device that sends does not wait until the other has time, as it would in
PyTorch's own copies between devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from headframe_api.errors import ConfigError
from headframe_worker.engine.placement import Placement
from headframe_worker.engine.structure import DecoderStack


class Ways:
    """Copies from one stage's device to another's, in order with the work on both."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        devices = {device for device in placement.devices if device.type == "cuda"}
        self._leaving = {device: torch.cuda.Stream(device) for device in devices}
        self._arriving = {device: torch.cuda.Stream(device) for device in devices}

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy on `device`, ready for work on its current stream; also where the tensor lies there already."""
        if tensor.device.type != "cuda" or device.type != "cuda":
            return torch.empty_like(tensor, device=device).copy_(tensor)
        leaving, arriving = self._leaving[tensor.device], self._arriving[device]
        made = torch.cuda.current_stream(tensor.device).record_event()
        leaving.wait_event(made)
        arriving.wait_event(made)
        with torch.cuda.stream(leaving), torch.cuda.stream(arriving):
            moved = torch.empty_like(tensor, device=device)
            moved.copy_(tensor, non_blocking=True)
        target = torch.cuda.current_stream(device)
        target.wait_stream(arriving)
        # Both may be freed by the host before the devices get to the copy.
        tensor.record_stream(leaving if tensor.device != device else arriving)
        moved.record_stream(target)
        return moved

    def to_last(self, tensor: Tensor) -> Tensor:
        """A copy on the device where a batch's states come together."""
        return self.copy(tensor, self.placement.devices[-1])


def spread(stack: DecoderStack, placement: Placement) -> Ways:
    """Let a stack whose layers lie as `placement` says run over its devices. Its output then lies on the last of them.

    Modules that are called after the layers, such as the final norm, are moved to the last device. Raises ConfigError for a
    model that computes with several layers' tensors outside of them.
    """
    ways = Ways(placement)
    moved = _Moved(ways)
    for index, layer in enumerate(stack.layers):
        stage = placement.stage_of(index)
        if stage > 0:
            moved.attach(layer, stage, is_first=index == placement.layers(stage).start)
    stack.model.register_forward_hook(lambda *_: moved.forget(), always_call=True)
    for module in _move_what_follows(stack, placement):
        moved.attach(module, placement.last_stage, is_first=False)
    return ways


class _Moved:
    """What was moved in the forward at work, and the device that was the current one around each call."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self._by_source: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._devices: list[int] = []

    def attach(self, module: nn.Module, stage: int, *, is_first: bool) -> None:
        """Let a module compute on its stage's device, and move what it is given there."""
        device = self._ways.placement.devices[stage]

        def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if device.type == "cuda":
                # Kernels that ask for the current device must find this one.
                self._devices.append(torch.cuda.current_device())
                torch.cuda.set_device(device)
            return tree_map_only(Tensor, lambda tensor: self._move(tensor, stage, is_first=is_first), (args, kwargs))

        def leave(*_: Any) -> None:
            if device.type == "cuda":
                torch.cuda.set_device(self._devices.pop())

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, always_call=True)

    def forget(self) -> None:
        """The forward is over."""
        self._by_source.clear()

    def _move(self, tensor: Tensor, stage: int, *, is_first: bool) -> Tensor:
        """Two stages may share a device, as in tests: then too, all that crosses into a stage is copied."""
        devices = self._ways.placement.devices
        known = self._by_source.get((id(tensor), stage))
        if known is not None:
            return known[1]
        if tensor.device not in devices or (tensor.device == devices[stage] and not is_first):
            return tensor
        moved = self._ways.copy(tensor, devices[stage])
        self._by_source[id(tensor), stage] = (tensor, moved)  # the source is kept, so that its id stays its own
        return moved


def _move_what_follows(stack: DecoderStack, placement: Placement) -> list[nn.Module]:
    """Run two tokens through the stack and move what is called after the layers to the last device."""
    reached: list[str] = ["the embeddings"]
    early: set[nn.Module] = set()
    late: list[nn.Module] = []
    names = {module: name for name, module in stack.model.named_modules()}
    last_layer = stack.layers[-1]

    def note(module: nn.Module, _args: Any) -> None:
        if names[last_layer] not in reached:
            early.add(module)
        elif module not in early and module not in late:
            module.to(placement.devices[-1])
            late.append(module)
        reached.append(names[module])

    watched = [child for child in stack.model.children() if stack.layers not in child.modules()]
    hooks = [module.register_forward_pre_hook(note) for module in (*watched, *stack.layers)]
    try:
        with torch.inference_mode():
            stack.forward(torch.zeros((1, 2), dtype=torch.int64, device=placement.devices[0]))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"spec.model.gpus: {type(stack.model).__name__} cannot be spread over {len(placement.devices)} GPUs "
            f"({placement}): it fails after {reached[-1]}: {str(error).strip().splitlines()[0]}; set spec.model.gpus to 1",
            reason="CannotSpread",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return late
