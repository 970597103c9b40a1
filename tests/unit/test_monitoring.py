"""Dashboards and alerts name only metrics that the code exports, and every metric that it exports is looked at somewhere."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import REGISTRY
from prometheus_client.core import CollectorRegistry

import headframe_operator.metrics as operator_metrics
from headframe_worker.meter import Meter
from headframe_worker.serve.gpus import GpuCollector
from headframe_worker.serve.metrics import MeterCollector
from monitoring.alerts import ALERTS
from monitoring.extraction_jobs import extraction_jobs_dashboard
from monitoring.workers import workers_dashboard
from testbed.helm import CHART, ROOT
from testbed.tools import go_tool, require

DASHBOARDS = {"extractionjobs": extraction_jobs_dashboard(), "workers": workers_dashboard()}


def exported() -> set[str]:
    """The names of all series of worker and operator, as Prometheus stores them."""
    meter = Meter("extract")
    meter.quarantine("EmptySample")
    worker = CollectorRegistry()
    worker.register(MeterCollector(lambda: {"0": meter}, stalled_after_seconds=900))
    worker.register(GpuCollector())
    operator = CollectorRegistry()
    operator.register(operator_metrics.JobsCollector(list, list))
    families = [family for registry in (worker, operator, REGISTRY) for family in registry.collect()]
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {f"{f.name}{suffix}" for f in families if f.name.startswith("headframe") for suffix in suffixes[f.type]}


def expressions() -> Iterator[str]:
    for built in DASHBOARDS.values():
        document = json.loads(JSONEncoder().encode(built))
        for row in document["panels"]:
            for panel in row.get("panels") or [row]:
                yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (alert.expression for alert in ALERTS)


def named() -> set[str]:
    return {name for text in expressions() for name in re.findall(r"\bheadframe_\w+", text)}


def test_every_name_is_exported() -> None:
    assert named() <= exported()


def test_every_exported_metric_is_looked_at() -> None:
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()}
    looked_at = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named()}
    assert bases <= looked_at


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_whole(name: str) -> None:
    """It reads back as the same model, and each panel says what it shows, in which unit, and what it says when empty."""
    text = (CHART / f"files/dashboards/{name}.json").read_text()
    document = json.loads(text)
    assert json.loads(JSONEncoder().encode(Dashboard.from_json(document))) == document
    assert {variable["name"] for variable in document["templating"]["list"]} == {"datasource", "namespace", "job"}
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert len(panels) >= 15
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places), "panels lie on one another"


def judged_by_grafana(*files: Path) -> str:
    """What Grafana's own schema has against dashboards; nothing when it takes them."""
    with require():
        program = go_tool("grafana-schema")
    return subprocess.run([program, *files], capture_output=True, text=True, check=False).stderr


def test_grafana_takes_the_dashboards() -> None:
    assert not judged_by_grafana(*(CHART / f"files/dashboards/{name}.json" for name in DASHBOARDS))


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("options", {"bogus": 1}, "unexpected field 'bogus'"),
        ("options", {"legend": {}}, "displayMode: required field is missing"),
        ("title", 3, "cannot unmarshal number"),
    ],
)
def test_grafana_refuses_what_is_wrong(path: str, value: Any, complaint: str, tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    document = json.loads((CHART / "files/dashboards/workers.json").read_text())
    panel = next(panel for panel in document["panels"] if panel["type"] == "timeseries")
    panel[path] = panel[path] | value if path == "options" else value
    (tmp_path / "wrong.json").write_text(json.dumps(document))
    assert complaint in judged_by_grafana(tmp_path / "wrong.json")


def test_every_alert_has_its_runbook() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    for alert in ALERTS:
        assert f"### {alert.name}\n" in text
