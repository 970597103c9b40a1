"""docs/operations.md explains every reason that the operator can give."""

import re
from pathlib import Path
from types import ModuleType

from headframe_operator import deadlines, decide, outcomes, reasons, report
from testbed.helm import ROOT

PAGE = (ROOT / "docs/operations.md").read_text()


def reasons_in(module: ModuleType) -> set[str]:
    """The CamelCase words that a module's code holds as strings."""
    text = Path(str(module.__file__)).read_text()
    return set(re.findall(r'"([A-Z][a-z]+(?:[A-Z]+[a-z]+)+)"', text)) - NO_REASONS


NO_REASONS = {"ExtractionJob", "PriorityClass", "FailedCreate", "FailedMount", "FailedAttachVolume", "FailedMapVolume"} | {
    "FailedCreatePodSandBox", "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "ContainerCreating", "PodInitializing", "CreateContainer", "RunContainer", "FailedIndexes", "PodFailurePolicy",
}  # fmt: skip
"""Kubernetes' own words, which the code looks for."""


def test_every_reason_is_explained() -> None:
    given = set().union(*(reasons_in(module) for module in (decide, deadlines, outcomes, reasons, report)))
    assert len(given) > 30
    assert {reason for reason in given if not re.search(rf"\b{reason}\b", PAGE)} == set()
