"""Headframe's operator: observe ExtractionJobs and their children, decide, apply, report. Never imports the worker."""
