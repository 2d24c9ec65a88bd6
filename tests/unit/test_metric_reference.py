"""The reference of the exporter's metrics: every metric, every label, and who reads it."""

import re

import pytest
from support.paths import ROOT
from support.rows import each_row

from diag.core.incident import Incident, Signal
from diag.core.log_events import LOG_EVENTS, STARTUP_PHASES
from diag.core.metric_families import families, label_meanings
from diag.knowledge.catalog import load
from diag.knowledge.formulas import expanded

ROWS = {
    cells[0].strip("`"): cells
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()
    if (cells := [cell.strip() for cell in line.strip("|").split(" | ")])[0].startswith("`diag_")
}
EVERY_METRIC = each_row("name", families())


def test_every_metric_has_one_row() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert sorted(re.findall(r"^\| `(diag_\w+)`", text, re.MULTILINE)) == sorted(families())


def test_every_label_phase_and_event_is_explained() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    names = [*label_meanings(), *(phase.name for phase in STARTUP_PHASES), *(event.name for event in LOG_EVENTS)]
    assert [name for name in names if f"\n| `{name}` | " not in text] == []


@EVERY_METRIC
def test_metric_row_names_its_readers_or_its_purpose(name: str) -> None:
    use = ROWS[name][6]
    assert use == families()[name].unread if families()[name].unread else use


def test_a_metric_that_only_a_dashboard_shows_names_it() -> None:
    assert ROWS["diag_gpu_nvlink_bytes_total"][6] == "dashboards: gpus"


@EVERY_METRIC
def test_a_row_has_type_labels_and_meaning(name: str) -> None:
    family = families()[name]
    _, kind, labels, _, meaning, *_ = ROWS[name]
    assert (kind, meaning) == (family.kind, family.help)
    assert tuple(re.findall(r"`(\w+)`", labels)) == family.labels


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("diag_gpu_power_watts", "W"),
        ("diag_gpu_throttle_seconds_total", "seconds"),
        ("diag_gpu_pcie_throughput_bytes_per_second", "bytes/s"),
        ("diag_gpu_utilization_ratio", "share (0 to 1)"),
        ("diag_vllm_log_last_line_timestamp_seconds", "Unix time in seconds"),
        ("diag_gpu_xid_errors_total", "count"),
        ("diag_gpu_info", "always 1"),
    ],
)
def test_a_unit_is_that_of_the_name(name: str, unit: str) -> None:
    assert ROWS[name][3] == unit


@pytest.mark.slow
@EVERY_METRIC
def test_the_incidents_of_a_row_are_those_whose_conditions_or_fixes_name_the_metric(name: str) -> None:
    named = re.compile(rf"(?<![\w:]){name}(?!\w)")
    readers = {
        incident.id
        for incident in load()
        if any(named.search(expanded(f"{signal.promql} {signal.culprit_promql}")) for signal in signals(incident))
    }
    assert set(re.findall(r"`(\w+)`", ROWS[name][6])) == readers


def signals(incident: Incident) -> list[Signal]:
    looks = [look.refuted_by for look in incident.looks_like if look.refuted_by]
    conditions = [*incident.every_condition, *looks]
    conditions += [condition for fix in incident.fixes for condition in (*fix.only_if, *fix.expects)]
    return [
        *(condition.signal for condition in conditions),
        *(signal for fix in incident.fixes for signal in fix.signals),
        *([incident.quotes] if incident.quotes else []),
    ]
