"""A bounded queue between two threads that can be closed by its writer or broken by anyone, so that no thread waits for ever."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ClosedChannelError(Exception):
    """Nothing more comes out of this channel, or nothing more may go in."""


class Channel(Generic[T]):
    """First in, first out; `put` waits while `capacity` items wait."""

    def __init__(self, capacity: int) -> None:
        self._items: deque[T] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()  # its lock is re-entrant: abort() calls close()
        self._closed = False

    def put(self, item: T) -> None:
        """Add an item. Raises ClosedChannelError once the channel is closed or broken."""
        with self._changed:
            while len(self._items) >= self._capacity and not self._closed:
                self._changed.wait()
            if self._closed:
                raise ClosedChannelError
            self._items.append(item)
            self._changed.notify_all()

    def get(self, timeout_seconds: float | None = None) -> T:
        """The oldest item. Raises TimeoutError, or ClosedChannelError where none is left and none will come."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items or self._closed, timeout_seconds):
                raise TimeoutError
            if not self._items:
                raise ClosedChannelError
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """No more items will come; those that wait can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Close, and drop what waits."""
        with self._changed:
            self._items.clear()
            self.close()
