"""Panels of a dashboard, one function per kind."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafanalib import core

COLUMNS = 24
"""The width of a page."""
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GOOD, BAD, NEUTRAL = "green", "red", "blue"
States = Mapping[int, tuple[str, str]]
"""Text and colour of each value."""


@dataclass(frozen=True)
class PanelQuery:
    """One expression of a panel; `legend` may hold {{label}}."""

    promql: str
    legend: str = ""


@dataclass(frozen=True)
class PanelHeader:
    """What every panel has. `description` says what healthy looks like; `unit` is Grafana's id; a page is 24 wide."""

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
class TableColumn:
    """One column of a table and the unit of its values."""

    promql: str
    unit: str = "short"


def time_series(header: PanelHeader, queries: Iterable[PanelQuery], threshold: Threshold | None = None) -> Any:
    """Lines over time, with a threshold as a dashed line."""
    return core.TimeSeries(
        **_common(header, queries, height=8),
        unit=header.unit,
        thresholds=_threshold_steps(threshold),
        thresholdsStyleMode="dashed" if threshold else "off",
        fillOpacity=8,
        showPoints="never",
        tooltipMode="multi",
        tooltipSort="desc",
        axisSoftMin=0,
        extraJson={"options": {"legend": {"showLegend": True}}},
    )


def stat(header: PanelHeader, promql: str, threshold: Threshold | None = None) -> Any:
    """One number, coloured by its threshold; 0 without data."""
    return core.Stat(
        **_common(header, [PanelQuery(promql)], height=4, instant=True),
        format=header.unit,
        thresholds=_threshold_steps(threshold),
        graphMode="none",
        reduceCalc="lastNotNull",
        noValue="0",
    )


def state_timeline(header: PanelHeader, queries: Iterable[PanelQuery], states: States) -> Any:
    """A bar for each series, in the colour of its state."""
    return core.StateTimeline(
        **_common(header, queries, height=8),
        mappings=_value_mappings(states),
        thresholds=_threshold_steps(None),
        colorMode="thresholds",
        showValue="never",
        extraJson={"options": {"legend": {"showLegend": True}}},
    )


def table(header: PanelHeader, columns: Mapping[str, TableColumn], states: States, address: str) -> Any:
    """A row for each subject; the first column is a state, in its colour, and the table is sorted by it.

    `address` is where a cell leads to.
    """
    state_column = next(iter(columns))
    names = {f"Value #{chr(65 + at)}": name for at, name in enumerate(columns)}
    queries = [PanelQuery(column.promql) for column in columns.values()]
    link = dashboard_link("this server alone", address)
    return core.Table(
        **_common(header, queries, height=9, instant=True, form="table"),
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
        ],
        overrides=[
            _override(state_column, _state_cells(states)),
            *(_override(name, {"unit": column.unit}) for name, column in columns.items() if name != state_column),
        ],
        sortBy=[core.TableSortByField(displayName=state_column, desc=True)],
        extraJson={"fieldConfig": {"defaults": {"links": [link], "decimals": 2}}},
    )


def _override(column: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "matcher": {"id": "byNames", "options": {"mode": "include", "names": [column]}},
        "properties": [{"id": name, "value": value} for name, value in properties.items()],
    }


def _state_cells(states: States) -> dict[str, Any]:
    """The state in words, on its colour."""
    steps = [{"value": value or None, "color": color} for value, (_, color) in states.items()]
    return {
        "mappings": _value_mappings(states),
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom.cellOptions": {"type": "color-background"},
    }


def heatmap(header: PanelHeader, query: PanelQuery) -> Any:
    """A row of cells for each series, coloured by value."""
    return _cells(header, query, "time_series")


def histogram(header: PanelHeader, query: PanelQuery) -> Any:
    """A row of cells for each bucket, coloured by what fell into it; the query has the buckets by `le`."""
    return _cells(header, query, "heatmap")


def _cells(header: PanelHeader, query: PanelQuery, form: str) -> Any:
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
    return core.Heatmap(**_common(header, [query], height=8, form=form), extraJson={"options": options})


def text(content: str, width: int = 12) -> Any:
    """Markdown."""
    return core.Text(content=content, mode="markdown", gridPos=core.GridPos(h=8, w=width, x=0, y=0), maxDataPoints=None)


def fit(panels: Sequence[Any]) -> Sequence[Any]:
    """The panels of a row as wide as their number allows; those of the whole width keep it."""
    width = COLUMNS if len(panels) == 1 else 8 if len(panels) % 3 == 0 else 12
    for panel in panels:
        if panel.gridPos.w < COLUMNS:
            panel.gridPos.w = width
    return panels


def dashboard_link(title: str, url: str) -> dict[str, Any]:
    """A link of a page or a cell; without a URL, the list of all dashboards of ours."""
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
        return [{"value": None, "color": GOOD}]
    return [{"value": None, "color": threshold.below}, {"value": threshold.value, "color": threshold.above}]


def _common(
    header: PanelHeader, queries: Iterable[PanelQuery], height: int, instant: bool = False, form: str = "time_series"
) -> dict[str, Any]:
    return {
        "title": header.title,
        "description": header.description,
        "targets": _targets(queries, instant, form),
        "maxDataPoints": None,
        "gridPos": core.GridPos(h=height, w=header.width, x=0, y=0),
    }


def _targets(queries: Iterable[PanelQuery], instant: bool, form: str) -> list[dict[str, Any]]:
    return [
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
    ]
