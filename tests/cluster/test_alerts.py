"""promtool judges the alerts: their syntax, and that each fires on its cause and not beside it."""

import subprocess
from pathlib import Path
from typing import Any

import yaml

from monitoring.alerts import ALERTS
from testbed.helm import CHART, ROOT
from testbed.tools import require, system_tool

CASES = ROOT / "tests/data/alerts.yaml"
RULES = CHART / "files/alerts.yaml"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    with require():
        program = system_tool("promtool", "prometheus")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def without_annotations(document: dict[str, Any]) -> dict[str, Any]:
    """promtool compares annotations too; here it is about when, not about words."""
    for group in document["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    return document


def test_the_rules_are_sound() -> None:
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout


def test_each_alert_fires_and_does_not_fire(tmp_path: Path) -> None:
    (tmp_path / "alerts.rules.yaml").write_text(yaml.safe_dump(without_annotations(yaml.safe_load(RULES.read_text()))))
    (tmp_path / "cases.yaml").write_text(CASES.read_text())
    tested = promtool("test", "rules", tmp_path / "cases.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_no_alert_is_left_out() -> None:
    checks = [check for case in yaml.safe_load(CASES.read_text())["tests"] for check in case["alert_rule_test"]]
    for fires in (True, False):
        assert {check["alertname"] for check in checks if bool(check["exp_alerts"]) is fires} == {
            a.name for a in ALERTS
        }
