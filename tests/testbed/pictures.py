"""Draws the dashboards' main panels from a real run, for docs/monitoring.md: `make pictures`.

The run is the quickstart's, on the real node. Each panel's own queries are put to the Prometheus that
scraped it. Grafana itself is not asked: the drawing is matplotlib's.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MultipleLocator

from testbed.helm import CHART, ROOT
from testbed.installed import EXAMPLE, Installed, headframe_installed
from testbed.node import borrowed_node_cluster
from testbed.process import wait_until
from testbed.prometheus import Prometheus

PICTURES = ROOT / "docs/images"
CHOSEN = {
    "workers": (
        "Tokens per second", "Samples per second", "Padding waste", "Workers by state", "The model's second",
        "Busy seconds by stage",
    ),
    "extractionjobs": ("Jobs by phase", "Tokens per second by job", "Shards", "Requests to the API server"),
}  # fmt: skip
"""Panels that have something to show on a good run without a GPU."""
_STEP_SECONDS = 4
_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNITS = {"s": " s", "Bps": "B/s", "bytes": "B", "reqps": "/s"}
Json = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """One series of a panel: what its legend calls it, seconds since the run began, values."""

    name: str
    seconds: list[float]
    values: list[float]


def curves(panel: Json, prometheus: Prometheus, started: float, ended: float) -> Iterator[Curve]:
    """What a panel's queries return over the run."""
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", "20s").replace("$namespace", ".*").replace("$job", ".*")
        for series in prometheus.query_range(query, started, ended, _STEP_SECONDS):
            name = _legend(target["legendFormat"], series["metric"])
            points = [(float(at) - started, float(value)) for at, value in series["values"]]
            yield _with_gaps(name, points)


def _with_gaps(name: str, points: list[tuple[float, float]]) -> Curve:
    """A series whose curve breaks off where a value is missing, rather than run straight to the next one."""
    seconds: list[float] = []
    values: list[float] = []
    for at, value in points:
        if seconds and at - seconds[-1] > 1.5 * _STEP_SECONDS:
            seconds.append(seconds[-1] + 1e-3)
            values.append(nan)
        seconds.append(at)
        values.append(value)
    return Curve(name, seconds, values)


def _legend(template: str, labels: Mapping[str, str]) -> str:
    """Grafana's `{{label}}` filled in."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), template)


def draw(name: str, prometheus: Prometheus, started: float, ended: float) -> Path:
    """Draw the chosen panels of a dashboard, two in a row."""
    dashboard = json.loads((CHART / f"files/dashboards/{name}.json").read_text())
    panels = {panel["title"]: panel for panel in dashboard["panels"]}
    chosen = [panels[title] for title in CHOSEN[name]]
    pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 8, "path.simplify_threshold": 0.5}
    figure, axes = pyplot.subplots(len(chosen) // 2, 2, figsize=(10, 1.1 * len(chosen)), layout="constrained")
    for place, panel in zip(axes.flat, chosen, strict=True):
        _draw_panel(place, panel, list(curves(panel, prometheus, started, ended)), ended - started)
    figure.suptitle(dashboard["title"])
    PICTURES.mkdir(exist_ok=True)
    path = PICTURES / f"dashboard-{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _draw_panel(place: Axes, panel: Json, drawn: list[Curve], length: float) -> None:
    field = panel["fieldConfig"]["defaults"]
    stacked, unit = "stacking" in field.get("custom", {}), field["unit"]
    base: dict[float, float] = {}
    for number, curve in enumerate(curve for curve in drawn if not stacked or max(curve.values) > 0):
        color = f"C{number % 10}"
        if stacked:
            bottom = [base.get(round(at), 0.0) for at in curve.seconds]
            top = [low + value for low, value in zip(bottom, curve.values, strict=True)]
            place.fill_between(curve.seconds, bottom, top, color=color, alpha=0.4, linewidth=0, label=curve.name)
            base |= {round(at): value for at, value in zip(curve.seconds, top, strict=True) if not isnan(value)}
        else:
            place.plot(curve.seconds, curve.values, color=color, linewidth=1.2, label=curve.name)
    place.set_title(panel["title"], loc="left", fontweight="bold")
    place.set_xlim(0, length)
    place.set_ylim(bottom=0)
    place.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds / 60:g} min"))
    place.xaxis.set_major_locator(MultipleLocator(60 * max(1, round(length / 300))))
    place.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _with_unit(value, unit)))
    place.grid(alpha=0.25)
    place.legend(fontsize=6, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.12), frameon=False)


def _with_unit(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    size, prefix = next((pair for pair in _PREFIXES if abs(value) >= pair[0]), (1.0, ""))
    return f"{value / size:g} {prefix}{_UNITS.get(unit, '')}".replace("  ", " ").rstrip()


def _run(installed: Installed) -> None:
    """The quickstart, to its end."""
    job = yaml.safe_load(EXAMPLE.read_text())
    job["metadata"]["name"] = "drafter"
    installed.give_credentials("default")
    installed.cluster.apply(job)

    def ended() -> bool:
        phase = installed.cluster.get("xj", job["metadata"]["name"]).get("status", {}).get("phase")
        return phase in ("Succeeded", "Failed")

    wait_until(ended, timeout_seconds=3600, poll_seconds=2)


def _main() -> None:
    with (
        TemporaryDirectory() as folder,
        borrowed_node_cluster(Path(folder) / "node") as cluster,
        headframe_installed(cluster, Path(folder) / "s3") as installed,
        Prometheus(Path(folder) / "prometheus", cluster, installed.documents()) as prometheus,
    ):
        started = time.time()
        _run(installed)
        ended = time.time()
        for name in CHOSEN:
            print(draw(name, prometheus, started, ended), file=sys.stderr)


if __name__ == "__main__":
    _main()
