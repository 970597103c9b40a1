"""Dashboards and alerts as code: `make generate` writes them into the chart."""
