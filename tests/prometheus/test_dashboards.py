"""The generated dashboards: valid for Grafana, nothing dead in them, and every query answered by a real Prometheus."""

import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import jsonschema
import numpy as np
import pytest
from support import timelines
from support.alert_rules import in_no_recording, rules
from support.dashboards import PAGES, SIGNAL, panels, plain, queries
from support.paths import ROOT
from support.prometheus_server import ANY, Server, hasty, program, serving
from support.scenarios import gpu, memory, workers
from support.timelines import blocks
from support.waiting import until

from diag.artefacts.dashboards.pages import dashboards
from diag.artefacts.dashboards.shared import DashboardScope
from diag.artefacts.generate import files
from diag.artefacts.names import claim
from diag.artefacts.recording_rules import THRESHOLD, threshold_group
from diag.core.contract import Contract, Site
from diag.core.incident import Incident
from diag.knowledge.catalog import load
from diag.knowledge.signals.peers import PEERS
from diag.promql import STALE, Block, metric_names, parse

SCHEMA = ROOT / "tests" / "data" / "grafana-dashboard.schema.json"
"""grafana/grafana-foundation-sdk, Apache-2.0: the model of a dashboard in Grafana 11 to 13."""


EVERY_PAGE = pytest.mark.parametrize("page", PAGES)
OF_ALERTS = {"ALERTS", "ALERTS_FOR_STATE"}
"""Series that Prometheus itself makes of its alerts."""
EVERY_INCIDENT = pytest.mark.parametrize("incident", load(), ids=lambda incident: incident.id)


def test_four_dashboards_of_at_most_80_panels_and_400_kilobytes() -> None:
    assert set(PAGES) == {"fleet", "server", "gpus", "capacity"}
    assert [content["uid"] for content in PAGES.values()] == [f"diag-{name}" for name in PAGES]
    assert sum(len(panels(page)) for page in PAGES) <= 80
    assert sum(file.stat().st_size for file in (ROOT / "dashboards").iterdir()) < 400_000


BOARDS = {
    name.removeprefix("dashboards/").removesuffix(".json"): json.loads(text)
    for name, text in dashboards(load(), Contract(), per_incident=True).items()
}
"""All dashboards that `diag generate --dashboards incidents` writes."""


def test_a_dashboard_per_incident_is_written_on_request() -> None:
    assert BOARDS.keys() == PAGES.keys() | {incident.id for incident in load()}
    assert all(len(content["uid"]) <= 40 for content in BOARDS.values())


@cache
def validator() -> jsonschema.Draft7Validator:
    schema = json.loads(SCHEMA.read_text())
    # `any` in the SDK's TypeScript; its JSON schema writes every `any` as an object
    schema["definitions"]["DynamicConfigValue"]["properties"]["value"] = {}
    schema["definitions"]["MatcherConfig"]["properties"]["options"] = {}
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("page", BOARDS)
def test_a_page_is_valid(page: str) -> None:
    assert [error.message for error in validator().iter_errors(BOARDS[page])] == []


@EVERY_PAGE
def test_every_dashboard_variable_is_used(page: str) -> None:
    text = json.dumps(PAGES[page]["panels"])
    variables = PAGES[page]["templating"]["list"]
    for variable in variables:
        others = json.dumps([other.get("query") for other in variables])
        assert re.search(rf"\$\{{?{variable['name']}\b", text + others), variable["name"]


@EVERY_PAGE
def test_every_used_dashboard_variable_is_defined(page: str) -> None:
    known = {variable["name"] for variable in PAGES[page]["templating"]["list"]} | {"__rate_interval"}
    used = set(re.findall(r"\$\{?([a-zA-Z_]\w*)", " ".join(queries(page))))  # $1 is label_replace's, and left alone
    assert used <= known


@EVERY_PAGE
def test_no_panels_overlap(page: str) -> None:
    for one, other in combinations((panel["gridPos"] for panel in PAGES[page]["panels"]), 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart or above
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PAGES[page]["panels"])


@EVERY_PAGE
def test_every_panel_has_a_description_and_none_is_named_twice(page: str) -> None:
    shown = [panel for panel in panels(page) if panel["type"] != "text"]
    assert all(panel["title"] and panel["description"] for panel in shown)
    titles = [panel["title"] for panel in shown]
    assert len(titles) == len(set(titles))


@EVERY_INCIDENT
def test_every_threshold_of_an_incident_is_a_line_on_its_page(incident: Incident) -> None:
    lines = {
        panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
        for panel in BOARDS[incident.id]["panels"]
        if panel["type"] == "timeseries" and len(panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) > 1
    }
    for condition in incident.every_condition:
        limit = Contract().limit(condition.limit)
        assert any(condition.signal.name in title and value == limit for title, value in lines.items())


GRAFANA_UNITS = {
    "share": "percentunit",
    "seconds": "s",
    "bytes": "bytes",
    "celsius": "celsius",
    "watts": "watt",
    "bool": "bool_yes_no",
}


@EVERY_INCIDENT
def test_a_panel_of_a_signal_has_the_signals_unit(incident: Incident) -> None:
    """A signal of another unit is a plain number."""
    shown = {panel["title"]: unit(panel) for panel in BOARDS[incident.id]["panels"] if panel["type"] == "timeseries"}
    for condition in incident.every_condition:
        expected = GRAFANA_UNITS.get(condition.signal.unit, "short")
        title = rf"(.*: )?{re.escape(condition.signal.name)} ([<>]=?|=) .+"
        assert {unit for name, unit in shown.items() if re.fullmatch(title, name)} == {expected}


UNITS = {
    "Generation throughput": "count:tokens/s",
    "Token throughput": "count:tokens/s",
    "KV cache usage": "percentunit",
    "Preemptions": "ops",
    "GPU utilisation": "percentunit",
    "GPU power": "watt",
    "GPU power / limit": "percentunit",
    "SM clock": "hertz",
    **dict.fromkeys(
        ("Time to first token (TTFT)", "Inter-token latency (ITL)", "End-to-end latency", "Queue time"), "s"
    ),
    "Finished requests": "reqps",
    "Temperature margin": "celsius",
    "Share of time throttled": "percentunit",
    "Memory": "bytes",
    "PCIe and NVLink traffic": "Bps",
    "Saturation": "percentunit",
    "All-reduces / link bandwidth": "percentunit",
    "Energy per million tokens": "kwatth",
    "Cost per million output tokens": "currencyUSD",
}
COUNTS = {
    *("Critical alerts", "Warning alerts", "Highest burn rate", "Error budget burn rate"),
    *("Servers up / all", "Incidents now", "Requests waiting", "Requests", "Servers", "GPU faults", "Active NVLinks"),
    *("CPU cores used per worker", "Decode batch", "Prompt length", "Answer length"),
    "$signal",
}
"""Panels of plain numbers; a column of Servers, and a series of a signal, have units of their own."""


@EVERY_PAGE
def test_every_number_has_a_unit_unless_it_is_a_count(page: str) -> None:
    numbers = [panel for panel in panels(page) if panel["type"] not in {"text", "state-timeline"}]
    own = {panel["title"]: unit(panel) for panel in numbers}
    assert own == {title: UNITS.get(title, "short") for title in own}
    assert own.keys() <= UNITS.keys() | COUNTS


def test_latencies_are_quantiles() -> None:
    shown = {panel["title"]: panel["targets"] for panel in panels("server")}
    for title in ("Time to first token (TTFT)", "Inter-token latency (ITL)", "End-to-end latency", "Queue time"):
        assert [re.findall(r"p\d\d", target["legendFormat"])[-1] for target in shown[title]] == ["p50", "p95", "p99"]


def unit(panel: dict[str, Any]) -> str:
    if panel["type"] == "heatmap":
        return panel["options"]["cellValues"]["unit"]
    return panel["fieldConfig"]["defaults"].get("unit") or "short"


def test_the_columns_of_the_servers_table_have_units_and_states_are_words() -> None:
    (table,) = (panel for panel in panels("fleet") if panel["title"] == "Servers")
    overrides = table["fieldConfig"]["overrides"]
    values = {
        override["matcher"]["options"]["names"][0]: {part["id"]: part["value"] for part in override["properties"]}
        for override in overrides
    }
    units = {name: properties.get("unit") for name, properties in values.items()}
    assert units == {
        "state": None,
        "running": "short",
        "waiting": "short",
        "KV cache usage": "percentunit",
        "throughput": "count:tokens/s",
        "TTFT p50": "s",
        "TTFT p99": "s",
        "ITL p99": "s",
        "burn rate": "short",
    }
    names = {value: shown["text"] for value, shown in values["state"]["mappings"][0]["options"].items()}
    assert names == {"0": "ok", "1": "pending", "2": "info", "3": "warning", "4": "critical"}


RECORDED = {rule["record"] for rule in rules() if "record" in rule}


@EVERY_PAGE
def test_every_query_filters_by_the_variables(page: str) -> None:
    for text in queries(page):
        for name in metric_names(parse(plain(text))):
            chosen = 'instance=~"$instance"' if name in OF_ALERTS else 'job=~"$job", instance=~"$instance"'
            if name == THRESHOLD:  # which no server has
                chosen = ""
            elif name in RECORDED or (
                name.startswith("{__name__") and "${state" in text
            ):  # by the labels that the series has
                chosen = 'instance=~"$instance"'
            elif PEERS in text:  # to see who differs takes all of them
                chosen = "" if name in OF_ALERTS else 'job=~"$job", model_name=~"$model"'
            asked = re.findall(rf"(?<![\w:]){name}(?![\w:])(\{{[^}}]*\}})?", text)
            if name == SIGNAL and "$signal" in text:  # which the variable names
                asked = re.findall(r'\{__name__="\$signal"[^}]*\}', text)
            if name.startswith("{"):  # a selector that matches the metric's name
                asked = [
                    each for each in re.findall(r"(?<![\w:])\{(?:[^}$]|\$\{[^}]*\}|\$)*\}", text) if "__name__" in each
                ]
            assert asked and all(chosen in matchers for matchers in asked), (name, asked)


@EVERY_PAGE
def test_every_metric_exists(page: str) -> None:
    asked = {name for text in queries(page) for name in metric_names(parse(plain(text)))} - RECORDED
    assert in_no_recording(asked - OF_ALERTS) == set()


def test_no_query_is_too_long_to_be_read() -> None:
    longest = {title: max(map(len, queries(title))) for title in PAGES}
    assert {title: length for title, length in longest.items() if length > 1000} == {}


def test_the_fleet_says_what_is_wrong_where_and_since_when_with_links_to_server_and_runbook() -> None:
    site = Site(runbook_base_url="https://wiki.example/v")
    page = json.loads(dashboards(load(), Contract(site=site))["dashboards/fleet.json"])
    (table,) = (panel for panel in page["panels"] if panel["title"] == "Incidents now")
    assert table["transformations"][1]["options"]["renameByName"] == {"Value #A": "severity", "Value #B": "since"}
    signals, runbook = table["fieldConfig"]["defaults"]["links"]
    assert signals["url"].startswith(
        "/d/diag-server?var-incident=${__data.fields.incident}&var-instance=${__data.fields"
    )
    assert "${__url_time_range}" in signals["url"]
    assert runbook["url"].startswith("https://wiki.example/v/${__data.fields.incident}")


def test_server_has_a_panel_for_each_number_that_the_chosen_incident_compares() -> None:
    (signals,) = (panel for panel in panels("server") if panel["title"] == "$signal")
    assert (signals["repeat"], signals["repeatDirection"]) == ("signal", "h")
    variables = {variable["name"]: variable for variable in PAGES["server"]["templating"]["list"]}
    assert not variables["incident"]["multi"] and variables["signal"]["hide"] == 2
    pattern = re.compile(variables["signal"]["regex"].strip("/").replace("(?<", "(?P<"))
    group = threshold_group(load(), Contract())
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for incident in load():
        lines = [
            f'{THRESHOLD}{{condition="{rule["labels"]["condition"]}", series="{rule["labels"]["series"]}"}}'
            for rule in group["rules"]
            if rule["labels"]["incident"] == incident.id
        ]
        found = [pattern.search(line) for line in lines]
        assert found and all(match and match["value"] in recorded for match in found)
        shown = {match["text"] for match in found if match}
        for condition in incident.alerting:  # the symptoms; of a graded incident the serious form of the mild one
            assert any(text.startswith(condition.signal.name) for text in shown), (condition.signal.name, shown)


@EVERY_INCIDENT
def test_the_page_of_an_incident_begins_with_what_to_do_and_has_no_action_under_a_condition(incident: Incident) -> None:
    _, actions, *_ = BOARDS[incident.id]["panels"]
    content = actions["options"]["content"]
    assert all(step in content for step in (*incident.mitigate, *incident.do_not))
    assert f"diag explain {incident.id}" in content
    assert not any(fix.change in content for fix in incident.fixes)


def test_the_page_of_a_graded_incident_names_the_condition_without_which_its_alert_does_not_fire() -> None:
    graded = [(each, each.serious) for each in load() if each.serious]
    assert graded
    for incident, serious in graded:
        described = {panel["title"]: panel.get("description", "") for panel in BOARDS[incident.id]["panels"]}
        claimed = claim(serious, Contract())
        assert f"all symptoms hold, and {claimed}," in described["Alert state"]
        assert described[claimed].startswith("The alert fires only when ")


# -- answered by a real Prometheus ------------------------------------------------------------------------------------

HOT = {
    "throttle_seconds_total__sw_thermal": lambda t: 0.4 * t,
    "clock_hertz__sm": 1400e6,
    "xid_errors_total__79": lambda t: float(t > 60),
    "nvlink_active_links": 18,
    "nvlink_bytes_total:rx": lambda t: 1e9 * t,
    "process_memory_bytes:7,other,": 1e9,
    **timelines.ALL_GPU_FAULTS,
}

OTHERS = (
    "speculation_ineffective",
    "speculation_lost_at_length",
    "kv_offload_ineffective",
    "kv_offload_failing",
    "kv_offload_oversized",
    "tool_calls_unparsed",
    "kv_transfer_failing",
    "output_corrupted",
    "host_cpu_starved",
    "requests_aborted",
    "requests_cancelled",
    "requests_refused",
)
"""The recordings whose metrics a cascade does not have: each is a server of its own."""

LONG_AGO = re.compile("offset 1h|before_the_upgrade|speculation_lost_at_length|_(short|long)_contexts:")
"""In what reads a time that this Prometheus does not have: tests/prometheus/test_upgrades.py and test_alerts.py."""
BESIDE = {"output_corrupted": timelines.NAN_CAUSES}
"""What stands beside the pages of a recording."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One with the generated rules and samples up to now: a cascade, whose host shows all, OTHERS, a start, an end."""
    rules = tmp_path_factory.mktemp("rules") / "rules.yaml"
    rules.write_text(hasty((ROOT / "alerts" / "diag.rules.yaml").read_text()))
    grows = memory(lambda t: 0.5 + 0.0001 * t)
    host = (gpu(0, **HOT), gpu(1, **HOT), workers(1.0, 0.9), grows, timelines.network, *timelines.TOLD)
    cascade = timelines.timeline("kv_cascade", *host, before=timelines.CALM)
    pages = [timelines.timeline(name, *BESIDE.get(name, ())) for name in OTHERS]
    hosts = (timelines.faulty(name)[0] for name in ("startup_slow", "shutdown_drops_requests"))
    others = [*pages, *hosts]
    beside = {key | {("instance", f"h:{n}")}: each[key] for n, each in enumerate(others, 2) for key in each}
    held = blocks({**cascade, **beside})
    config = f"rule_files: [{rules}]"
    with serving(program(ANY), held, config) as server:
        until(
            lambda: server.query(
                'ALERTS{incident="kv_eviction_cascade", alertstate="firing"}', round(time.time() * 1000)
            )
        )
        yield server


def answered(server: Server, promql: str) -> bool:
    """Return True if there is a series in the last 15 minutes, with everything selected."""
    text = plain(promql)
    text = re.sub(r"\$[a-z]\w*", ".*", text)
    now = time.time()
    form = urllib.parse.urlencode({"query": text, "start": now - 900, "end": now, "step": 15}).encode()
    with urllib.request.urlopen(f"{server.url}/api/v1/query_range", form, timeout=30) as response:
        return bool(json.load(response)["data"]["result"])


@pytest.mark.prometheus
@EVERY_PAGE
def test_every_query_returns_series(prometheus: Server, page: str) -> None:
    recent = [promql for promql in queries(page) if not LONG_AGO.search(promql)]
    empty = [promql for promql in recent if not answered(prometheus, promql)]
    assert not empty


@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("answering", "shown", "down"), [((1.0, 1.0), ("2", "2"), 0.0), ((1.0, None), ("1", "2"), 1.0)]
)
def test_one_of_two_servers_down_is_red(
    answering: tuple[float | None, ...], shown: tuple[str, str], down: float
) -> None:
    """The series is named "1 / 2", and its value, the servers down, is at the red threshold."""
    (panel,) = (each for each in panels("fleet") if each["title"] == "Servers up / all")
    assert panel["targets"][0]["legendFormat"] == "{{answering}} / {{known}}"
    assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1] == {"value": 1, "color": "red"}
    now = round(time.time()) * 1000
    times = np.array([now - 60_000, now])
    labels = [
        {"__name__": name, "instance": f"h:{at}", "job": "vllm", "model_name": "m"}
        for at in range(2)
        for name in ("up", "vllm:num_requests_running")
    ]
    values = np.array([row for now in answering for row in ([1.0, now or 0.0], [1.0, STALE if now is None else now])])
    with serving(program(ANY), [Block(tuple(labels), times, values)]) as server:
        answer = server.query(re.sub(r"\$[a-z]\w*", ".*", panel["targets"][0]["expr"]), now)
    assert answer == {frozenset({("answering", shown[0]), ("known", shown[1])}): down}


def test_matchers_are_added_to_every_selector_but_not_to_strings() -> None:
    """The metric is selected by its name and by a pattern that contains the name."""
    scope = DashboardScope(Contract(), ("engine",))
    by_pattern = '{__name__=~"vllm:num_requests_running|diag_vllm_up"}'
    narrowed = scope.add_matchers(f"count({by_pattern}) + vllm:num_requests_running")
    assert by_pattern[1:] in narrowed
    assert narrowed.count('job=~"$job"') == narrowed.count("{") == 2


def test_the_variables_are_the_labels_that_identify_a_server() -> None:
    page = json.loads(files(load(), Contract(site=Site(labels=("cluster", "pod"))))["dashboards/fleet.json"])
    names = [variable["name"] for variable in page["templating"]["list"]]
    assert names == ["datasource", "job", "cluster", "pod", "model"]
    assert "instance" not in json.dumps([panel["targets"] for panel in page["panels"] if panel["type"] != "row"])


def test_a_job_that_identifies_a_server_is_one_variable() -> None:
    page = json.loads(files(load(), Contract(site=Site(labels=("job", "instance"))))["dashboards/fleet.json"])
    assert [variable["name"] for variable in page["templating"]["list"]] == ["datasource", "job", "instance", "model"]
