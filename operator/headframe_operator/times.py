"""Kubernetes' timestamps: RFC 3339 in UTC, whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime


def to_text(moment: datetime) -> str:
    """`2026-11-30T18:40:00Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_text(text: str | None) -> datetime | None:
    """The moment in a timestamp, with or without fractions; None where there is none."""
    return datetime.fromisoformat(text) if text else None


def seconds_between(earlier: datetime, later: datetime) -> float:
    """Seconds from one moment to the other."""
    return (later - earlier).total_seconds()
