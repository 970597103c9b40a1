"""Names of child objects: the same for the same ExtractionJob, and never longer than DNS allows."""

from __future__ import annotations

import hashlib

_LABEL_LIMIT = 63
_SHARD_DIGITS = 6
"""An Indexed Job's pods take `-<index>` as their hostname's end, which must still be a DNS label."""
_HASH_LENGTH = 8


def child_name(name: str, stage: str) -> str:
    """`<name>-<stage>`, shortened with a hash where a pod's hostname would get too long. Dots are not allowed in it."""
    return f"{_shortened(name.replace('.', '-'), name, _LABEL_LIMIT - len(stage) - 1 - _SHARD_DIGITS)}-{stage}"


def job_label(name: str) -> str:
    """The label value that stands for an ExtractionJob: its name, shortened with a hash where it is too long."""
    return _shortened(name, name, _LABEL_LIMIT)


def _shortened(text: str, name: str, limit: int) -> str:
    if text == name and len(text) <= limit:
        return text
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{text[: limit - _HASH_LENGTH - 1].rstrip('-.')}-{digest}"
