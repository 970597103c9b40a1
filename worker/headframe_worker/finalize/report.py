"""report.html: one file that shows what was made and how it went."""

from __future__ import annotations

from pathlib import Path

from headframe_api.manifests import DatasetManifest
from headframe_api.plan import Plan
from headframe_worker.stores.base import Store


def render_report(output: Store, plan: Plan, manifest: DatasetManifest, index: Path) -> str:  # noqa: ARG001
    """The report's HTML."""
    return f"<!doctype html><title>{plan.model.source}</title>"
