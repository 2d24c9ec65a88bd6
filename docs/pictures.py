"""Draws the pictures of the documentation in Chromium: reports, dashboards of a replayed fleet, pages of the site.

`nox -s pictures` does all of it; `python docs/pictures.py reports site dashboards` chooses. Needs chromium, for the
dashboards also Prometheus and npm, which installs the panel libraries of docs/panels into $DIAG_CACHE.
"""

import contextlib
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))

from support.live.server import free_port  # noqa: E402

from diag.commands import doctor  # noqa: E402
from diag.commands.observe import ObserveOptions  # noqa: E402
from diag.report import html  # noqa: E402

PICTURES, BUILD = ROOT / "docs" / "_static", ROOT / "docs" / "_build"
WIDTHS = {1200: 1100, 390: 1700}
"""The widths of the pictures and their greatest height, in pixels."""
REPORTS = ("kv_cascade", "tp2_long_stall", "gpu_thermal_throttling", "engine_dead", "requests_failing", "healthy")
ENTRIES = ("index", "sick-server", "generated/incidents/index", "platform", "sizing", "architecture")
ILL, DOWN = "kv_cascade", "healthy"
"""Two replayed servers: the second is down when the dashboards are drawn."""
UP_FOR, DOWN_FOR, SPAN, STEP = 150.0, 170.0, 600.0, 5.0
DASHBOARDS = {"fleet": 1260}
INCIDENT = "kv_eviction_cascade"
COLOURS = {
    "light-blue": "#9db8d9",
    "dark-blue": "#1f4b85",
    "red": "#d32f2f",
    "orange": "#b45309",
    "yellow": "#d9a400",
    "blue": "#2563a8",
    "green": "#15803d",
    "text": "#64748b",
}
CHROMIUM = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"


@contextmanager
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM.split())


def picture(page: Page, name: str, most: int) -> None:
    """Save what the page shows, from its top on, `most` pixels high at most."""
    size = page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
    page.screenshot(
        path=PICTURES / f"{name}.png",
        full_page=True,
        clip={"x": 0, "y": 0, "width": size[0], "height": min(size[1], most)},
    )
    print(PICTURES / f"{name}.png")


# -- reports and the site ---------------------------------------------------------------------------------------------


def reports(chromium: Any) -> None:
    for name in REPORTS:
        with contextlib.chdir(ROOT):
            report = doctor.run(ObserveOptions([f"tests/recordings/{name}"]))
        for width, most in WIDTHS.items():
            page = chromium.new_page(viewport={"width": width, "height": 900})
            page.set_content(html.render(report))
            picture(page, f"report-{name}-{width}", most)
            if name == ILL:
                page.emulate_media(color_scheme="dark")
                picture(page, f"report-{name}-{width}-dark", most)


def site(chromium: Any) -> None:
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "docs", str(BUILD)], cwd=ROOT, check=True)
    for name in ENTRIES:
        for width, most in WIDTHS.items():
            page = chromium.new_page(viewport={"width": width, "height": 900})
            page.goto((BUILD / f"{name}.html").as_uri())
            picture(page, f"site-{name.replace('/', '-')}-{width}", most)
    printed = chromium.new_page()
    for file in sorted((BUILD / "generated" / "incidents").glob("*.html")):
        printed.goto(file.as_uri())
        pages = len(re.findall(rb"/Type\s*/Page\b", printed.pdf(prefer_css_page_size=True)))
        most = 1 if file.stem == "oncall" else 2
        if pages > most and file.stem not in ("index", "promql"):
            raise SystemExit(f"{file.stem}: {pages} printed pages, at most {most}")


# -- dashboards, drawn from a real Prometheus that scrapes replayed servers -------------------------------------------


def dashboards(chromium: Any) -> None:
    panels = Path(os.environ.get("DIAG_CACHE", "~/.cache/diag")).expanduser() / "panels"
    shutil.copytree(ROOT / "docs" / "panels", panels, dirs_exist_ok=True)
    for command in (["npm", "install", "--no-audit", "--no-fund"], ["npm", "run", "build"]):
        subprocess.run(command, cwd=panels, check=True, stdout=subprocess.DEVNULL)
    with _fleet() as prometheus:
        for name, most in DASHBOARDS.items():
            (panels / "dist" / "panels.json").write_text(json.dumps(_drawn(prometheus, name)))
            with _served(panels / "dist") as url:
                page = chromium.new_page(viewport={"width": 1200, "height": 900})
                page.goto(url)
                page.wait_for_timeout(4000)
                picture(page, name, most)


@contextmanager
def _fleet() -> Iterator[str]:
    """Replay both servers and scrape them with the rules as shipped, stop one of them; the URL of the Prometheus."""
    ports = {ILL: free_port(), DOWN: free_port(), "prometheus": free_port()}
    config = {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "rule_files": [str(ROOT / "alerts/diag.rules.yaml")],
        "scrape_configs": [
            {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{ports[name]}" for name in (ILL, DOWN)]}]}
        ],
    }
    url = f"127.0.0.1:{ports['prometheus']}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        commands = {
            name: [sys.executable, "-m", "diag", "replay", f"tests/recordings/{name}", "--listen", f"127.0.0.1:{port}"]
            for name, port in ports.items()
        }
        commands["prometheus"] = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--web.listen-address={url}"]
        commands["prometheus"].append(f"--storage.tsdb.path={folder}/data")
        processes = {}
        for name, command in commands.items():
            processes[name] = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
            stack.callback(processes[name].wait)
            stack.callback(processes[name].kill)
        time.sleep(UP_FOR)
        processes[DOWN].kill()
        time.sleep(DOWN_FOR)
        yield f"http://{url}"


def _drawn(prometheus: str, name: str) -> dict[str, Any]:
    """Return the panels of a dashboard with the answers to their queries."""
    dashboard = json.loads((ROOT / f"dashboards/{name}.json").read_text())
    now = time.time()
    shown = [_panel(each, prometheus, now) for each in _repeated(dashboard["panels"], prometheus, now)]
    return {"title": dashboard["title"], "panels": shown}


def _repeated(panels: list[dict[str, Any]], prometheus: str, now: float) -> Iterator[dict[str, Any]]:
    """Yield each panel in its place; the repeated one for each number that the incident compares, three in a row."""
    lower = 0
    for panel in panels:
        place = panel["gridPos"]
        if "repeat" not in panel:
            yield panel | {"gridPos": place | {"y": place["y"] + lower}}
            continue
        known = f'incident:diag_condition:threshold{{incident="{INCIDENT}", unit!="bool"}}'
        for at, found in enumerate(_asked(prometheus, "query", known, time=now)):
            labels = found["metric"]
            lower = at // 3 * place["h"]
            text = json.dumps(panel["targets"]).replace("$signal", labels["series"])
            own = {"x": at % 3 * 8, "y": place["y"] + lower, "w": 8, "h": place["h"]}
            name = {"title": labels["condition"], "id": f"{panel['id']}-{at}"}
            yield panel | name | {"targets": json.loads(text), "gridPos": own}


def _panel(panel: dict[str, Any], prometheus: str, now: float) -> dict[str, Any]:
    place = panel["gridPos"]
    shown = {name: place[name] for name in "xywh"} | {name: panel.get(name, "") for name in ("id", "type", "title")}
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    steps = defaults.get("thresholds", {}).get("steps", [])
    shown |= {"unit": defaults.get("unit", ""), "start": (now - SPAN) * 1000, "end": now * 1000, "step": STEP * 1000}
    if panel["type"] == "text":
        return shown | {"html": MarkdownIt().render(panel["options"]["content"])}
    if panel["type"] == "stat":
        return shown | _stat(panel, steps, prometheus, now)
    if panel["type"] == "table":
        return shown | _table(panel, prometheus, now)
    series = []
    for target in panel.get("targets", []):
        times = {"start": now - SPAN, "end": now, "step": STEP}
        for one in _asked(prometheus, "query_range", _filled(target["expr"]), **times):
            values = [[unix * 1000, float(value)] for unix, value in one["values"] if value != "NaN"]
            series.append({"name": _legend(target["legendFormat"], one["metric"]), "values": values})
    limit = steps[1]["value"] if len(steps) > 1 else None
    if panel["type"] == "state-timeline":
        colours = {float(value): each["color"] for value, each in defaults["mappings"][0]["options"].items()}
        for one in series:
            by_time = {round((unix / 1000 - now + SPAN) / STEP): value for unix, value in one["values"]}
            one["colors"] = [COLOURS.get(colours.get(by_time.get(at, -1.0), "")) for at in range(int(SPAN / STEP) + 1)]
    return shown | {"series": series, "threshold": limit}


def _stat(panel: dict[str, Any], steps: list[dict[str, Any]], prometheus: str, now: float) -> dict[str, Any]:
    (target,) = panel["targets"]
    (answer, *_) = _asked(prometheus, "query", _filled(target["expr"]), time=now) or [{"metric": {}, "value": [0, "0"]}]
    value = float(answer["value"][1])
    colour = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
    named = panel["options"]["textMode"] == "name"
    text = _legend(target["legendFormat"], answer["metric"]) if named else f"{value:.3g}"
    return {"value": text, "color": COLOURS[colour]}


def _table(panel: dict[str, Any], prometheus: str, now: float) -> dict[str, Any]:
    """Join the answers by the labels that all have, as Grafana's transformation "merge" does."""
    names = panel["transformations"][1]["options"]["renameByName"]
    (state, *_) = names.values()
    mapping = panel["fieldConfig"]["overrides"][0]["properties"][0]["value"][0]["options"]
    rows: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    answers = {
        target["refId"]: _asked(prometheus, "query", _filled(target["expr"]), time=now) for target in panel["targets"]
    }
    labels = [{label for one in answer for label in one["metric"]} for answer in answers.values() if answer]
    shared = set.intersection(*labels)
    for ref, answer in answers.items():
        for one in answer:
            key = tuple(sorted((label, value) for label, value in one["metric"].items() if label in shared))
            row = rows.setdefault(key, {})
            row |= one["metric"]
            row[names[f"Value #{ref}"]] = float(one["value"][1])
    ordered = sorted(rows.values(), key=lambda row: -row.get(state, 0.0))
    cells = {}
    for at, row in enumerate(ordered):
        known = mapping[f"{row.get(state, 0.0):.0f}"]
        cells[f"{at}_{state}"] = {
            "text": known["text"],
            "backgroundColor": COLOURS[known["color"]],
            "textColor": "#fff",
        }
        if "since" in row:
            row["since"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(row["since"] / 1000))
        row |= {name: f"{value:.3g}" for name, value in row.items() if isinstance(value, float) and name != state}
    labels = dict.fromkeys(label for row in ordered for label in row if label not in names.values())
    return {
        "columns": [state, *labels, *(name for name in names.values() if name != state)],
        "rows": ordered,
        "cells": cells,
    }


def _filled(promql: str) -> str:
    filled = (
        promql.replace("$__rate_interval", "1m")
        .replace("$gpu_cost", "2")
        .replace("$incident", INCIDENT)
        .replace("${state:pipe}", "none")
    )
    return re.sub(r"\$(?:job|instance|model|engine|gpu)\b", ".*", filled)


def _legend(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), text)


def _asked(prometheus: str, api: str, promql: str, **more: float) -> list[Any]:
    form = urllib.parse.urlencode({"query": promql, **more}).encode()
    with urllib.request.urlopen(f"{prometheus}/api/v1/{api}", form) as answer:
        return list(json.load(answer)["data"]["result"])


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["reports", "site", "dashboards"]
    with browser() as chromium:
        for section in chosen:
            {"reports": reports, "site": site, "dashboards": dashboards}[section](chromium)
