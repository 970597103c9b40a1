"""speculators' trainer with the backend `headframe`: `python -m`, or `torchrun --nproc-per-node 8 -m`, this module.

Its arguments are those of `speculators train`.
"""

from __future__ import annotations

import sys

import headframe_worker.trainers.speculators_backend  # noqa: F401  (registers the backend before the command line is built)
from headframe_api.errors import HeadframeError
from headframe_worker.cli.console import print_error


def main() -> None:
    """Run the training that the arguments describe."""
    from speculators.train.cli import main as train  # noqa: PLC0415
    from speculators.train.config import TrainConfig  # noqa: PLC0415

    try:
        train(TrainConfig.resolve())
    except HeadframeError as error:
        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
