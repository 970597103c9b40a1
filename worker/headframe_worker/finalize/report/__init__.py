"""report.html: one self-contained file that shows what was made and how it went."""

from headframe_worker.finalize.report.page import render_report

__all__ = ["render_report"]
