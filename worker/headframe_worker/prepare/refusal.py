"""Why a row is refused: a bounded set of reasons, and the exception that carries one to the quarantine."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "InvalidJson",
    "InvalidUnicode",
    "LengthMismatch",
    "MaskUnsound",
    "MissingColumn",
    "NoAssistantTurn",
    "NotAnObject",
    "RowTooLarge",
    "EmptySample",
    "TemplateRefused",
    "TokenOutOfRange",
    "TooLong",
    "UnknownRole",
    "UnsupportedContent",
    "WrongType",
]


class RefusedRowError(Exception):
    """This row goes to quarantine; the others go on."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message


def printable(text: str) -> str:
    """The text with every lone surrogate replaced, so that it can be written as UTF-8."""
    return text.encode("utf-8", "replace").decode()
