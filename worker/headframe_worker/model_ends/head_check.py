"""Is the last state what the manifest says? Put through the model's final norm and head it must predict the next tokens.

A state of another layer or token, or one normed in another way, still makes logits. They are told from the model's own by
four signs, the losses read at the temperature that suits each best, so that a model that is merely too sure of itself is not blamed:

all have the length that the norm gives                the norm was taken already; or it was not, where they have not
another reading of the same bytes predicts better      the norm is another, or the token is a neighbour
logits that are of use only at another temperature      another layer or norm: a model's own are about right as they are
nothing is predicted beyond how often tokens occur      any of these, or a model that cannot read this text

How much the check can see depends on the model. So what it would have let pass is tried out on the same states, and noted: the
deepest layer that is kept in place of the last, and the other norm. `verify --deep`, which computes samples again, sees all.
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
from headframe_worker.model_ends.unit_states import share_after_norm
from headframe_worker.reader import Sample, StatesDataset

_TOKENS = 4096
_FEWEST_IN_A_SAMPLE = 3
_CHUNK_TOKENS = 128
_TEMPERATURES = (0.5, 0.6, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 3.0)
_TEMPERATURES_ROW = torch.tensor(_TEMPERATURES)
_CALIBRATED = (0.6, 1.5)
"""Beyond this a model that predicts the text poorly is suspect; SmolLM2's own is 1.25, one layer early 1.75."""
_BELIEVABLE = (0.6, 2.0)
"""Beyond this it is suspect however well it predicts: models tuned by reinforcement are too sure of themselves, but not so much."""
_PREDICTS, _PREDICTS_WELL = 0.9, 0.6
"""Of the loss by frequencies."""
_MARGIN_NATS = 0.05
_NORMED = 0.9
"""Of the tokens."""
_STANDARD_ERRORS = 4
_PLACE, _AS_STATED, _BEFORE, _AFTER = "last state", "as stated", "that of the token before", "that of the token after"
_AFTER_NORM, _BEFORE_NORM = "a state after the final norm", "a state before the final norm"


@dataclass
class HeadCheck:
    """What the head makes of the last states; losses are mean negative log-likelihoods in nats a token."""

    samples: int = 0
    tokens: int = 0
    loss: float = 0.0
    """Of the next token, as the manifest says the state is to be read."""
    correct: float = 0.0
    """Share of next tokens that are the most likely one."""
    temperature: float = 1.0
    """By which the logits would have to be divided to predict best; about 1 for a model's own logits."""
    best_loss: float = 0.0
    """At that temperature."""
    after_norm: float | None = None
    """Share of states that have the length which the final norm gives; None where it gives none."""
    frequency_loss: float = 0.0
    """Of predicting every token by how often it occurs in these samples."""
    other_readings: dict[str, float] = field(default_factory=dict)
    """Of the same states read in other ways, each at its own best temperature."""
    deepest_layer_loss: float | None = None
    """Of the deepest decoder layer that is kept, read as the last state, at its best temperature; None where none is kept."""
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What this check could not see."""


class _Logits:
    """Logits [T, V] and the logarithm of what normalizes them at each temperature, [T, temperatures]."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        largest = values.amax(1, keepdim=True)
        rest = values - largest
        sums = [torch.mul(rest, 1 / each).exp_().sum(1) for each in _TEMPERATURES]
        self.normalizers = torch.stack(sums, dim=1).log() + largest / _TEMPERATURES_ROW


class _Reading:
    """Losses of one reading, token by token and temperature by temperature."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    def add(self, logits: _Logits, wanted: Tensor) -> None:
        """The losses [T, temperatures] of wanting these tokens [T]."""
        chosen = logits.values.gather(1, wanted.unsqueeze(1))
        self._chunks.append(logits.normalizers - chosen / _TEMPERATURES_ROW)

    @property
    def losses(self) -> Tensor:
        """[N, temperatures]"""
        return torch.cat(self._chunks).double()

    @property
    def best(self) -> int:
        """Which temperature suits."""
        return int(self.losses.mean(0).argmin())

    @property
    def as_it_is(self) -> float:
        """Mean loss at temperature 1."""
        return float(self.losses[:, _TEMPERATURES.index(1.0)].mean())

    @property
    def at_best(self) -> Tensor:
        """[N]"""
        return self.losses[:, self.best]


def head_check(
    dataset: StatesDataset, ends: ModelEnds, *, seed: int = 0, on_tokens: Callable[[int], object] = lambda _: None
) -> HeadCheck:
    """Put about 4096 tokens' last states, of samples that the seed chooses, through norm and head; `on_tokens` hears of each sample.

    Raises ConfigError where no last state is kept.
    """
    manifest = dataset.manifest
    if manifest.states.last == "none" or ends.head is None:
        raise ConfigError("this dataset keeps no last state (spec.states.last: none): nothing to put through the head")
    chosen = _chosen(dataset, seed)
    if not chosen:
        raise ConfigError("this dataset has no sample of three tokens or more: nothing to predict")
    deepest = max(manifest.states.layers, default=-1)
    slot = manifest.states.layers.index(deepest) if deepest >= 0 else None
    reads = _reads(manifest, ends)
    readings = {name: _Reading() for name in (*reads, _BEFORE, _AFTER)}
    layer = _Reading()
    check, correct = HeadCheck(samples=len(chosen)), 0
    for sample in chosen:
        last = _last(sample)
        for first in range(0, len(sample.token_ids) - 2, _CHUNK_TOKENS):
            span = slice(first, min(first + _CHUNK_TOKENS, len(sample.token_ids) - 2))
            following = _shifted(sample, span, 1)
            for name, read in reads.items():
                logits = _Logits(ends.head.logits(read(last[span])))
                readings[name].add(logits, following)
                if name == _AS_STATED:
                    correct += int((logits.values.argmax(-1) == following).sum())
                    # Whose state is it? Late by one, it predicts the token that stands there; early by one, the next but one.
                    readings[_BEFORE].add(logits, sample.token_ids[span])
                    readings[_AFTER].add(logits, _shifted(sample, span, 2))
            if slot is not None:
                layer.add(_Logits(ends.head.logits(ends.normed(sample.hidden_states[span, slot]))), following)
            check.tokens += len(following)
        on_tokens(len(sample.token_ids))
    stated = readings.pop(_AS_STATED)
    check.loss = stated.as_it_is
    check.correct = correct / check.tokens
    check.after_norm = share_after_norm(torch.cat([_last(sample) for sample in chosen]), ends.normed)
    check.temperature = _TEMPERATURES[stated.best]
    check.best_loss = float(stated.at_best.mean())
    check.frequency_loss = _entropy(torch.cat([sample.token_ids for sample in chosen]))
    check.other_readings = {name: float(reading.at_best.mean()) for name, reading in readings.items()}
    if slot is not None:
        check.deepest_layer_loss = float(layer.at_best.mean())
        readings[f"layer {deepest}"] = layer
    check.faults = _misnormed(check, manifest.states.last) or _judged(check, stated, readings)
    if not check.faults:
        check.notes = _unseen(check, stated, readings)
    return check


def _misnormed(check: HeadCheck, last: str) -> list[Fault]:
    """The norm taken once too often or not at all, by the lengths of the states."""
    share = check.after_norm
    if share is None:
        return []
    if last == "preNorm" and share > _NORMED:
        found = f"{share:.0%} of them have the length that the norm gives: each is {_AFTER_NORM}"
    elif last == "postNorm" and share < 1 - _NORMED:
        found = f"only {share:.0%} of them have the length that the norm gives: each is {_BEFORE_NORM}"
    else:
        return []
    return [Fault(_PLACE, f"stored as {last}, but {found}")]


def _judged(check: HeadCheck, stated: _Reading, others: dict[str, _Reading]) -> list[Fault]:
    """What is wrong, in words: what is known first, else what is only suspect."""
    name, reading = min(others.items(), key=lambda item: float(item[1].at_best.mean()))
    gain, loss = stated.at_best - reading.at_best, float(reading.at_best.mean())
    better = float(gain.mean()) > max(_MARGIN_NATS, _STANDARD_ERRORS * float(gain.std()) / len(gain) ** 0.5)
    if better and loss < _PREDICTS * check.frequency_loss:
        return [
            Fault(
                _PLACE, f"read as {name} it predicts the next tokens better: {loss:.2f} nats, not {check.best_loss:.2f}"
            )
        ]
    problem = _suspicion(check.loss, check.temperature, check.frequency_loss)
    if problem is None:
        return []
    return [Fault(_PLACE, f"{problem}; headframe verify --deep computes samples again, and decides it")]


def _suspicion(loss: float, temperature: float, frequency_loss: float) -> str | None:
    """What is odd about states with this loss and best temperature."""
    if loss > frequency_loss:
        return (
            f"predicts the next tokens no better ({loss:.2f} nats) than how often they occur ({frequency_loss:.2f}): it is of "
            "another layer or token, or this model cannot read this text (random or hardly trained weights, another language)"
        )
    lowest, highest = _BELIEVABLE if loss < _PREDICTS_WELL * frequency_loss else _CALIBRATED
    if lowest <= temperature <= highest:
        return None
    return f"gives logits that predict best at temperature {temperature:g}, not near 1: another layer or another norm"


def _unseen(check: HeadCheck, stated: _Reading, others: dict[str, _Reading]) -> list[str]:
    """Mistakes that this check would have let pass, tried out on the states that are there."""
    notes = []
    for name, reading in others.items():
        if name in (_AFTER_NORM, _BEFORE_NORM) and check.after_norm is not None:
            continue  # the lengths would have shown it
        layer, neighbour = name.startswith("layer"), name in (_BEFORE, _AFTER)
        passes = _suspicion(reading.as_it_is, _TEMPERATURES[reading.best], check.frequency_loss) is None
        alike = float((reading.at_best - stated.at_best).mean()) < _MARGIN_NATS
        if passes and (layer or (alike and not neighbour)):
            notes.append(
                f"{name}{' in the place of the last' if layer else ''} would pass too: {reading.as_it_is:.2f} nats, as stated "
                f"{check.loss:.2f}. This check would not see that mistake on this model; --deep would"
            )
    return notes


def _reads(manifest: DatasetManifest, ends: ModelEnds) -> dict[str, Callable[[Tensor], Tensor]]:
    """From stored states to normed ones: as the manifest says, and as it might be mistaken."""
    if manifest.states.last == "postNorm":
        return {_AS_STATED: lambda states: states.to(ends.dtype), _BEFORE_NORM: ends.normed}
    reads: dict[str, Callable[[Tensor], Tensor]] = {
        _AS_STATED: ends.normed,
        _AFTER_NORM: lambda states: states.to(ends.dtype),
    }
    other = _other_gain(ends.norm, manifest.model.norm_gain)
    if other is not None:
        gain = "w" if manifest.model.norm_gain == "1+weight" else "1 + w"
        reads[f"normed with gain {gain}"] = ModelEnds(other, None, ends.dtype).normed
    return reads


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
        if length >= _FEWEST_IN_A_SAMPLE:
            chosen.append(position)
            tokens += length
    return [dataset[position] for position in chosen]


def _last(sample: Sample) -> Tensor:
    if sample.last is None:
        raise ConfigError("this dataset keeps no last state")
    return sample.last


def _shifted(sample: Sample, span: slice, by: int) -> Tensor:
    return sample.token_ids[span.start + by : span.stop + by]


def _entropy(tokens: Tensor) -> float:
    """Of the tokens' distribution, in nats, with Miller and Madow's correction for what a small sample leaves out."""
    _, counts = tokens.unique(return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * shares.log()).sum()) + (len(counts) - 1) / (2 * len(tokens))
