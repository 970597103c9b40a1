"""`headframe extract` with one of the two mistakes that other extractors have made; `headframe verify --with-head` must see them.

    python benchmarks/mistaken_extract.py early|normed JOB --shard 0

early:   the last state is the output of the last decoder layer but one (an index read in another numbering).
normed:  the last state is the one after the final norm, stored as the one before it.
"""

import sys
from collections.abc import Sequence
from typing import Any

import headframe_worker.engine.engine as engine
from headframe_worker.cli.main import main
from headframe_worker.engine.capture import Capture
from headframe_worker.engine.structure import DecoderStack


class OneLayerEarly(Capture):
    """Takes the output of the last layer but one for that of the last."""

    def __init__(self, stack: DecoderStack, *, layers: Sequence[int], last: str, **options: Any) -> None:  # noqa: ARG002
        super().__init__(stack, layers=[*layers, stack.num_layers - 2], last="none", **options)


class AlreadyNormed(Capture):
    """Takes the state after the norm for the one before it."""

    def __init__(self, stack: DecoderStack, *, layers: Sequence[int], last: str, **options: Any) -> None:  # noqa: ARG002
        super().__init__(stack, layers=layers, last="postNorm", **options)


if __name__ == "__main__":
    mistake = {"early": OneLayerEarly, "normed": AlreadyNormed}[sys.argv.pop(1)]
    setattr(engine, "Capture", mistake)  # noqa: B010  (mypy would not have a class replaced)
    sys.argv.insert(1, "extract")
    main()
