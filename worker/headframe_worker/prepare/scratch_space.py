"""A directory for one run of prepare, gone when it ends."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from headframe_api.errors import TemporaryError


@contextmanager
def scratch_space(scratch: Path) -> Iterator[Path]:
    """An empty directory below scratch. A full disk becomes a TemporaryError that names it."""
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="prepare-", dir=scratch, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise TemporaryError(
                f"{scratch}: no space left for the tokens on their way; make room there and run the same command again",
                reason="NoSpaceLeft",
            ) from error
        raise
