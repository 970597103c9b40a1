"""What the stages need of a place that holds objects: a directory or a bucket, and nothing that only one of them can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class ObjectInfo:
    """One object of a listing; the key is relative to the store's URI."""

    key: str
    size_bytes: int
    version: str
    """Another one where the content was written anew: an ETag, or the time of the change."""


@dataclass(frozen=True)
class Written:
    """What became of a write."""

    size_bytes: int
    digest: str
    """`crc64nvme:` and 16 hex digits over the whole object as given, also where an equal-named one was already there."""
    created: bool
    """False: an exclusive write found the key taken and left it as it was."""


class Store(Protocol):
    """Objects under one URI. Methods may be called from several threads; errors are HeadframeErrors that name URI and operation."""

    uri: str
    """Without a trailing slash; holds no credentials."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All whole objects whose key starts with prefix, in order of their keys; never a half-written one.

        On some servers a listing lags: what decides something is confirmed by `exists`, a read or an exclusive write.
        """
        ...

    def exists(self, key: str) -> bool:
        """Whether there is such an object now."""
        ...

    def read(self, key: str) -> bytes:
        """The whole object. Raises MissingObjectError where there is none."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`, by one request. Raises MissingObjectError, or DataError where the object is shorter."""
        ...

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill a writable buffer of bytes from `start`; else as read_range. Readers use it: states of a sample go where they stay."""
        ...

    def fetch(self, key: str, directory: Path) -> Path:
        """A local file with the object's bytes: the object itself where it is local, else a download into directory."""
        ...

    def write(self, key: str, buffers: Sequence[memoryview], *, exclusive: bool = False) -> Written:
        """Write the concatenation of buffers as one object, whole or not at all, and without copying them.

        `exclusive` never replaces an object: the loser of a race gets created=False.
        """
        ...

    def write_file(self, key: str, path: Path, *, exclusive: bool = False) -> Written:
        """The same for a local file's content."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are no error."""
        ...

    def clean_up(self, prefix: str = "", *, settled: bool = False) -> int:
        """Remove what interrupted writes left behind under prefix, once it is old enough to be nobody's; how many were removed.

        `settled`: all that will ever be there is there, so that no write under prefix has any use, however young it is.
        """
        ...

    def check_writable(self) -> None:
        """Raises ConfigError, with what to check, where objects cannot be written here."""
        ...

    def close(self) -> None:
        """Release connections and threads; abandon writes in flight."""
        ...
