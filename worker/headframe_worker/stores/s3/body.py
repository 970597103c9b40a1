"""A request's body over several buffers: read by the HTTP client as a file, never joined or copied."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any


class Buffers:
    """The concatenation of buffers, of which any range can be had as slices."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        self._starts = list(accumulate(map(len, self._buffers), initial=0))
        self.size_bytes = self._starts.pop()

    def slices(self, start: int, stop: int) -> list[memoryview]:
        """The buffers' bytes from start to stop."""
        found: list[memoryview] = []
        index = max(0, bisect_right(self._starts, start) - 1)
        while start < stop and index < len(self._buffers):
            offset = start - self._starts[index]
            piece = self._buffers[index][offset : offset + stop - start]
            found.append(piece)
            start += len(piece)
            index += 1
        return found


class Body(io.RawIOBase):
    """A range of buffers as a file that boto3 can read and rewind. `check` runs before a piece is sent, and may raise."""

    def __init__(self, buffers: Buffers, start: int, stop: int, check: Callable[[], None]) -> None:
        self._buffers, self._start, self._stop = buffers, start, stop
        self._position = start
        self._check = check

    def readable(self) -> bool:
        """See io.IOBase."""
        return True

    def seekable(self) -> bool:
        """See io.IOBase."""
        return True

    def tell(self) -> int:
        """See io.IOBase."""
        return self._position - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See io.IOBase."""
        base = {io.SEEK_SET: self._start, io.SEEK_CUR: self._position, io.SEEK_END: self._stop}[whence]
        self._position = min(max(base + offset, self._start), self._stop)
        return self.tell()

    def read(self, size: int | None = -1, /) -> bytes:
        """Up to size bytes: a slice of the buffer it lies in, which is as good as bytes to a socket or a hash."""
        self._check()
        return self._next(size)

    def readinto(self, target: Any, /) -> int:
        """Copy into target: how the signer reads, whose C code does not expect an exception."""
        view = memoryview(target).cast("B")
        piece = self._next(len(view))
        view[: len(piece)] = piece
        return len(piece)

    def _next(self, size: int | None) -> bytes:
        left = self._stop - self._position
        wanted = left if size is None or size < 0 else min(size, left)
        pieces = self._buffers.slices(self._position, self._position + wanted)
        if not pieces:
            return b""
        self._position += len(pieces[0])
        return pieces[0]  # type: ignore[return-value]
