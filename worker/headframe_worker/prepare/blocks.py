"""Reading the dataset's files as blocks of raw rows: small enough to bound memory, large enough to keep a worker busy.

Rows are not parsed here: this runs in one process, while the parsing is shared among all of them.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headframe_api.errors import ConfigError
from headframe_worker.prepare.samples import Columns
from headframe_worker.prepare.sources import DataFile, DataSource
from headframe_worker.stores.local import LocalStore

MAX_ROW_BYTES = 32 << 20
"""A longer line is refused unread: no sample is so long, and reading it could take all memory."""
_BLOCK_BYTES = 512 << 10
_BLOCK_ROWS = 1024
_READ_BYTES = 1 << 20
_OUR_COLUMNS = ("id", "messages", "tools", "prompt", "completion", "text", "input_ids", "loss_mask")


@dataclass(frozen=True)
class Block:
    """Rows that lie together in one file: either JSON texts or an Arrow table."""

    file: str
    numbers: list[int]
    """Where each row stands: lines count from 1, rows of tables and of JSON arrays from 0."""
    lines: list[bytes | None] | None = None
    """One JSON text a row; None for one longer than MAX_ROW_BYTES."""
    table: bytes | None = None
    """The same rows as an Arrow IPC stream."""

    def head(self, rows: int) -> Block:
        """The first rows alone."""
        if self.table is not None:
            table = pa.ipc.open_stream(self.table).read_all().slice(0, rows)
            return Block(self.file, self.numbers[:rows], table=_stream(table))
        return Block(self.file, self.numbers[:rows], self.lines[:rows] if self.lines else None)


def read_blocks(source: DataSource, columns: Columns, *, scratch: Path, limit: int | None) -> Iterator[Block]:
    """All rows in order, at most `limit`. Raises ConfigError that names a file which is broken as a whole."""
    remaining = limit
    for block in _all_blocks(source, columns, scratch):
        if remaining is not None and len(block.numbers) >= remaining:
            yield block.head(remaining)
            return
        yield block
        remaining = None if remaining is None else remaining - len(block.numbers)


def _all_blocks(source: DataSource, columns: Columns, scratch: Path) -> Iterator[Block]:
    if source.hub is not None:
        batches = source.hub.with_format("arrow").iter(batch_size=_BLOCK_ROWS)
        yield from _table_blocks(source.name, batches, columns)
    for file in source.files:
        path = file.store.fetch(file.key, scratch)
        try:
            with _broken_file(source, file):
                yield from _file_blocks(file, path, columns)
        finally:
            if not isinstance(file.store, LocalStore):  # there it is the user's own file
                path.unlink(missing_ok=True)


@contextmanager
def _broken_file(source: DataSource, file: DataFile) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"spec.dataset.source: {file.name} of {source.name} cannot be read: {str(error).splitlines()[0]}; "
            f"mend the file or take it out of the dataset",
            reason="BrokenFile",
        ) from error


def _file_blocks(file: DataFile, path: Path, columns: Columns) -> Iterator[Block]:
    if file.key.endswith(".parquet"):
        with pq.ParquetFile(path) as parquet:
            wanted = _wanted(parquet.schema_arrow.names, columns)
            yield from _table_blocks(file.name, parquet.iter_batches(_BLOCK_ROWS, columns=wanted), columns)
    elif file.key.endswith(".arrow"):
        with pa.OSFile(str(path)) as data:
            yield from _table_blocks(file.name, _arrow_batches(data), columns)
    else:
        compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix if path.suffix else "")
        with pa.input_stream(str(path), compression=compression) as data:
            if file.key.endswith(".json"):
                yield from _json_blocks(file.name, data.read)
            else:
                yield from _line_blocks(file.name, enumerate(_lines(data.read), 1))


def _arrow_batches(data: Any) -> Iterator[pa.RecordBatch]:
    """Both of Arrow's file formats: streams, as `datasets` writes them, and files with a footer."""
    try:
        reader = pa.ipc.open_stream(data)
    except pa.ArrowInvalid:
        data.seek(0)
        reader = pa.ipc.open_file(data)
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        return
    yield from reader


def _wanted(names: list[str], columns: Columns) -> list[str]:
    """The columns that can matter; all of them where none does, so that an error can list them."""
    ours = {columns.name(column) for column in _OUR_COLUMNS} | {"conversations"}
    return [name for name in names if name in ours] or names


def _table_blocks(name: str, batches: Iterable[Any], columns: Columns) -> Iterator[Block]:
    first = 0
    for batch in batches:
        chosen = batch.select(_wanted(batch.schema.names, columns))
        rows = max(1, min(_BLOCK_ROWS, len(chosen) * _BLOCK_BYTES // max(1, chosen.nbytes)))
        for start in range(0, len(chosen), rows):
            part = chosen.slice(start, rows)
            yield Block(name, list(range(first + start, first + start + len(part))), table=_stream(part))
        first += len(chosen)


def _stream(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return bytes(sink.getvalue())


def _line_blocks(name: str, numbered: Iterable[tuple[int, bytes | None]]) -> Iterator[Block]:
    """Blank lines are no rows."""
    numbers: list[int] = []
    lines: list[bytes | None] = []
    size = 0
    for number, line in numbered:
        if line is not None and not line.strip():
            continue
        numbers.append(number)
        lines.append(line)
        size += len(line or b"")
        if size >= _BLOCK_BYTES or len(lines) >= _BLOCK_ROWS:
            yield Block(name, numbers, lines)
            numbers, lines, size = [], [], 0
    if lines:
        yield Block(name, numbers, lines)


def _lines(read: Callable[[int], bytes]) -> Iterator[bytes | None]:
    """The lines of a byte stream without their ends; None for one that is too long. A BOM is no part of the first."""
    rest, too_long, first = b"", False, True
    while chunk := read(_READ_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield (
                None if too_long or len(line) > MAX_ROW_BYTES else line.removeprefix(codecs.BOM_UTF8) if first else line
            )
            too_long = first = False
        if len(rest) > MAX_ROW_BYTES:
            rest, too_long = b"", True
    if rest or too_long:
        yield None if too_long else rest.removeprefix(codecs.BOM_UTF8) if first else rest


def _json_blocks(name: str, read: Callable[[int], bytes]) -> Iterator[Block]:
    """A .json file: an array of rows, or rows one after the other, each of which may span lines."""
    return _line_blocks(
        name, ((number, row.encode("utf-8", "surrogatepass")) for number, row in enumerate(_json_rows(read)))
    )


def _json_rows(read: Callable[[int], bytes]) -> Iterator[str]:
    """The text of each row, read bit by bit: the file may be larger than memory."""
    scanner = _Scanner(read)
    in_array = scanner.skip("[")
    while not scanner.at_end():
        if in_array and scanner.skip("]"):
            if not scanner.at_end():
                raise ValueError("text after the end of the array")
            return
        yield scanner.value()
        if in_array and not scanner.skip(",") and scanner.peek() != "]":
            raise ValueError("a comma is missing between two rows of the array")
    if in_array:
        raise ValueError("the array does not end")


class _Scanner:
    """A window on JSON text that grows as it is read and is cut behind what was taken."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._position = 0
        self._done = False

    def _more(self) -> bool:
        if self._done:
            return False
        chunk = self._read(_READ_BYTES)
        self._done = not chunk
        self._text = self._text[self._position :] + self._decoder.decode(chunk, final=self._done)
        self._position = 0
        return True

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            while self._position < len(self._text):
                if not self._text[self._position].isspace():
                    return self._text[self._position]
                self._position += 1
            if not self._more():
                return ""

    def at_end(self) -> bool:
        return self.peek() == ""

    def skip(self, character: str) -> bool:
        """Take this character if it is the next."""
        if self.peek() != character:
            return False
        self._position += 1
        return True

    def value(self) -> str:
        """The text of the next JSON value. Raises ValueError where there is none."""
        self.peek()
        while True:
            try:
                _, end = self._json.raw_decode(self._text, self._position)
            except (ValueError, RecursionError) as error:
                if self._done or len(self._text) - self._position > MAX_ROW_BYTES or not self._more():
                    raise ValueError(f"not valid JSON: {error}") from error
                continue
            if end == len(self._text) and self._more():
                continue  # a number may go on
            text = self._text[self._position : end]
            self._position = end
            return text
