"""Exit codes after sysexits.h; the operator's podFailurePolicy acts on them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a stage's process exits with, and what the extract Job makes of it."""

    OK = 0
    DATA = 65
    """EX_DATAERR: this shard cannot succeed (FailIndex)."""
    TEMPORARY = 75
    """EX_TEMPFAIL: retry, counted per shard. Any code not named here is treated alike."""
    CONFIG = 78
    """EX_CONFIG: no shard can succeed (FailJob)."""
    INTERRUPTED = 130
    """Ctrl-C (128 + SIGINT): stopped cleanly; the same command goes on."""
    TERMINATED = 143
    """128 + SIGTERM: stopped cleanly within the grace period; the same command goes on."""
