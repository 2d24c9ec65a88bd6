"""A dashboard as Grafana 11 to 13 reads it.

grafanalib writes the model of Grafana 4 to 8 (schema 12, with keys that were removed since): `modernized` brings it up
to date. Keys: the JSON schema of Grafana's foundation SDK.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grafanalib import core
from grafanalib._gen import DashboardEncoder

from diag.artefacts.grafana.panels import COLUMNS, DATA_SOURCE, dashboard_link

SCHEMA_VERSION = 42
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


@dataclass(frozen=True)
class DashboardPage:
    """One dashboard: titled rows of panels, variables by name, annotations as expression, title and colour.

    `inputs` are variables that the reader types in: label and first value by name.
    """

    uid: str
    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[Any]]]
    variables: Mapping[str, str]
    annotations: Mapping[str, tuple[str, str, str]]
    links: Mapping[str, str]
    inputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def render(page: DashboardPage) -> str:
    """The dashboard as a JSON file."""
    variables = [_variable(name, query) for name, query in page.variables.items()]
    variables += [_input(name, label, value) for name, (label, value) in page.inputs.items()]
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
        templating=core.Templating(list=[_data_source_variable(), *variables]),
        annotations=core.Annotations(list=[_annotation(name, *rest) for name, rest in page.annotations.items()]),
        links=[dashboard_link(title, url) for title, url in page.links.items()],
    )
    content = json.loads(json.dumps(dashboard, cls=DashboardEncoder))
    return json.dumps(modernized(content), indent=1, ensure_ascii=False) + "\n"


def modernized(dashboard: dict[str, Any]) -> dict[str, Any]:
    """What grafanalib wrote, in today's model: without removed keys and without nulls."""
    done = _kept("dashboard", {**dashboard, "schemaVersion": SCHEMA_VERSION})
    done["panels"] = [_panel(panel, at) for at, panel in enumerate(done["panels"], 1)]
    return done


def _panel(panel: dict[str, Any], number: int) -> dict[str, Any]:
    if panel["type"] == "row":
        return _kept("row", {**panel, "id": number})
    done = _kept("panel", {**panel, "id": number, "datasource": DATA_SOURCE})
    done["targets"] = [_kept("target", target) for target in done["targets"]]
    done["fieldConfig"] = _field_config(done["fieldConfig"])
    return done


def _field_config(config: dict[str, Any]) -> dict[str, Any]:
    """Without the table's old key for how a cell is drawn, and without empty keys."""
    defaults = _without_nulls(config.get("defaults", {}))
    custom = _without_nulls(defaults.pop("custom", {}))
    custom.pop("displayMode", None)
    return {
        "defaults": {**defaults, **({"custom": custom} if custom else {})},
        "overrides": config.get("overrides", []),
    }


def _kept(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: content[key] for key in KEYS[kind].split() if content.get(key) is not None}


def _without_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value is not None}


def _placed(rows: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
    """Rows one under the other, their panels from left to right."""
    placed: list[Any] = []
    y = 0
    for title, panels in rows:
        placed.append(core.RowPanel(title=title, gridPos=core.GridPos(h=1, w=COLUMNS, x=0, y=y)))
        y = _place_row(panels, y + 1)
        placed.extend(panels)
    return placed


def _place_row(panels: Sequence[Any], y: int) -> int:
    """Give panels their places from this line on; the first line below them."""
    x = height = 0
    for panel in panels:
        if x + panel.gridPos.w > COLUMNS:
            x, y, height = 0, y + height, 0
        panel.gridPos = core.GridPos(h=panel.gridPos.h, w=panel.gridPos.w, x=x, y=y)
        x, height = x + panel.gridPos.w, max(height, panel.gridPos.h)
    return y + height


def _data_source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "query": query,
        "definition": query,
        "datasource": DATA_SOURCE,
        "current": ALL,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "refresh": 2,
        "sort": 1,
        "hide": 0,
    }


def _input(name: str, label: str, value: str) -> dict[str, Any]:
    chosen = {"selected": True, "text": value, "value": value}
    return {"name": name, "label": label, "type": "textbox", "query": value, "current": chosen, "hide": 0}


def _annotation(name: str, promql: str, title: str, color: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": DATA_SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": promql,
        "step": "15s",
        "titleFormat": title,
    }
