"""A GGUF file's description is read once, however often Transformers asks for it.

gguf makes several objects of every token in the vocabulary, seconds of work and a hundred megabytes, and Transformers reads
the file anew for the configuration, the tokenizer and the weights; of the weights' names it makes a map for every submodule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any


@contextmanager
def gguf_read_once(gguf_file: str | None) -> Iterator[None]:
    """Within it every file is read once, and kept until it ends; one within another shares what the outer one has read.

    `gguf_file`: the checkpoint's, as Transformers takes it; None for other kinds, for which nothing is done.
    """
    if gguf_file is None:
        yield
        return
    import gguf  # noqa: PLC0415  # only those who need it wait for it

    read, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    if not isinstance(read, type):
        yield
        return

    @cache
    def kept(path: Path, _changed_nanoseconds: int) -> Any:
        return read(path)

    module: Any = gguf
    module.GGUFReader = lambda path, *_mode: kept(Path(path), Path(path).stat().st_mtime_ns)
    module.get_tensor_name_map = cache(name_map)
    try:
        yield
    finally:
        module.GGUFReader, module.get_tensor_name_map = read, name_map
