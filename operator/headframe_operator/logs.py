"""Log lines: text for people, JSON for machines. A line about an ExtractionJob names it."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from headframe_operator.settings import Settings


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        job = getattr(record, "job", None)
        where = f"{getattr(record, 'namespace', '')}/{job} " if job else ""
        text = f"{_time(record)} {record.levelname:<7} {where}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line |= {key: value for key in ("namespace", "job") if (value := getattr(record, key, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logs(settings: Settings) -> None:
    """Send every log line to standard error. kopf tells of each event it sees, which is for its own debugging."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if settings.log_format == "json" else _Text())
    logging.basicConfig(handlers=[handler], level=settings.log_level, force=True)
    if settings.log_level != "DEBUG":
        logging.getLogger("kopf").setLevel(logging.WARNING)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
