"""Matrix products: the fastest that this device does, and those of a model's forward, without all that lies between them.

No forward beats its own products without changing them, so they are what a forward is measured by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headframe_worker.bench.timing import median_seconds

_GPU_SIDE, _GPU_CALLS = 8192, 20
_CPU_SIDE, _CPU_CALLS = 2048, 1
_ONE_WEIGHT = ("mm", "addmm", "addmm_")
_EXPERTS = "_grouped_mm"


@dataclass(frozen=True)
class Product:
    """x [M, K] times the weight [K, N]; or, of experts, groups of x's rows times their own weight of [E, K, N]."""

    rows: int
    weight: Tensor
    offsets: Tensor | None = None
    """[E] where each expert's rows end."""

    @property
    def flops(self) -> float:
        """Additions and multiplications."""
        return 2.0 * self.rows * self.weight.shape[-2] * self.weight.shape[-1]


def ceiling(device: torch.device, dtype: torch.dtype, *, within_seconds: float = float("inf")) -> float:
    """FLOP/s of a square product of random numbers: what this device does at best."""
    side, calls = (_GPU_SIDE, _GPU_CALLS) if device.type == "cuda" else (_CPU_SIDE, _CPU_CALLS)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)

    def run() -> None:
        for _ in range(calls):
            torch.mm(left, right, out=out)

    return calls * 2 * side**3 / median_seconds(run, [device], within_seconds=within_seconds)


def record_products(forward: Callable[[], object]) -> list[Product]:
    """Every product with a weight that `forward` computes, in order. The weights are kept, not copied."""
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        forward()
    return recorder.products


def replay_seconds(products: Sequence[Product], *, repeats: int = 3, within_seconds: float = float("inf")) -> float:
    """How long the products alone take, one after the other where their weights are, on random inputs."""
    inputs = {_input_of(product): torch.Tensor() for product in products}
    for rows, columns, device, dtype in inputs:
        inputs[rows, columns, device, dtype] = torch.randn(rows, columns, device=device, dtype=dtype)

    def run() -> None:
        for product in products:
            left = inputs[_input_of(product)]
            if product.offsets is None:
                torch.mm(left, product.weight)
            else:
                torch._grouped_mm(left, product.weight, offs=product.offsets)  # noqa: SLF001  # there is no public name in torch 2.11

    with torch.inference_mode():
        return median_seconds(
            run,
            sorted({product.weight.device for product in products}, key=str),
            repeats=repeats,
            within_seconds=within_seconds,
        )


def _input_of(product: Product) -> tuple[int, int, torch.device, torch.dtype]:
    return product.rows, int(product.weight.shape[-2]), product.weight.device, product.weight.dtype


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in _ONE_WEIGHT:
            left, right = args[-2:]
            self.products.append(Product(left.shape[0], right))
        elif name == _EXPERTS and args[1].ndim == 3:
            offsets = args[2] if len(args) > 2 else options.get("offs")
            self.products.append(Product(args[0].shape[0], args[1], offsets))
        return func(*args, **options)
