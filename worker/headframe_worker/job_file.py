"""Reading a manifest: from a file, or from the environment as pods get it."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from headframe_api.errors import ConfigError
from headframe_api.job import ExtractionJob
from headframe_api.names import JOB_ENVIRONMENT
from headframe_api.parse import parse_job


def load_job(path: Path | None) -> ExtractionJob:
    """The ExtractionJob in a YAML or JSON file, or, without a file, in the environment variable HEADFRAME_JOB.

    Raises ConfigError with every fault of the manifest.
    """
    if path is None:
        text = os.environ.get(JOB_ENVIRONMENT)
        if text is None:
            raise ConfigError(f"no manifest: name a file, or set {JOB_ENVIRONMENT} to the ExtractionJob")
        return parse_text(text, where=JOB_ENVIRONMENT)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return parse_text(text, where=str(path))


def parse_text(text: str, *, where: str) -> ExtractionJob:
    """The one ExtractionJob in YAML or JSON text."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {_told(error)}", reason="InvalidManifest") from error
    if len(documents) != 1:
        raise ConfigError(
            f"{where}: holds {len(documents)} documents; name a file with one ExtractionJob", reason="InvalidManifest"
        )
    return parse_job(documents[0], where=where)


def _told(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
