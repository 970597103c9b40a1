"""The log of every process: lines for people, or JSON for machines; never a secret."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TextIO

from headframe_api.errors import ConfigError
from headframe_api.names import LOG_FORMAT_ENVIRONMENT

_QUIET = ("boto3", "botocore", "s3transfer", "urllib3", "awscrt", "httpx", "filelock", "datasets", "huggingface_hub")
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SHORTEST_SECRET = 8  # a shorter value would take words out of messages and hide nothing worth hiding


def set_up_log(stream: TextIO | None = None, *, level: int = logging.INFO) -> None:
    """Send this process' log to stderr. HEADFRAME_LOG_FORMAT is `text` (the default) or `json`; raises ConfigError for others."""
    chosen = os.environ.get(LOG_FORMAT_ENVIRONMENT, "text")
    if chosen not in ("text", "json"):
        raise ConfigError(f"{LOG_FORMAT_ENVIRONMENT}: {chosen!r} must be text or json")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonLines() if chosen == "json" else _TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def redact(text: str) -> str:
    """Text without the credentials that stand in the environment now."""
    for name in _SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "****")
    return text


class _TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The line, with a traceback below it where the record has one."""
        return redact(super().format(record))


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One JSON object on one line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.processName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        # Redacted value by value: a secret with a quote in it would look different inside JSON.
        return json.dumps({key: redact(str(value)) for key, value in fields.items()}, ensure_ascii=False)
