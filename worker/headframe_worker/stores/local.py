"""A directory as a store: files appear by rename or hard link, so that nothing half-written ever has a final name."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from headframe_api.errors import ConfigError, DataError, HeadframeError, TemporaryError
from headframe_worker.checksum import crc64, digest_text
from headframe_worker.stores.base import ObjectInfo, Written
from headframe_worker.stores.missing import MissingObjectError

_TEMPORARY_PREFIX = ".headframe-"
_ABANDONED_AFTER_SECONDS = 3600.0
_WRITEV_BUFFERS = 64
_WRITE_BYTES = 64 << 20


class LocalStore:
    """Objects are files below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.expanduser().absolute()
        self.uri = str(self.directory)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See Store."""
        top = self.directory / prefix if not prefix or prefix.endswith("/") else (self.directory / prefix).parent
        if not top.is_dir():
            return
        found = []
        for folder, _, names in os.walk(top):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self.directory).as_posix()
                if key.startswith(prefix) and not name.startswith(_TEMPORARY_PREFIX):
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        found.append(_info(key, path))
        yield from sorted(found, key=lambda info: info.key)

    def info(self, key: str) -> ObjectInfo:
        """One object as a listing has it. Raises MissingObjectError."""
        with self._errors(key, "read"):
            return _info(key, self.directory / key)

    def exists(self, key: str) -> bool:
        """See Store."""
        return (self.directory / key).is_file()

    def read(self, key: str) -> bytes:
        """See Store."""
        with self._errors(key, "read"):
            return (self.directory / key).read_bytes()

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See Store."""
        data = bytearray(length)
        self.read_into(key, start, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """See Store."""
        with self._errors(key, "read"):
            descriptor = os.open(self.directory / key, os.O_RDONLY)
            try:
                done = 0
                while done < len(buffer):  # one read returns at most 2 GiB
                    count = os.preadv(descriptor, [buffer[done:]], start + done)
                    if not count:
                        raise DataError(
                            f"{self.directory / key}: ends at byte {start + done}, needed up to {start + len(buffer)}"
                        )
                    done += count
            finally:
                os.close(descriptor)

    def fetch(self, key: str, directory: Path) -> Path:  # noqa: ARG002  (a local file needs no copy)
        """See Store."""
        path = self.directory / key
        if not path.is_file():
            raise MissingObjectError(f"{path}: no such file")
        return path

    def write(self, key: str, buffers: Sequence[memoryview], *, exclusive: bool = False) -> Written:
        """See Store."""
        flat = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        with self._temporary(key) as (temporary, descriptor):
            for chunk in _chunks(flat):
                _write_all(descriptor, chunk)
            created = self._publish(temporary, key, descriptor, exclusive=exclusive)
        return Written(sum(map(len, flat)), digest_text(crc64(flat)), created)

    def write_file(self, key: str, path: Path, *, exclusive: bool = False) -> Written:
        """See Store."""
        checksum = size = 0
        with self._temporary(key) as (temporary, descriptor):
            with path.open("rb") as source:
                while chunk := source.read(_WRITE_BYTES):
                    _write_all(descriptor, [memoryview(chunk)])
                    checksum = crc64([memoryview(chunk)], checksum)
                    size += len(chunk)
            created = self._publish(temporary, key, descriptor, exclusive=exclusive)
        return Written(size, digest_text(checksum), created)

    def delete(self, keys: Iterable[str]) -> None:
        """See Store."""
        for key in keys:
            with self._errors(key, "delete"):
                (self.directory / key).unlink(missing_ok=True)

    def clean_up(self, prefix: str = "", *, settled: bool = False) -> int:
        """See Store."""
        oldest, removed = time.time() - _ABANDONED_AFTER_SECONDS, 0
        for path in (self.directory / prefix).glob(f"**/{_TEMPORARY_PREFIX}*"):
            try:
                if settled or path.stat().st_mtime < oldest:
                    path.unlink()
                    removed += 1
            except FileNotFoundError:
                continue
        return removed

    def check_writable(self) -> None:
        """See Store."""
        try:
            with self._temporary("probe") as (_, descriptor):
                os.write(descriptor, b"headframe")
        except HeadframeError as error:
            raise ConfigError(
                f"{self.uri}: cannot be written: {error.message}; check the path and its permissions",
                reason="OutputNotWritable",
            ) from error

    def close(self) -> None:
        """See Store."""

    @contextmanager
    def _temporary(self, key: str) -> Iterator[tuple[Path, int]]:
        """A new file beside the key's final place, gone again unless it was published."""
        final = self.directory / key
        temporary = final.parent / f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        with self._errors(key, "write"):
            final.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                yield temporary, descriptor
            finally:
                os.close(descriptor)
                temporary.unlink(missing_ok=True)

    def _publish(self, temporary: Path, key: str, descriptor: int, *, exclusive: bool) -> bool:
        os.fdatasync(descriptor)
        final = self.directory / key
        if exclusive:
            try:
                final.hardlink_to(temporary)
            except FileExistsError:
                return False
            except FileNotFoundError:  # cleaned up as of no use, because another writer has made all there is to make
                if final.exists():
                    return False
                raise
        else:
            temporary.replace(final)
        return True

    @contextmanager
    def _errors(self, key: str, operation: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._raise(error, key, operation)

    def _raise(self, error: OSError, key: str, operation: str) -> NoReturn:
        path = self.directory / key
        if isinstance(error, FileNotFoundError):
            raise MissingObjectError(f"{path}: no such file") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TemporaryError(
                f"{path}: no space left to {operation} it; make room and run it again, it goes on from here",
                reason="NoSpaceLeft",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR):
            raise ConfigError(f"{path}: cannot {operation}: {error.strerror}", reason="PermissionDenied") from error
        raise TemporaryError(f"{path}: cannot {operation}: {error.strerror or error}") from error


def _info(key: str, path: Path) -> ObjectInfo:
    stat = path.stat()
    return ObjectInfo(key, stat.st_size, str(stat.st_mtime_ns))


def _chunks(buffers: list[memoryview]) -> Iterator[list[memoryview]]:
    for start in range(0, len(buffers), _WRITEV_BUFFERS):
        yield buffers[start : start + _WRITEV_BUFFERS]


def _write_all(descriptor: int, buffers: list[memoryview]) -> None:
    """writev until everything is out: one call may write less than it was given."""
    pending = [buffer for buffer in buffers if len(buffer)]
    while pending:
        written = os.writev(descriptor, pending)
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if written:
            pending[0] = pending[0][written:]
