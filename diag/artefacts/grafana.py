"""Dashboards and panels as Grafana 11 to 13 reads them.

grafanalib writes the model of Grafana 4 to 8 (schema 12, with keys that were removed since): `_modernize` brings it up
to date. Keys: the JSON schema of Grafana's foundation SDK.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from grafanalib import core
from grafanalib._gen import DashboardEncoder

COLUMNS = 24
"""Width of a page."""
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GOOD, BAD, NEUTRAL, PLAIN = "green", "red", "blue", "text"
States = Mapping[int, tuple[str, str]]
"""Text and colour by value."""
SCHEMA_VERSION = 42
ALL = {"selected": True, "text": ["All"], "value": ["$__all"]}
KEYS = {
    "dashboard": "uid title description tags timezone editable graphTooltip time refresh schemaVersion"
    " panels templating annotations links",
    "panel": "type id targets title description transparent datasource gridPos links maxDataPoints transformations"
    " interval options fieldConfig repeat repeatDirection maxPerRow",
    "row": "type id title gridPos collapsed panels",
    "target": "refId expr legendFormat format instant range datasource",
}
"""Keys that Grafana still reads, by kind of object."""


@dataclass(frozen=True)
class PanelQuery:
    """One expression of a panel; `legend` may hold {{label}}."""

    promql: str
    legend: str = ""


@dataclass(frozen=True)
class PanelHeader:
    """Title, description of the healthy state, Grafana's id of the unit, and width of a panel; a page is 24 wide."""

    title: str
    description: str
    unit: str = "short"
    width: int = 12


@dataclass(frozen=True)
class Threshold:
    """A line in a panel: the colour below it and the colour from it on."""

    value: float
    below: str = GOOD
    above: str = BAD


@dataclass(frozen=True)
class QueryVariable:
    """A variable filled by a query; `regex` picks text and value from its result. All values, or with `initial` one."""

    query: str
    regex: str = ""
    initial: str = ""
    hidden: bool = False


@dataclass(frozen=True)
class TableColumn:
    """One column of a table and the unit of its values."""

    promql: str
    unit: str = "short"


def time_series(
    header: PanelHeader,
    queries: Iterable[PanelQuery],
    threshold: Threshold | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return lines over time, with the threshold as a dashed line; `extra` are more keys of the panel."""
    return core.TimeSeries(
        **_panel_fields(header, queries, height=8),
        unit=header.unit,
        thresholds=_threshold_steps(threshold),
        thresholdsStyleMode="dashed" if threshold else "off",
        fillOpacity=8,
        showPoints="never",
        tooltipMode="multi",
        tooltipSort="desc",
        axisSoftMin=0,
        extraJson={"options": {"legend": {"showLegend": True}}, **extra},
    )


def stat(header: PanelHeader, promql: str, threshold: Threshold | None = None, name: str = "") -> Any:
    """Return one number, coloured by its threshold; 0 without data. `name` is shown instead of the number."""
    return core.Stat(
        **_panel_fields(header, [PanelQuery(promql, name)], height=4, instant=True),
        format=header.unit,
        thresholds=_threshold_steps(threshold),
        graphMode="none",
        reduceCalc="lastNotNull",
        noValue="0",
        textMode="name" if name else "auto",
        extraJson={"fieldConfig": {"defaults": {"decimals": 0 if header.unit == "short" else 1}}},
    )


def repeated(header: PanelHeader, queries: Iterable[PanelQuery], variable: str, units: Mapping[str, str]) -> Any:
    """Return lines over time for each value of a variable, three in a row; the series "threshold" is a dashed line.

    The legend of a series ends with its unit in brackets: `units` are Grafana's ids by that name.
    """

    def override(pattern: str, properties: Mapping[str, Any]) -> dict[str, Any]:
        found = _override("", properties)
        return {**found, "matcher": {"id": "byRegexp", "options": pattern}}

    dashed = {
        "custom.lineStyle": {"fill": "dash", "dash": [8, 8]},
        "color": {"mode": "fixed", "fixedColor": BAD},
        "custom.fillOpacity": 0,
    }
    overrides = [override(f"/\\({name}\\)$/", {"unit": unit}) for name, unit in units.items()]
    overrides.append(override("/^threshold/", dashed))
    keys = {"repeat": variable, "repeatDirection": "h", "maxPerRow": 3, "fieldConfig": {"overrides": overrides}}
    return time_series(header, queries, extra=keys)


def state_timeline(header: PanelHeader, queries: Iterable[PanelQuery], states: States, height: int = 8) -> Any:
    """Return a bar for each series, in the colour of its state."""
    return core.StateTimeline(
        **_panel_fields(header, queries, height=height),
        mappings=_value_mappings(states),
        thresholds=_threshold_steps(None),
        colorMode="thresholds",
        showValue="never",
        extraJson={"options": {"legend": {"showLegend": True}}},
    )


def table(
    header: PanelHeader, columns: Mapping[str, TableColumn], states: States, links: Mapping[str, str], height: int = 9
) -> Any:
    """Return a row for each subject, sorted by the first column, which is a state in its colour.

    Each cell has `links`: addresses by title.
    """
    state_column = next(iter(columns))
    names = {f"Value #{chr(65 + at)}": name for at, name in enumerate(columns)}
    queries = [PanelQuery(column.promql) for column in columns.values()]
    state_cells = {
        "mappings": _value_mappings(states),
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value or None, "color": color} for value, (_, color) in states.items()],
        },
        "custom.cellOptions": {"type": "color-background"},
    }
    return core.Table(
        **_panel_fields(header, queries, height=height, instant=True, form="table"),
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
        ],
        overrides=[
            _override(state_column, state_cells),
            *(_override(name, {"unit": column.unit}) for name, column in columns.items() if name != state_column),
        ],
        sortBy=[core.TableSortByField(displayName=state_column, desc=True)],
        extraJson={
            "fieldConfig": {
                "defaults": {"links": [_link(*link) for link in links.items()], "decimals": 2, "noValue": "-"}
            }
        },
    )


def _override(column: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "matcher": {"id": "byNames", "options": {"mode": "include", "names": [column]}},
        "properties": [{"id": name, "value": value} for name, value in properties.items()],
    }


def heatmap(header: PanelHeader, query: PanelQuery, *, of_buckets: bool = False) -> Any:
    """Return a row of cells for each series, coloured by value, or for each bucket if the query has them by `le`."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": header.unit},
        "color": {"mode": "scheme", "scheme": "Turbo", "steps": 64, "fill": "dark-orange", "reverse": False},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": False},
        "yAxis": {"axisPlacement": "left"},
    }
    form = "heatmap" if of_buckets else "time_series"
    return core.Heatmap(**_panel_fields(header, [query], height=8, form=form), extraJson={"options": options})


def text(content: str, width: int = 12) -> Any:
    return core.Text(
        content=content, mode="markdown", gridPos=core.GridPos(h=11, w=width, x=0, y=0), maxDataPoints=None
    )


def fit(panels: Sequence[Any]) -> Sequence[Any]:
    """Set the width of the panels of a row by their number, and their height; panels of the whole width keep it."""
    height = max(panel.gridPos.h for panel in panels)
    width = COLUMNS if len(panels) == 1 else 8 if len(panels) % 3 == 0 else 12
    for panel in panels:
        if panel.gridPos.w < COLUMNS:
            panel.gridPos.w, panel.gridPos.h = width, height
    return panels


def _link(title: str, url: str) -> dict[str, Any]:
    """Return a link of a page or a cell; without a URL, a list of all dashboards of diag."""
    return {
        "title": title,
        "type": "link" if url else "dashboards",
        "icon": "external link",
        "tooltip": title,
        "tags": [] if url else ["diag"],
        "asDropdown": not url,
        "targetBlank": bool(url),
        "includeVars": not url,
        "keepTime": not url,
        "url": url,
    }


def _value_mappings(states: States) -> list[dict[str, Any]]:
    options = {str(value): {"text": name, "color": color, "index": value} for value, (name, color) in states.items()}
    return [{"type": "value", "options": options}]


def _threshold_steps(threshold: Threshold | None) -> list[dict[str, Any]]:
    if threshold is None:
        return [{"value": None, "color": PLAIN}]
    return [{"value": None, "color": threshold.below}, {"value": threshold.value, "color": threshold.above}]


def _panel_fields(
    header: PanelHeader, queries: Iterable[PanelQuery], height: int, instant: bool = False, form: str = "time_series"
) -> dict[str, Any]:
    return {
        "title": header.title,
        "description": header.description,
        "targets": [
            {
                "refId": chr(65 + at),
                "expr": query.promql,
                "legendFormat": query.legend or "__auto",
                "format": form,
                "instant": instant,
                "range": not instant,
                "datasource": DATA_SOURCE,
            }
            for at, query in enumerate(queries)
        ],
        "maxDataPoints": None,
        "gridPos": core.GridPos(h=height, w=header.width, x=0, y=0),
    }


# -- the dashboard


@dataclass(frozen=True)
class DashboardPage:
    """One dashboard: titled rows of panels, variables by name, annotations as expression, title and colour.

    `inputs` are text boxes: label and initial value by name.
    """

    uid: str
    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[Any]]]
    variables: Mapping[str, QueryVariable]
    annotations: Mapping[str, tuple[str, str, str]]
    links: Mapping[str, str]
    inputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def render(page: DashboardPage) -> str:
    """Return the dashboard as the text of a JSON file."""
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus", "hide": 0}
    ]
    for name, variable in page.variables.items():
        several = not variable.initial
        chosen = ALL if several else {"selected": True, "text": variable.initial, "value": variable.initial}
        query = {
            "name": name,
            "type": "query",
            "query": variable.query,
            "definition": variable.query,
            "regex": variable.regex,
            "datasource": DATA_SOURCE,
            "current": chosen,
            "includeAll": several,
            "multi": several,
            **({"allValue": ".*"} if several and not variable.hidden else {}),
            "refresh": 2,
            "sort": 1,
            "hide": 2 if variable.hidden else 0,
        }
        variables.append(query)
    for name, (label, value) in page.inputs.items():
        chosen = {"selected": True, "text": value, "value": value}
        variables.append(
            {"name": name, "label": label, "type": "textbox", "query": value, "current": chosen, "hide": 0}
        )
    annotations = [
        {
            "name": name,
            "datasource": DATA_SOURCE,
            "enable": True,
            "hide": False,
            "iconColor": color,
            "expr": promql,
            "step": "15s",
            "titleFormat": title,
        }
        for name, (promql, title, color) in page.annotations.items()
    ]
    dashboard = core.Dashboard(
        title=page.title,
        description=page.description,
        uid=page.uid,
        tags=["diag", "vllm"],
        timezone="browser",
        refresh="30s",
        graphTooltip=1,
        time=core.Time("now-1h", "now"),
        panels=_place(page.rows),
        templating=core.Templating(list=variables),
        annotations=core.Annotations(list=annotations),
        links=[_link(title, url) for title, url in page.links.items()],
    )
    content = json.loads(json.dumps(dashboard, cls=DashboardEncoder))
    return json.dumps(_modernize(content), indent=1, ensure_ascii=False) + "\n"


def _modernize(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Convert the output of grafanalib to today's model: without removed keys and without nulls."""
    done = _select_keys("dashboard", {**dashboard, "schemaVersion": SCHEMA_VERSION})
    panels = []
    for number, content in enumerate(done["panels"], 1):
        if content["type"] == "row":
            panels.append(_select_keys("row", {**content, "id": number}))
            continue
        panel = _select_keys("panel", {**content, "id": number, "datasource": DATA_SOURCE})
        panel["targets"] = [_select_keys("target", target) for target in panel["targets"]]
        config = panel["fieldConfig"]
        defaults = _without_nulls(config.get("defaults", {}))
        custom = _without_nulls(defaults.pop("custom", {}))
        custom.pop("displayMode", None)  # the old key for how a cell of a table is drawn
        panel["fieldConfig"] = {
            "defaults": {**defaults, **({"custom": custom} if custom else {})},
            "overrides": config.get("overrides", []),
        }
        panels.append(panel)
    return {**done, "panels": panels}


def _select_keys(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: content[key] for key in KEYS[kind].split() if content.get(key) is not None}


def _without_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value is not None}


def _place(rows: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
    """Place rows one below the other, and their panels from left to right."""
    placed: list[Any] = []
    y = 0
    for title, panels in rows:
        placed.append(core.RowPanel(title=title, gridPos=core.GridPos(h=1, w=COLUMNS, x=0, y=y)))
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.gridPos.w > COLUMNS:
                x, y, height = 0, y + height, 0
            panel.gridPos = core.GridPos(h=panel.gridPos.h, w=panel.gridPos.w, x=x, y=y)
            x, height = x + panel.gridPos.w, max(height, panel.gridPos.h)
        y += height
        placed.extend(panels)
    return placed
