"""Which implementation Transformers calls for a hybrid's recurrent mixers: a kernel package, or its readable torch reference.

Transformers chooses once, at import, by whether the package is installed. Two things follow. A missing package only warns, so the
slow path must be found and reported. And an installed package is called for CPU tensors too, where it cannot run, so a process that
computes on the CPU must ask for the torch reference.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from headframe_worker.engine.fusion.install import is_installed

_SINGLE_TOKEN = ("update", "recurrent")  # decoding steps: never called in a forward without a cache
_CHEAP = ("conv1d",)  # a depthwise convolution costs a few per cent on torch, a recurrence a factor


# What `torch_reference` has replaced at present: (module, function name) to the function that stood there.
_replaced: dict[tuple[str, str], Any] = {}


@dataclass(frozen=True)
class _Choice:
    """A function of a modeling file that stands for a package's kernel or for its torch reference."""

    module: ModuleType
    name: str
    torch_function: FunctionType
    is_kernel: bool


def slow_path(stack: nn.Module) -> list[str]:
    """Names of the mixers in `stack` that run a recurrence on the torch reference, in order, with the missing function.

    A mixer with an installed fusion brings its own kernel and is not named; one on the CPU always runs the reference.
    """
    slow = []
    for name, module in stack.named_modules():
        if is_installed(module):
            continue
        choices = [c for c in _choices_of(module) if not any(part in c.name for part in (*_SINGLE_TOKEN, *_CHEAP))]
        on_cpu = all(p.device.type == "cpu" for p in module.parameters())
        slow += [f"{name} ({c.name})" for c in choices if on_cpu or not c.is_kernel]
    return slow


@contextmanager
def torch_reference(stack: nn.Module) -> Iterator[None]:
    """While the context is open, the mixers of `stack` compute with Transformers' torch reference on every device."""
    choices = {(c.module.__name__, c.name): c for m in stack.modules() for c in _choices_of(m) if c.is_kernel}
    for key, choice in choices.items():
        _replaced[key] = getattr(choice.module, choice.name)
        setattr(choice.module, choice.name, choice.torch_function)
    try:
        yield
    finally:
        for key, choice in choices.items():
            setattr(choice.module, choice.name, _replaced.pop(key))


def _choices_of(module: nn.Module) -> list[_Choice]:
    """The replaceable functions that the module's forward calls by name."""
    cls = type(module)
    home = sys.modules.get(cls.__module__)
    forward: Any = inspect.unwrap(cls.forward)
    if home is None or not isinstance(forward, FunctionType):
        return []
    choices = []
    for name in forward.__code__.co_names:
        key = (home.__name__, name)
        function = _replaced.get(key, getattr(home, name, None))
        if isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
            captured = inspect.getclosurevars(function).nonlocals
            if isinstance(torch_function := captured.get("torch_function"), FunctionType):
                is_kernel = key not in _replaced and captured.get("implementation") is not torch_function
                choices.append(_Choice(home, name, torch_function, is_kernel))
    return choices
