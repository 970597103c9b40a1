"""A directory for one run of prepare, gone when it ends; what a killed run left is removed by the next."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headframe_api.errors import TemporaryError

_PREFIX = "prepare-"


@contextmanager
def scratch_space(scratch: Path) -> Iterator[Path]:
    """An empty directory below scratch. A full disk becomes a TemporaryError that names it."""
    own = scratch / f"{_PREFIX}{os.getpid()}"
    try:
        for left in scratch.glob(f"{_PREFIX}*"):
            if left == own or not _alive(left.name.removeprefix(_PREFIX)):
                shutil.rmtree(left, ignore_errors=True)
        own.mkdir(parents=True)
        yield own
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise TemporaryError(
                f"{scratch}: no space left for the tokens on their way; make room there and run the same command again",
                reason="NoSpaceLeft",
            ) from error
        raise
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
