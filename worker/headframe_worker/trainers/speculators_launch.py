"""From a dataset to the command that trains on it with speculators, with every number that the dataset knows filled in."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from headframe_api.errors import ConfigError
from headframe_worker.exporters.samples import SourceDataset
from headframe_worker.exporters.speculators import need_representable, write_tokens_directory
from headframe_worker.stores.local import LocalStore
from headframe_worker.trainers.numbers import trainer_numbers

_MODULE = "headframe_worker.trainers.speculators_train"
_SUPPORTED = "0.9.0"


def need_speculators() -> None:
    """Raise ConfigError where speculators is not installed beside headframe."""
    if importlib.util.find_spec("speculators") is None:
        raise ConfigError(
            f"speculators is not installed beside headframe: pip install speculators=={_SUPPORTED} (it wants transformers 5.19 or older)",
            reason="MissingPackage",
        )


def speculators_command(source: SourceDataset, work: Path, arguments: Sequence[str], *, processes: int) -> list[str]:
    """Make `work` a `--data-path` (tokens and their frequencies, no states), and return the command that trains.

    The user's arguments win over what is filled in. Raises ConfigError where speculators cannot use the dataset.
    """
    need_representable(source.plan.states)
    write_tokens_directory(source, LocalStore(work))
    known = {
        "--data-path": [str(work)],
        "--hidden-states-backend": ["headframe"],
        "--headframe-dataset": [source.store.uri],
        **{flag: value.split() for flag, value in trainer_numbers(source.manifest, "speculators").settings.items()},
    }
    given = {argument.partition("=")[0] for argument in arguments}
    filled = [word for flag, values in known.items() if flag not in given for word in (flag, *values)]
    runner = (
        [sys.executable, "-m", _MODULE]
        if processes == 1
        else [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            "-m",
            _MODULE,
        ]
    )
    return [*runner, *filled, *arguments]
