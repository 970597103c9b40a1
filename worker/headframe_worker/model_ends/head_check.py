"""Is the last state what the manifest says? Put through the model's final norm and head it must predict the next tokens.

A state of another layer, of another token, or normed in another way still makes logits, but they are not the model's:
they predict the text worse than other readings of the same state, hardly better than its token frequencies, or are far
too sure of themselves. Each of the three is a fault. On SmolLM2 (135M, chats): right 3.2 nats a token at temperature 1.1;
one layer early 6.4 at 1.75; gain 1 + w for w 6.0 at 2.0; token frequencies alone 5.9.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headframe_api.errors import ConfigError
from headframe_api.manifests import DatasetManifest
from headframe_worker.finalize.fault import Fault
from headframe_worker.model_ends.ends import ModelEnds
from headframe_worker.reader import Sample, StatesDataset

_TOKENS = 4096
_CHUNK_TOKENS = 128
_TEMPERATURES = (0.5, 0.6, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 3.0)
_CALIBRATED = (0.6, 1.5)
_MARGIN_NATS = 0.1
_PLACE, _AS_STATED = "last state", "as stated"


@dataclass
class HeadCheck:
    """What the head makes of the last states."""

    samples: int = 0
    tokens: int = 0
    loss: float = 0.0
    """Mean negative log-likelihood of the next token, in nats, as the manifest says the state is to be read."""
    correct: float = 0.0
    """Share of next tokens that are the most likely one."""
    temperature: float = 1.0
    """By which the logits would have to be divided to predict best; about 1 for a model's own logits."""
    frequency_loss: float = 0.0
    """Loss of predicting every token by how often it occurs in these samples."""
    other_readings: dict[str, float] = field(default_factory=dict)
    """Loss of the same state read in other ways."""

    @property
    def faults(self) -> list[Fault]:
        """What is wrong, in words."""
        found = [
            Fault(_PLACE, f"read as {name} it predicts the next tokens better: {loss:.2f} nats, not {self.loss:.2f}")
            for name, loss in self.other_readings.items()
            if loss < self.loss - _MARGIN_NATS
        ]
        if self.loss > self.frequency_loss:
            found.append(
                Fault(
                    _PLACE,
                    f"predicts the next tokens no better ({self.loss:.2f} nats) than how often they occur "
                    f"({self.frequency_loss:.2f}): another layer, another token, or text that this model cannot read",
                )
            )
        elif not _CALIBRATED[0] <= self.temperature <= _CALIBRATED[1]:
            found.append(
                Fault(
                    _PLACE,
                    f"gives logits that would predict best at temperature {self.temperature:g}, not near 1: another layer "
                    "or another norm",
                )
            )
        return found


def head_check(
    dataset: StatesDataset, ends: ModelEnds, *, seed: int = 0, on_tokens: Callable[[int], object] = lambda _: None
) -> HeadCheck:
    """Put about 4096 tokens' last states, of samples that the seed chooses, through norm and head; `on_tokens` hears of each sample.

    Raises ConfigError where no last state is kept.
    """
    manifest = dataset.manifest
    if manifest.states.last == "none" or ends.head is None:
        raise ConfigError("this dataset keeps no last state (spec.states.last: none): nothing to put through the head")
    check, readings = HeadCheck(), _readings(manifest, ends)
    losses = dict.fromkeys(readings, 0.0)
    by_temperature = dict.fromkeys(_TEMPERATURES, 0.0)
    seen: list[Tensor] = []
    correct = 0
    for sample in _chosen(dataset, seed):
        states, following = _last(sample)[:-1], sample.token_ids[1:]
        for chunk in range(0, len(following), _CHUNK_TOKENS):
            span = slice(chunk, chunk + _CHUNK_TOKENS)
            for name, read in readings.items():
                logits = ends.head.logits(read(states[span]))
                losses[name] += _loss(logits, following[span])
                if name == _AS_STATED:
                    correct += int((logits.argmax(-1) == following[span]).sum())
                    for temperature in _TEMPERATURES:
                        by_temperature[temperature] += _loss(logits / temperature, following[span])
        seen.append(sample.token_ids)
        check.samples += 1
        check.tokens += len(following)
        on_tokens(len(following))
    if not check.tokens:
        raise ConfigError("this dataset has no sample of two tokens or more: nothing to predict")
    check.loss = losses.pop(_AS_STATED) / check.tokens
    check.correct = correct / check.tokens
    check.temperature = min(by_temperature, key=by_temperature.__getitem__)
    check.frequency_loss = _entropy(torch.cat(seen))
    check.other_readings = {name: loss / check.tokens for name, loss in losses.items()}
    return check


def _readings(manifest: DatasetManifest, ends: ModelEnds) -> dict[str, Callable[[Tensor], Tensor]]:
    """From stored states to normed ones: as the manifest says, and as it might be mistaken."""
    if manifest.states.last == "postNorm":
        return {_AS_STATED: lambda states: states.to(ends.dtype), "a state before the final norm": ends.normed}
    readings: dict[str, Callable[[Tensor], Tensor]] = {
        _AS_STATED: ends.normed,
        "a state after the final norm": lambda states: states.to(ends.dtype),
    }
    other = _other_gain(ends.norm, manifest.model.norm_gain)
    if other is not None:
        gain = "w" if manifest.model.norm_gain == "1+weight" else "1 + w"
        readings[f"normed with gain {gain}"] = ModelEnds(other, None, ends.dtype).normed
    return readings


def _other_gain(norm: nn.Module, gain: str) -> nn.Module | None:
    weight = getattr(norm, "weight", None)
    if gain == "none" or not isinstance(weight, Tensor):
        return None
    other = copy.deepcopy(norm)
    other.get_parameter("weight").data += 1 if gain == "weight" else -1
    return other


def _chosen(dataset: StatesDataset, seed: int) -> list[Sample]:
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen, tokens = [], 0
    for position in order:
        if tokens >= _TOKENS:
            break
        length = int(dataset.lengths[position])
        if length > 1:
            chosen.append(position)
            tokens += length
    return [dataset[position] for position in chosen]


def _last(sample: Sample) -> Tensor:
    if sample.last is None:
        raise ConfigError("this dataset keeps no last state")
    return sample.last


def _loss(logits: Tensor, following: Tensor) -> float:
    return float(nn.functional.cross_entropy(logits, following, reduction="sum"))


def _entropy(tokens: Tensor) -> float:
    _, counts = tokens.unique(return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * shares.log()).sum())
