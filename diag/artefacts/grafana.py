"""Panels and pages as Grafana 11 to 13 reads them. The only file that speaks grafanalib.

grafanalib writes the model of Grafana 4 to 8 (schema 12, with keys that were removed since): `finish` brings it to the
present one. Keys: the JSON schema of Grafana's foundation SDK.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafanalib import core
from grafanalib._gen import DashboardEncoder

SCHEMA_VERSION = 42
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ALL = {"selected": True, "text": ["All"], "value": ["$__all"]}
KEYS = {
    "dashboard": "uid title description tags timezone editable graphTooltip time refresh schemaVersion"
    " panels templating annotations links",
    "panel": "type id targets title description transparent datasource gridPos links maxDataPoints transformations"
    " interval options fieldConfig",
    "row": "type id title gridPos collapsed panels",
    "target": "refId expr legendFormat format instant range datasource",
}
"""What is kept of each kind of object."""
GOOD, BAD, NEUTRAL = "green", "red", "blue"
States = Mapping[int, tuple[str, str]]
"""Text and colour of each value."""


@dataclass(frozen=True)
class Query:
    """One expression of a panel; `legend` may hold {{label}}."""

    promql: str
    legend: str = ""


@dataclass(frozen=True)
class Head:
    """What every panel has: `good` says what good looks like; of 24 columns it takes `width`."""

    title: str
    good: str
    unit: str = "none"
    width: int = 12


@dataclass(frozen=True)
class Limit:
    """A line in a panel: the colour below it and the colour from it on."""

    value: float
    below: str = GOOD
    above: str = BAD


@dataclass(frozen=True)
class DashboardPage:
    """One dashboard: titled rows of panels, variables by name, annotations as expression, title and colour."""

    uid: str
    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[Any]]]
    variables: Mapping[str, str]
    annotations: Mapping[str, tuple[str, str, str]]
    links: Mapping[str, str]


def series(head: Head, queries: Iterable[Query], limit: Limit | None = None) -> Any:
    """Lines over time, with a limit as a line."""
    return core.TimeSeries(
        **_common(head, queries, height=8),
        unit=head.unit,
        thresholds=_steps(limit),
        thresholdsStyleMode="dashed" if limit else "off",
        fillOpacity=8,
        showPoints="never",
        tooltipMode="multi",
        tooltipSort="desc",
        axisSoftMin=0,
        extraJson={"options": {"legend": {"showLegend": True}}},
    )


def number(head: Head, promql: str, limit: Limit | None = None) -> Any:
    """One number, coloured by its limit; 0 where there is none."""
    return core.Stat(
        **_common(head, [Query(promql)], height=4, instant=True),
        format=head.unit,
        thresholds=_steps(limit),
        graphMode="none",
        reduceCalc="lastNotNull",
        noValue="0",
    )


def states(head: Head, queries: Iterable[Query], names: States) -> Any:
    """A bar for each series, in the colour of its state."""
    return core.StateTimeline(
        **_common(head, queries, height=8),
        mappings=_mappings(names),
        thresholds=_steps(None),
        colorMode="thresholds",
        showValue="never",
        extraJson={"options": {"legend": {"showLegend": True}}},
    )


def table(head: Head, columns: Mapping[str, Query], names: States, address: str) -> Any:
    """A row for each subject; the first column is a state, in its colour, and what is sorted by.

    `address` is where a cell leads to. Every unit is in the column's name: Grafana's schema has no overrides by text.
    """
    by = next(iter(columns))
    letters = {f"Value #{chr(65 + at)}": name for at, name in enumerate(columns)}
    steps = [{"value": value or None, "color": color} for value, (_, color) in names.items()]
    state = {"thresholds": {"mode": "absolute", "steps": steps}, "custom.cellOptions": {"type": "color-background"}}
    return core.Table(
        **_common(head, columns.values(), height=9, instant=True, form="table"),
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": letters}},
        ],
        overrides=[
            {
                "matcher": {"id": "byNames", "options": {"mode": "include", "names": [by]}},
                "properties": [{"id": key, "value": value} for key, value in state.items()],
            }
        ],
        sortBy=[core.TableSortByField(displayName=by, desc=True)],
        extraJson={"fieldConfig": {"defaults": {"links": [_link("this server alone", address)], "decimals": 2}}},
    )


def heat(head: Head, query: Query) -> Any:
    """A row of cells for each series, coloured by value."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": head.unit},
        "color": {"mode": "scheme", "scheme": "Turbo", "steps": 64, "fill": "dark-orange", "reverse": False},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": False},
        "yAxis": {"axisPlacement": "left"},
    }
    return core.Heatmap(**_common(head, [query], height=8), extraJson={"options": options})


def text(content: str, width: int = 12) -> Any:
    """Markdown."""
    return core.Text(content=content, mode="markdown", gridPos=core.GridPos(h=8, w=width, x=0, y=0), maxDataPoints=None)


def _mappings(names: States) -> list[dict[str, Any]]:
    options = {str(value): {"text": text, "color": color, "index": value} for value, (text, color) in names.items()}
    return [{"type": "value", "options": options}]


def _common(
    head: Head, queries: Iterable[Query], height: int, instant: bool = False, form: str = "time_series"
) -> dict[str, Any]:
    return {
        "title": head.title,
        "description": head.good,
        "targets": _targets(queries, instant, form),
        "maxDataPoints": None,
        "gridPos": core.GridPos(h=height, w=head.width, x=0, y=0),
    }


def fit(panels: Sequence[Any]) -> Sequence[Any]:
    """The panels of a row as wide as their number lets them be; those that take the whole width keep it."""
    width = COLUMNS if len(panels) == 1 else 8 if len(panels) % 3 == 0 else 12
    for panel in panels:
        if panel.gridPos.w < COLUMNS:
            panel.gridPos.w = width
    return panels


def render(page: DashboardPage) -> str:
    """The dashboard as a JSON file."""
    dashboard = core.Dashboard(
        title=page.title,
        description=page.description,
        uid=page.uid,
        tags=["diag", "vllm"],
        timezone="browser",
        refresh="30s",
        graphTooltip=1,
        time=core.Time("now-1h", "now"),
        panels=_placed(page.rows),
        templating=core.Templating(list=[_source(), *(_variable(*each) for each in page.variables.items())]),
        annotations=core.Annotations(list=[_annotation(name, *each) for name, each in page.annotations.items()]),
        links=[_link(title, url) for title, url in page.links.items()],
    )
    content = json.loads(json.dumps(dashboard, cls=DashboardEncoder))
    return json.dumps(finish(content), indent=1, ensure_ascii=False) + "\n"


def finish(dashboard: dict[str, Any]) -> dict[str, Any]:
    """What grafanalib wrote as the present model: no removed keys, none that is null."""
    done = _kept("dashboard", {**dashboard, "schemaVersion": SCHEMA_VERSION})
    done["panels"] = [_panel(panel, at) for at, panel in enumerate(done["panels"], 1)]
    return done


def _panel(panel: dict[str, Any], number: int) -> dict[str, Any]:
    if panel["type"] == "row":
        return _kept("row", {**panel, "id": number})
    done = _kept("panel", {**panel, "id": number, "datasource": SOURCE})
    done["targets"] = [_kept("target", each) for each in done["targets"]]
    done["fieldConfig"] = _field_config(done["fieldConfig"])
    return done


def _field_config(config: dict[str, Any]) -> dict[str, Any]:
    """Without the table's old key for how a cell is drawn, and without empty keys."""
    defaults = _filled(config.get("defaults", {}))
    custom = _filled(defaults.pop("custom", {}))
    custom.pop("displayMode", None)
    return {
        "defaults": {**defaults, **({"custom": custom} if custom else {})},
        "overrides": config.get("overrides", []),
    }


def _kept(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: content[key] for key in KEYS[kind].split() if content.get(key) is not None}


def _filled(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value is not None}


def _targets(queries: Iterable[Query], instant: bool, form: str) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(65 + at),
            "expr": query.promql,
            "legendFormat": query.legend or "__auto",
            "format": form,
            "instant": instant,
            "range": not instant,
            "datasource": SOURCE,
        }
        for at, query in enumerate(queries)
    ]


def _steps(limit: Limit | None) -> list[dict[str, Any]]:
    if limit is None:
        return [{"value": None, "color": GOOD}]
    return [{"value": None, "color": limit.below}, {"value": limit.value, "color": limit.above}]


def _placed(rows: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
    """Rows one under the other, their panels from left to right."""
    placed: list[Any] = []
    y = 0
    for title, panels in rows:
        placed.append(core.RowPanel(title=title, gridPos=core.GridPos(h=1, w=COLUMNS, x=0, y=y)))
        y = _fill(panels, y + 1)
        placed.extend(panels)
    return placed


def _fill(panels: Sequence[Any], y: int) -> int:
    """Give panels their places from this line on; the first line below them."""
    x = height = 0
    for panel in panels:
        if x + panel.gridPos.w > COLUMNS:
            x, y, height = 0, y + height, 0
        panel.gridPos = core.GridPos(h=panel.gridPos.h, w=panel.gridPos.w, x=x, y=y)
        x, height = x + panel.gridPos.w, max(height, panel.gridPos.h)
    return y + height


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "query": query,
        "definition": query,
        "datasource": SOURCE,
        "current": ALL,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "refresh": 2,
        "sort": 1,
        "hide": 0,
    }


def _annotation(name: str, promql: str, title: str, color: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": promql,
        "step": "15s",
        "titleFormat": title,
    }


def _link(title: str, url: str) -> dict[str, Any]:
    """A link of the page; without a URL, the list of all dashboards of ours."""
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
