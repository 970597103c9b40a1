"""One export: parts in, files out; resumable part by part, and shared among processes that know nothing of each other.

`headframe-export/` beside the files says what they are (`export.json`), which parts are done (one marker a part, written
after its files), and that all are (`done.json`). A trainer's reader never looks there.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from headframe_api.errors import ConfigError
from headframe_api.manifests import PartEntry
from headframe_worker.exporters.samples import Sample, SourceDataset, SourcePart
from headframe_worker.stores.base import Store
from headframe_worker.stores.missing import MissingObjectError

_FOLDER = "headframe-export/"
_DESCRIPTION_KEY, _DONE_KEY = f"{_FOLDER}export.json", f"{_FOLDER}done.json"
_THREADS = 8

Advance = Callable[[int, int, int], None]
"""Called with (samples, tokens, bytes) as they are written."""


@dataclass(frozen=True)
class PartDone:
    """What an exporter made of one part; kept as its marker."""

    rows: list[int]
    """Rows that were written."""
    left_out: list[int]
    """Rows that the trainer's own reader would refuse."""
    bytes: int
    records: list[list[int]]
    """What `finish` needs of each written row, in the order of `rows`; empty for most exporters."""


class Exporter(Protocol):
    """One trainer's format. The constructor refuses, by ConfigError, what the format cannot hold."""

    @property
    def options(self) -> dict[str, Any]:
        """What decides the files' content: another run into the same place must have the same."""
        ...

    def export_part(self, part: SourcePart, target: Store, threads: ThreadPoolExecutor, advance: Advance) -> PartDone:
        """Write one part's samples."""
        ...

    def finish(self, source: SourceDataset, target: Store, done: Iterator[tuple[SourceKey, PartDone]]) -> None:
        """Write what needs all parts. May run twice."""
        ...


SourceKey = tuple[int, int]
"""(shard, part)"""


@dataclass(frozen=True)
class Exported:
    """What an export has made so far, by all processes."""

    samples: int
    tokens: int
    bytes: int
    left_out: int
    parts_missing: int
    """Parts that other processes still have to do; 0: the export is whole."""


def export(
    source: SourceDataset, target: Store, exporter: Exporter, *, share: tuple[int, int] = (0, 1), advance: Advance
) -> Exported:
    """Export this process's share (i of n) of a dataset's parts; whoever finds all parts done finishes the export.

    Raises ConfigError where the target holds another export.
    """
    _claim(source, target, exporter)
    index, count = share
    entries = list(source.part_entries())
    done = {info.key for info in target.list(_FOLDER)}
    own = [entry for number, entry in enumerate(entries) if number % count == index]
    todo = [entry for entry in own if _marker_key(*_key(entry)) not in done]
    for _, entry in (entry for entry in own if entry not in todo):
        advance(entry.samples, entry.tokens, 0)
    with TemporaryDirectory(prefix="headframe-export-") as scratch, ThreadPoolExecutor(_THREADS) as threads:
        for part in source.parts(todo, Path(scratch)):
            made = exporter.export_part(part, target, threads, advance)
            _write_json(target, _marker_key(part.shard, part.part), vars(made))
    return _finish(source, target, exporter, entries)


def describe(target: Store) -> dict[str, Any] | None:
    """What an export says of itself; None where there is none."""
    try:
        return dict(json.loads(target.read(_DESCRIPTION_KEY)))
    except MissingObjectError:
        return None


def _claim(source: SourceDataset, target: Store, exporter: Exporter) -> None:
    mine = {"plan": source.manifest.plan, "samples_digest": source.manifest.samples_digest, **exporter.options}
    found = describe(target)
    if found is None:
        target.check_writable()
        _write_json(target, _DESCRIPTION_KEY, mine)
    elif found != mine:
        differing = sorted(key for key in {*found, *mine} if found.get(key) != mine.get(key))
        raise ConfigError(
            f"{target.uri}: holds another export ({', '.join(f'{key}: {found.get(key)}' for key in differing)}; now "
            f"{', '.join(f'{key}: {mine.get(key)}' for key in differing)}); name an empty place, or the same options",
            reason="OtherExport",
        )


def _finish(
    source: SourceDataset, target: Store, exporter: Exporter, entries: Sequence[tuple[int, PartEntry]]
) -> Exported:
    present = {info.key for info in target.list(_FOLDER)}
    keys = [_key(entry) for entry in entries]
    missing = sum(_marker_key(*key) not in present for key in keys)
    made = [(key, _read_marker(target, key)) for key in keys if _marker_key(*key) in present]
    total = Exported(
        samples=sum(len(done.rows) for _, done in made),
        tokens=sum(entry.tokens for entry in (entry for _, entry in entries)),
        bytes=sum(done.bytes for _, done in made),
        left_out=sum(len(done.left_out) for _, done in made),
        parts_missing=missing,
    )
    if not missing and _DONE_KEY not in present:
        exporter.finish(source, target, iter(made))
        left_out = [row for _, done in made for row in done.left_out]
        _write_json(target, _DONE_KEY, {**vars(total), "left_out": sorted(left_out)})
    return total


def _key(entry: tuple[int, PartEntry]) -> SourceKey:
    return entry[0], entry[1].part


def _marker_key(shard: int, part: int) -> str:
    return f"{_FOLDER}shard-{shard:05d}/part-{part:05d}.json"


def _read_marker(target: Store, key: SourceKey) -> PartDone:
    return PartDone(**json.loads(target.read(_marker_key(*key))))


def _write_json(target: Store, key: str, value: dict[str, Any]) -> None:
    target.write(key, [memoryview(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())])


class FilePerSample:
    """The exporters that write one file a sample share this; subclasses say its name and its content."""

    def key(self, row: int) -> str:
        """The object's key."""
        raise NotImplementedError

    def content(self, sample: Sample) -> bytes | memoryview:
        """The object's bytes."""
        raise NotImplementedError

    def accepts(self, mask: Any) -> bool:  # noqa: ARG002
        """Whether the trainer's own reader takes a sample with this loss mask [T]."""
        return True

    def export_part(self, part: SourcePart, target: Store, threads: ThreadPoolExecutor, advance: Advance) -> PartDone:
        """See Exporter. Memory holds at most two samples a thread."""
        wanted = [index for index in range(len(part.rows)) if self.accepts(part.mask(index))]
        rows = {int(part.rows[index]) for index in wanted}
        left_out = [int(row) for row in part.rows if int(row) not in rows]

        def write(index: int) -> tuple[int, int]:
            sample = part.sample(index)
            written = target.write(self.key(sample.row), [memoryview(self.content(sample))])
            return len(sample.token_ids), written.size_bytes

        pending: deque[Future[tuple[int, int]]] = deque()
        size = 0
        for index in wanted:
            pending.append(threads.submit(write, index))
            if len(pending) >= 2 * _THREADS:
                size += _advanced(pending.popleft(), advance)
        while pending:
            size += _advanced(pending.popleft(), advance)
        return PartDone([int(part.rows[index]) for index in wanted], left_out, size, [])

    def finish(self, source: SourceDataset, target: Store, done: Iterator[tuple[SourceKey, PartDone]]) -> None:
        """See Exporter. Nothing, for most."""


def _advanced(write: Future[tuple[int, int]], advance: Advance) -> int:
    tokens, size = write.result()
    advance(1, tokens, size)
    return size
