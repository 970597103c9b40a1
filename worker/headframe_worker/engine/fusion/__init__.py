"""Fused parts for a loaded Transformers decoder stack: by structure, each checked on the loaded weights before it is used.

    report = apply_fusions(stack, device=device)      # in place; report.applied, report.skipped
    slow_path(stack)                                  # mixers that run a recurrence on the torch reference
    with nothing_packed(): ...                        # forwards without the host sync of Transformers' packing check
    with torch_reference(stack): ...                  # on the CPU, where installed kernel packages cannot run

`apply` walks the layers and chooses; `attention`, `delta_net`, `mlp` and `layer` each recognise one structure and hold its fused
forward; `operations` picks each operation's Triton kernel (`kernels`) or its plain meaning (`twins`); `verify` is the check.
"""

from headframe_worker.engine.fusion.apply import FUSIONS, FusionReport, apply_fusions, remove_fusions
from headframe_worker.engine.fusion.masks import nothing_packed
from headframe_worker.engine.fusion.reference import slow_path, torch_reference

__all__ = [
    "FUSIONS",
    "FusionReport",
    "apply_fusions",
    "nothing_packed",
    "remove_fusions",
    "slow_path",
    "torch_reference",
]
