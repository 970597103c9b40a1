"""`headframe verify --deep`: some samples computed again the plain way, and compared slot by slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
import torch

from headframe_api.errors import ConfigError
from headframe_api.job import ExtractionJob
from headframe_api.names import part_key
from headframe_api.plan import Plan
from headframe_api.spec import StateDtype
from headframe_worker.finalize.fault import Fault
from headframe_worker.finalize.plain_states import PlainStates
from headframe_worker.model_source import locate_model
from headframe_worker.reader.dataset import StatesDataset
from headframe_worker.reader.sample import Sample

COMPUTING: dict[str, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""What two correct orders of computation may differ by, as mean over tokens of the relative L2 error, by model dtype."""
STORING: dict[StateDtype, float] = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}
"""What rounding to the stored dtype may add."""
_SMALLEST_SHARE = 0.01
_FEWEST = 8


@dataclass(frozen=True)
class DeepCheck:
    """How far the stored states are from plain Transformers."""

    faults: list[Fault]
    samples: int
    tolerance: float
    worst: dict[str, float]
    """Largest error of each slot over the samples: mean over tokens of the relative L2 error."""


def deep_check(
    plan: Plan,
    job: ExtractionJob,
    uri: str,
    *,
    scratch: Path,
    seed: int,
    on_size: Callable[[int], object],
    on_sample: Callable[[], object],
) -> DeepCheck:
    """Compute 1 % of the samples (8 or more, chosen by seed) again by plain Transformers and compare them.

    Runs on a GPU where there is one. Raises ConfigError where the model cannot be had or is another one by now.
    """
    spec = job.spec.model.model_copy(
        update={"revision": plan.model.revision} if job.spec.model.revision is not None else {}
    )
    files = locate_model(spec, job.spec.s3, scratch=scratch, weights=True)
    if files.revision != plan.model.revision:
        raise ConfigError(
            f"{spec.source}: is {files.revision} now, the states are of {plan.model.revision}: nothing to compare with",
            reason="ModelChanged",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain = PlainStates(plan, files, attention=spec.attention, device=device)
    dataset = StatesDataset(uri, job.spec.s3, dtype=torch.float32)
    chosen = _choose(len(dataset), seed)
    on_size(len(chosen))
    tolerance = COMPUTING[plan.model.dtype] + STORING[plan.states.dtype]
    worst, faults = dict.fromkeys(dataset.slot_names, 0.0), list[Fault]()
    for item in chosen:
        sample = dataset[item]
        errors = slot_errors(sample, plain.states(sample.token_ids))
        place = part_key(int(dataset.index.shards[item]), int(dataset.index.parts[item]))
        for name, error in zip(dataset.slot_names, errors, strict=True):
            worst[name] = max(worst[name], error)
            if not error <= tolerance:
                faults.append(
                    Fault(
                        f"{place} row {sample.row}",
                        f"{name} differs from plain Transformers by {error:.2g} (relative L2, mean over tokens); allowed {tolerance:.2g}",
                    )
                )
        on_sample()
    return DeepCheck(faults, len(chosen), tolerance, worst)


def slot_errors(sample: Sample, plain: torch.Tensor) -> list[float]:
    """Per slot the mean over tokens of the relative L2 error; a mean, as a few huge tokens would hide all others in one norm."""
    stored = sample.hidden_states if sample.last is None else torch.cat([sample.hidden_states, sample.last[:, None]], 1)
    difference = torch.linalg.vector_norm(stored - plain, dim=-1)
    norms = torch.linalg.vector_norm(plain, dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return [float(error) for error in (difference / norms).mean(0)]


def _choose(samples: int, seed: int) -> list[int]:
    count = min(samples, max(_FEWEST, ceil(samples * _SMALLEST_SHARE)))
    return sorted(int(item) for item in np.random.default_rng(seed).choice(samples, count, replace=False))
