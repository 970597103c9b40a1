"""The one way in which both dashboards make a panel, a variable and their JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SELECTED = 'namespace=~"$namespace", job=~"$job"'
"""The series that the variables of a dashboard choose."""
_DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_ROW_HEIGHT = 8
_STAT_HEIGHT = 4
_FULL_WIDTH = 24
_Builder = timeseries.Panel | stat.Panel | table.Panel | bargauge.Panel


@dataclass(frozen=True)
class Query:
    """One PromQL expression and what its series are called."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel: what it shows, in which unit, and what it says when there is nothing to show."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str
    kind: Literal["lines", "stacked", "number", "table", "bars"] = "lines"
    width: int = 12
    maximum: float | None = None
    empty: str = "none"


@dataclass(frozen=True)
class Row:
    """Panels under one headline."""

    title: str
    panels: tuple[Panel, ...]


def build(uid: str, title: str, description: str, rows: Sequence[Row], variables: str) -> models.Dashboard:
    """A dashboard. `variables` is the metric whose labels `namespace` and `job` can be chosen."""
    builder = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["headframe"])
        .readonly()
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("namespace", "Namespace", f"label_values({variables}, namespace)"))
        .with_variable(_variable("job", "Job", f'label_values({variables}{{namespace=~"$namespace"}}, job)'))
    )
    for row in rows:
        builder = builder.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            builder = builder.with_panel(_panel(panel))
    return builder.build()


def to_json(built: models.Dashboard) -> str:
    """The JSON that Grafana imports, the same text each time."""
    return JSONEncoder(sort_keys=True, indent=1).encode(built) + "\n"


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    everything = models.VariableOption(text="All", value="$__all", selected=True)
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_DATASOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(everything)
    )


def _panel(panel: Panel) -> _Builder:
    builder = _body(panel)
    builder = (
        builder.title(panel.title)
        .description(panel.description)
        .datasource(_DATASOURCE)
        .unit(panel.unit)
        .no_value(panel.empty)
        .min(0)
        .span(panel.width)
        .height(_STAT_HEIGHT if panel.kind == "number" else _ROW_HEIGHT)
    )
    if panel.maximum is not None:
        builder = builder.max(panel.maximum)
    now_only = panel.kind in ("number", "table", "bars")
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
        target = target.ref_id(chr(ord("A") + number)).datasource(_DATASOURCE)
        target = target.instant() if now_only else target.range()
        builder = builder.with_target(target.format(PromQueryFormat.TABLE) if panel.kind == "table" else target)
    return builder


def _body(panel: Panel) -> _Builder:
    if panel.kind == "number":
        return stat.Panel().graph_mode(common_models.BigValueGraphMode.NONE)
    if panel.kind == "bars":
        return bargauge.Panel().orientation(common_models.VizOrientation.HORIZONTAL)
    if panel.kind == "table":
        hidden = models.DataTransformerConfig(id_val="organize", options={"excludeByName": {"Time": True}})
        return table.Panel().with_transformation(hidden)
    lines = timeseries.Panel().legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
    )
    if panel.kind == "stacked":
        stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
        lines = lines.fill_opacity(40).stacking(stacking)
    return lines
