"""Kubernetes' lists of completion indexes, such as `1,3-5`."""

from __future__ import annotations

from collections.abc import Iterator


def count(indexes: str) -> int:
    """How many indexes a list names."""
    return sum(last - first + 1 for first, last in _ranges(indexes))


def indexes(listed: str) -> set[int]:
    """The indexes that a list names."""
    return {index for first, last in _ranges(listed) for index in range(first, last + 1)}


def contains(indexes: str, index: int) -> bool:
    """Whether a list names an index."""
    return any(first <= index <= last for first, last in _ranges(indexes))


def _ranges(indexes: str) -> Iterator[tuple[int, int]]:
    for part in filter(None, indexes.split(",")):
        first, _, last = part.partition("-")
        yield int(first), int(last or first)
