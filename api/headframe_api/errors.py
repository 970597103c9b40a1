"""Errors that carry what a process must exit with, so that Kubernetes and a shell read the same verdict."""

from __future__ import annotations

from typing import ClassVar

from headframe_api.exit_codes import ExitCode


class HeadframeError(Exception):
    """Base of every error meant for a user: the message says what was wrong, where, and what to do.

    ``reason`` is a CamelCase word for conditions and metrics; it never holds data of the user.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.TEMPORARY
    default_reason: ClassVar[str] = "Temporary"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason


class ConfigError(HeadframeError):
    """No shard can succeed: the manifest, the model, the dataset or a permission must change. Exit code 78."""

    exit_code = ExitCode.CONFIG
    default_reason = "InvalidConfiguration"


class DataError(HeadframeError):
    """This shard cannot succeed, however often it is tried; others may. Exit code 65."""

    exit_code = ExitCode.DATA
    default_reason = "BadData"


class TemporaryError(HeadframeError):
    """The same command may succeed later. Exit code 75."""


class StoppedError(HeadframeError):
    """A signal asked the process to stop, and it stopped cleanly: the same command goes on where it left off. Exit code 143."""

    exit_code = ExitCode.TERMINATED
    default_reason = "Stopped"
