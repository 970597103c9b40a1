"""The argument OUT of the commands that look at a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from headframe_api.spec import S3Spec
from headframe_worker.stores.base import Store
from headframe_worker.stores.open import open_store

Output = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="The dataset: a directory, file:///path or s3://bucket/prefix (an endpoint as AWS_ENDPOINT_URL).",
        show_default=False,
    ),
]
Scratch = Annotated[
    Path | None, typer.Option(help="Directory for temporary files; by default a new one that is removed again.")
]


@contextmanager
def open_output(uri: str) -> Iterator[Store]:
    """The store of OUT."""
    store = open_store(uri, S3Spec())
    try:
        yield store
    finally:
        store.close()
