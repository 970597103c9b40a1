"""The one outcome of a read that callers handle: the object is not there."""

from __future__ import annotations

from headframe_api.errors import DataError


class MissingObjectError(DataError):
    """No object has this key."""

    default_reason = "MissingObject"
