"""Logs are lines for people or JSON for machines, and hold no credentials of the environment."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from headframe_api.errors import ConfigError
from headframe_worker.log import set_up_log

SECRET = 'wJalr"XUtnFEMI/K7MDENG'
logger = logging.getLogger("headframe_worker.test")


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before, level


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.delenv("HEADFRAME_LOG_FORMAT", raising=False)
    return io.StringIO()


def speak() -> None:
    logger.info("token hf_abcdefgh of %s", "user")
    try:
        int(SECRET)
    except ValueError:
        logger.exception("failed")
    logging.getLogger("botocore.auth").debug("signature")
    logging.getLogger("botocore.credentials").info("Found credentials in environment variables.")


def test_text(stream: io.StringIO) -> None:
    set_up_log(stream, level=logging.DEBUG)
    speak()
    text = stream.getvalue()
    assert "INFO    token **** of user" in text
    assert "base 10: '****'" in text
    assert SECRET not in text
    assert "credentials in" not in text
    assert "signature" not in text


def test_json_lines(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADFRAME_LOG_FORMAT", "json")
    set_up_log(stream)
    speak()
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"]) == (
        "info",
        "headframe_worker.test",
        "token **** of user",
    )
    assert second["traceback"].endswith("'****'")


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADFRAME_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="must be text or json"):
        set_up_log()
