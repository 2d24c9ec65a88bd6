"""The generated rules over the recordings: each fires on its own, and on nothing else.

A real promtool evaluates each incident's rules where it is, and all rules over a few timelines; diag.promql, which is
held equal to it there, all rules over everything.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml
from support import bad_servers, timelines
from support.alert_rules import (
    INCIDENTS,
    RULES,
    allowed,
    groups_for,
    in_no_recording,
    metrics_read,
    only,
    rules,
)
from support.firing import Fired, all_fired, episodes, evaluated, fired, fired_last
from support.paths import ALL_RECORDINGS, ROOT
from support.prometheus_server import PLACES, Answer, answer, program, serving
from support.rule_files import groups_of
from support.sampling import THOROUGH, sampled, some
from support.scenarios import Beside, crashed, gpu, log, started, workers
from support.timelines import CALM, CHRONIC, HOSTS, LEAD, PEERS, RECORDED, STEP, TWO, timeline
from support.waiting import until

from diag.artefacts.alerts import groups, telemetry_alerts
from diag.artefacts.generate import files
from diag.artefacts.inhibitions import inhibitions, mutings
from diag.artefacts.recording_rules import THRESHOLD
from diag.core.contract import Contract, Site, apply_overrides
from diag.core.files import dump_yaml
from diag.core.incident import seconds
from diag.knowledge.catalog import load
from diag.knowledge.signals import FEW_GIVEN_UP, MOST_BY_DESIGN
from diag.vllm.metric_names import SUFFIX, known


@pytest.fixture(autouse=True)
def _promtool() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: .ci/components installs it")


@pytest.mark.parametrize("file", ["diag.rules.yaml", "dcgm.yaml", "kubernetes.yaml", "normal.rules.yaml"])
@pytest.mark.parametrize("place", PLACES)
def test_a_real_promtool_accepts_the_rules(place: str, file: str) -> None:
    promtool = program(place).with_name("promtool")
    done = subprocess.run(
        [promtool, "check", "rules", ROOT / "alerts" / file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


SHOWN_BY_ITS_PAGE_ALONE = {
    recording: incident for incident, recording in RECORDED.items() if incident not in {*PEERS, *CHRONIC}
}


SHOWN_BY_ITS_LOG = ("engine_awaits_recovery",)
"""Recordings whose pages alone, without an exporter that reads the log, do not show the incident."""
AS_LONG_AS_A_STALL = {"contention_long_steps": {"engine_stalled"}}
"""One step of 110 s, with eight requests in flight: by then an engine that stands still has been an alert."""


def test_alerts_fire_in_time_on_the_recording_that_shows_them_and_on_no_other() -> None:
    for name in some((recording.name for recording in ALL_RECORDINGS), 20):
        shown, truth = evaluated(RULES, timeline(name)), timelines.recording(name).truth
        named = (name, shown)
        assert shown.incidents & set(truth["absent"]) <= AS_LONG_AS_A_STALL.get(name, set()), named
        warned = {incident for incident in truth["present"] if INCIDENTS[incident].severity != "info"}
        assert shown.incidents >= warned or name in {*timelines.MOMENTS, *SHOWN_BY_ITS_LOG}, named
        assert truth["verdict"] not in ("healthy", "no_incident") or not shown.incidents, named
        if name in SHOWN_BY_ITS_PAGE_ALONE:
            assert_in_time(shown, SHOWN_BY_ITS_PAGE_ALONE[name])


def test_an_incident_that_a_host_or_its_peers_show_alerts_in_time() -> None:
    for name in sorted({*PEERS, *HOSTS}):
        series, onset = timelines.faulty(name)
        assert_in_time(evaluated(RULES, series), name, onset)


@pytest.mark.parametrize("name", some(sorted({*RECORDED, *HOSTS} - {*CHRONIC}), 6))
def test_an_alert_fires_in_a_real_promtool_at_the_same_moment(tmp_path: Path, name: str) -> None:
    """In that of Prometheus 2 up to a scrape earlier or later: its windows are closed on the left."""
    rules, (series, _) = only(name, tmp_path), timelines.faulty(name)
    ours, (second, third) = (
        evaluated(rules, series),
        (fired(rules, series, metrics_read(), tmp_path, place) for place in PLACES),
    )
    assert (name, INCIDENTS[name].severity) in ours.first
    assert third == ours
    assert {alert: pytest.approx(at, abs=STEP) for alert, at in ours.first.items()} == second.first


@pytest.mark.nightly
def test_a_real_promtool_fires_no_other_alert(tmp_path: Path) -> None:
    """The servers: one in a cascade, every night one with a stopped rank, and a healthy one with all of its host."""
    ill = ("kv_eviction_cascade", "tp_communication_stall")[: 1 + THOROUGH]
    sick = {name: timelines.faulty(name)[0] for name in ill}
    series = {**sick, "healthy": timeline("healthy", *CALM, *timelines.TOLD, before=CALM)}
    found = all_fired(RULES, series, metrics_read(), tmp_path, PLACES[1])
    for name, values in series.items():
        alone = evaluated(RULES, values).first
        muted = {key for key in alone if any(key[0] in INCIDENTS[cause].explains for cause, _ in found[name].first)}
        assert found[name].first.items() <= alone.items()
        assert {*alone} - {*found[name].first} <= muted, "it has no alert beside that of its cause"


SICK = float(timelines.SICK)
"""Seconds from LEAD to recovery."""
WELL, WELL_OF_BURN_RATE = 180.0, 300.0
"""Seconds from recovery until an alert has ended; an info outlasts its condition by its window on purpose."""
SHORTER_EVENTS = {"gpu_out_of_memory"}
"""Alerts about an event that is over before recovery."""


@pytest.mark.parametrize("anew", [False, True], ids=["cured", "replaced"])
def test_an_alert_ends_within_three_minutes_of_recovery_and_has_fired_once(tmp_path: Path, anew: bool) -> None:
    late = set()
    names = ({*RECORDED} if anew else {*RECORDED, *HOSTS} - SHORTER_EVENTS) - {*CHRONIC}
    for name in some(sorted(names), 16, anew):
        (tmp_path / name).mkdir()
        found = episodes(only(name, tmp_path / name), timelines.recovered(name, anew))
        incident = INCIDENTS[name]
        *others, (_, end) = found[name, incident.severity]
        most = WELL_OF_BURN_RATE if incident.burns else WELL
        most += seconds(incident.window) if incident.severity == "info" else 0
        if others or not 0 <= end - SICK <= most:
            late.add(name)
    assert late == set()


@pytest.mark.parametrize("name", CHRONIC)
def test_a_chronic_info_alerts_once_it_has_lasted_for_its_hold(tmp_path: Path, name: str) -> None:
    """It ends once the condition has not held for a whole window, so that it does not come and go.

    promtool would take a minute for so many hours.
    """
    hold, window = seconds(INCIDENTS[name].hold), seconds(INCIDENTS[name].window)
    lasts = hold + 3600
    series = timelines.followed(timelines.lasting(RECORDED[name], lasts), timelines.lasting("healthy", 3 * window))
    assert hold > timelines.SICK, "otherwise it is like any other alert"
    ((begin, end),) = episodes(only(name, tmp_path), series)[name, "info"]
    judged = timelines.JUDGED_AFTER.get(name, 0.0)
    assert hold - LEAD <= begin <= hold + judged, "a lead-in of itself counts, once its rate can be judged"
    assert 0 <= end - lasts <= 2 * window + 2 * STEP


@sampled(("name", "place"), product(["kv_eviction_cascade", "gpu_thermal_throttling"], PLACES), 2)
def test_an_alert_ends_in_a_real_promtool_at_the_same_moment(tmp_path: Path, name: str, place: str) -> None:
    series, chosen = timelines.recovered(name), only(name, tmp_path)
    ((begin, end),) = episodes(chosen, series)[name, INCIDENTS[name].severity]
    last, lasted = fired_last(chosen, {"h": series}, tmp_path, place)["h", name]
    assert last + STEP == pytest.approx(end, abs=STEP)
    assert lasted == pytest.approx(end - begin, abs=2 * STEP), "it has not fired in between"


@pytest.mark.parametrize("name", ["kv_cascade", "queue_saturation", "engine_stalled", "requests_aborted"])
def test_missed_scrapes_neither_end_an_alert_nor_begin_it_anew(tmp_path: Path, name: str) -> None:
    incident = SHOWN_BY_ITS_PAGE_ALONE[name]
    series = {key: values.copy() for key, values in timeline(name).items()}
    for values in series.values():
        values[[70, 80, 81, 90]] = np.nan
    whole, missed = (
        episodes(only(incident, tmp_path), each)[incident, INCIDENTS[incident].severity]
        for each in (timeline(name), series)
    )
    assert len(missed) == 1 and missed == whole


def test_a_queue_alerts_in_its_time_after_a_cascade_whose_server_was_replaced(tmp_path: Path) -> None:
    """The effects of the cascade have no alert after it either."""
    causes = [*STORM, "kv_eviction_cascade"]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": groups_for([*causes, "queue_saturation"])}))
    sick, queue = timelines.recovered("kv_eviction_cascade", anew=True), timelines.timeline("queue_saturation")
    after = timelines.followed(sick, queue)
    found = fired_last(tmp_path / "rules.yaml", {"h": after, "i": sick}, tmp_path)
    last, lasted = found["h", "queue_saturation"]
    onset = SICK + timelines.RECOVERED[-1]
    assert last - lasted - onset <= allowed(INCIDENTS["queue_saturation"])
    assert found["h", "kv_eviction_cascade"][0] - SICK <= WELL
    assert [key for key in found if key[0] == "i"] == [("i", "kv_eviction_cascade")]


STORM = ("prefill_decode_contention", "kv_pool_saturated", "kv_pool_undersized", "requests_aborted")
"""Incidents that a cascade resembles or explains."""


def test_a_kept_promise_ends_the_page_within_five_minutes(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(dump_yaml("", {"groups": groups(load(), Contract(ttft_seconds=1.0))}))
    found = episodes(only("contract_breached", tmp_path, file), timelines.recovered("kv_eviction_cascade"))
    ((begin, end),) = found["contract_breached", "critical"]
    assert begin < SICK and 0 <= end - SICK <= 300


def assert_in_time(shown: Fired, name: str, onset: float = 0.0) -> None:
    """It fires within its bound, and nothing fires that is not its consequence."""
    incident = INCIDENTS[name]
    assert 0 < shown.first.get((name, incident.severity), np.inf) - onset <= allowed(incident), (name, shown)
    assert shown.incidents <= {name, *consequences(name)}, (name, shown)


def consequences(name: str) -> Iterable[str]:
    return {*INCIDENTS[name].explains, *(("startup_failed",) if name == "startup_failed" else ())}


def test_thermal_throttling_that_costs_much_throughput_is_a_critical_alert(tmp_path: Path) -> None:
    throttling = only("gpu_thermal_throttling", tmp_path)
    alerts = fired(throttling, timeline("healthy", timelines.hot(900e6), before=CALM), metrics_read(), tmp_path)
    assert {severity for _, severity in alerts.first} == {"warning", "critical"}


HARMLESS: dict[str, tuple[str, tuple[Beside, ...]]] = {
    "a busy GPU at its power cap": ("healthy", CALM),
    "a moment of heat": ("healthy", (gpu(throttle_seconds_total__sw_thermal=lambda t: 0.9 * (t > 20)),)),
    "idle clocks": ("idle", (gpu(utilization_ratio=0, clock_hertz__sm=300e6),)),
    "an application's own Xid": ("healthy", (gpu(xid_errors_total__31=lambda t: float(t > 20)),)),
    "a small agent on the GPU": ("healthy", (gpu(**{"process_memory_bytes:7,other,": 0.5 * timelines.GIB}),)),
    "ranks at work at little power": ("healthy", (TWO, gpu(0, **timelines.SPINS), workers(1.0, 1.0))),
    "idle ranks": ("idle", (TWO, workers(0.0, 0.0))),
    "full links beside NVLink": ("healthy", timelines.linked(timelines.FULL, nvlinks=4)),
    "links with little traffic": ("healthy", timelines.linked(5e9)),
    "a start of usual length": ("", (log("load_weights", {"load_weights": 60}, start=LEAD + 899), workers(1.0))),
    "a restart that takes a quarter of an hour": (
        "engine_dead",
        (log("load_weights", {"load_weights": 0}, start=LEAD), crashed(1), workers(1.0)),
    ),
    "a restart of usual length that no log shows": ("engine_dead", (started(LEAD), workers(1.0))),
    "a capture that moves": ("", (log("cuda_graph_capture", timelines.CAPTURE, start=LEAD + 899), workers(1.0))),
    "a start that is over": ("healthy", (log("ready", {"load_weights": 5000, "compile": 3000}, start=LEAD),)),
    "memory that ran out long ago": ("healthy", (log("ready", {}, start=LEAD, cuda_out_of_memory=500),)),
}


def test_a_look_alike_fires_no_alert() -> None:
    found = {name: evaluated(RULES, harmless(name)).incidents for name in HARMLESS}
    crashes = {name: {"server_crashed"} for name, (recording, _) in HARMLESS.items() if recording == "engine_dead"}
    assert {name: incidents for name, incidents in found.items() if incidents} == crashes


def harmless(name: str) -> timelines.Series:
    recording, beside = HARMLESS[name]
    before = CALM if recording and "memory that" not in name else ()
    series = timeline(recording, *beside, before=before, lead=recording or "healthy")
    if "usual" in name or "moves" in name:  # only the first minutes of a start are usual
        return {key: values[: (LEAD + 150) // STEP] for key, values in series.items()}
    return series


def test_every_incident_has_an_alert_of_its_name_and_severity() -> None:
    labels = [rule["labels"] for rule in rules() if "alert" in rule]
    there = {(label_set.get("incident"), label_set["severity"]) for label_set in labels}
    assert there >= {(incident.id, incident.severity) for incident in INCIDENTS.values()}
    assert all(rule["annotations"]["runbook_url"] for rule in rules() if "alert" in rule)


def test_a_recorded_name_means_one_expression() -> None:
    records = [rule for rule in rules() if rule.get("record", THRESHOLD) != THRESHOLD]
    names = [rule["record"] for rule in records]
    assert len(names) == len(set(names)) == len({rule["expr"] for rule in records})


def test_every_metric_exists_in_a_recording_or_in_vllms_source_or_is_the_exporters() -> None:
    own = {rule["record"] for rule in rules() if "record" in rule}
    others = {"ray_serve_num_http_requests_total", "push_time_seconds"}  # by hand, with Ray 2.60; a Pushgateway's
    unseen = in_no_recording(metrics_read() - own)
    assert {name for name in unseen if SUFFIX.sub("", name) not in known()} == others


GIVEN_UP = "instance:requests_given_up_by_their_clients:5m"


@pytest.mark.parametrize(
    ("series", "alert"),
    [
        ({"unrelated": 1.0}, "VllmTelemetryAbsent"),
        ({"vllm:num_requests_running": 1.0, "diag_scrape_success": 0.0}, "DiagCollectorFailed"),
        ({"vllm:time_to_first_token_seconds_count": 1.0}, "VllmBucketMissing"),
        ({GIVEN_UP: 0.5, "instance:requests_given_up:5m": 20.0}, "VllmRequestsGivenUpUnexplained"),
        ({GIVEN_UP: 0.5, "instance:first_tokens_seen:5m": 40.0}, "VllmRequestsGivenUpUnexplained"),
    ],
)
def test_missing_telemetry_is_an_alert(tmp_path: Path, series: dict[str, float], alert: str) -> None:
    held = {
        frozenset({("__name__", name), ("collector", "nvml")}): np.full(timelines.TIMES.size, value)
        for name, value in series.items()
    }
    assert alert in fired(only(None, tmp_path), held, set(series), tmp_path).guards


@pytest.mark.parametrize(
    "beside", [{}, {"instance:requests_given_up:5m": 20.0, "instance:harm_behind_requests_given_up:5m": 0.0}]
)
def test_few_clients_or_known_harm_make_no_requests_unexplained(tmp_path: Path, beside: dict[str, float]) -> None:
    held = {
        frozenset({("__name__", name)}): np.full(timelines.TIMES.size, value)
        for name, value in {GIVEN_UP: 0.5, **beside}.items()
    }
    guards = fired(only(None, tmp_path), held, {GIVEN_UP, *beside}, tmp_path).guards
    assert "VllmRequestsGivenUpUnexplained" not in guards
    (alert,) = (alert for alert in telemetry_alerts() if alert.name == "VllmRequestsGivenUpUnexplained")
    assert set(re.findall(r">=? ([\d.]+)", alert.promql)) == {f"{MOST_BY_DESIGN}", f"{FEW_GIVEN_UP}", "0"}


@pytest.mark.parametrize("alone", ["vllm:num_requests_running", "diag_vllm_up"])
def test_page_of_vllm_or_of_the_exporter_counts_as_telemetry(tmp_path: Path, alone: str) -> None:
    held = {frozenset({("__name__", alone)}): np.zeros(timelines.TIMES.size)}
    assert not fired(only(None, tmp_path), held, {alone}, tmp_path).guards


def test_a_server_that_is_scraped_raises_no_telemetry_alert(tmp_path: Path) -> None:
    series = timeline("healthy", *CALM, before=CALM)
    assert not fired(only(None, tmp_path), series, metrics_read(), tmp_path).guards


def test_a_violated_slo_pages(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(dump_yaml("", {"groups": groups(load(), Contract(ttft_seconds=1.0))}))
    series = {name: timeline(name) for name in ("kv_cascade", "healthy")}
    found = all_fired(only("contract_breached", tmp_path, file), series, metrics_read(), tmp_path)
    assert {name: alerts.incidents for name, alerts in found.items()} == {
        "kv_cascade": {"contract_breached"},
        "healthy": set(),
    }


@sampled(
    ("status", "failed", "alert"),
    [
        ("5xx", 0.45, {"requests_failing"}),
        ("5xx", 0.1, set()),
        ("4xx", 2.0, {"client_errors_surge"}),
        ("4xx", 0.1, set()),
    ],
    2,
)
def test_answers_of_which_many_fail_suddenly_are_a_warning_in_minutes(
    tmp_path: Path, status: str, failed: float, alert: set[str]
) -> None:
    series = timeline("healthy", *CALM, before=CALM)
    answers = {("__name__", "http_requests_total"), ("method", "POST"), ("handler", "/v1/completions")}
    ill = timelines.TIMES - LEAD
    series[frozenset({*answers, ("status", "2xx")})] = 12_000 + 4.0 * ill
    series[frozenset({*answers, ("status", status)})] = np.where(ill > 0, np.floor(failed * ill), np.nan)
    incident = "requests_failing" if status == "5xx" else "client_errors_surge"
    found = fired(only(incident, tmp_path), series, metrics_read(), tmp_path)
    assert found.incidents == alert
    assert all(severity == "warning" and at <= 480 for (_, severity), at in found.first.items())


def test_alerts_have_the_labels_that_identify_a_server_at_this_site(tmp_path: Path) -> None:
    site = Site(labels=("cluster", "pod"))
    file = tmp_path / "rules.yaml"
    file.write_text(dump_yaml("", {"groups": groups(load(), Contract(site=site))}))
    assert "instance" not in "".join(rule["expr"] for rule in rules(file))
    series = timeline("kv_cascade", *CALM, before=CALM)
    moved = {frozenset({*key, ("cluster", "c"), ("pod", "p")}): values for key, values in series.items()}
    assert fired(only("kv_eviction_cascade", tmp_path, file), moved, metrics_read(), tmp_path).incidents == {
        "kv_eviction_cascade"
    }
    assert "var-pod={{ $labels.pod | urlquery }}" in file.read_text()


def test_the_alert_has_the_threshold_of_diag_toml(tmp_path: Path) -> None:
    cascade = "kv_eviction_cascade"
    contract = Contract(limits={cascade: {"preemptions / finished request": 0.35}})
    text = files(apply_overrides(load(), contract), contract)["alerts/diag.rules.yaml"]
    assert "instance_engine:preemptions_per_finished_request:5m > 0.35" in text


def test_the_operators_resource_holds_the_same_groups() -> None:
    resource = yaml.load((ROOT / "alerts" / "prometheusrule.yaml").read_text(), yaml.CSafeLoader)
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert resource["spec"]["groups"] == groups_of(RULES)


def test_an_alert_has_every_annotation() -> None:
    every = [rule for rule in rules() if "alert" in rule and "incident" in rule["labels"]]
    assert len({rule["annotations"]["doctor"] for rule in every}) == 1
    assert all(set(rule["annotations"]) == ANNOTATIONS for rule in every)


ANNOTATIONS = {"title", "do_now", "summary", "description", "impact", "runbook_url", "dashboard_url", "doctor"}


def muted(labels: tuple[str, ...] = ("instance",)) -> dict[tuple[str, str, str], tuple[str, ...]]:
    """The labels that must be equal, by source, target and their severity."""
    pairs = mutings(load(), Site(labels=labels))
    return {(pair.source, pair.target, pair.severity): pair.equal for pair in pairs}


def test_a_cause_mutes_its_consequences_on_the_labels_that_both_have() -> None:
    assert muted()["kv_eviction_cascade", "contract_breached", "critical"] == ("instance", "engine")
    assert muted()["gpu_fault", "engine_stalled", "critical"] == ("instance",)
    assert muted(("cluster", "pod"))["gpu_fault", "engine_stalled", "critical"] == ("cluster", "pod")


def test_a_page_mutes_the_tickets_about_its_server() -> None:
    pages, *_ = inhibitions(load(), Site(labels=("cluster", "pod")))
    assert pages["target_matchers"][0] == 'severity=~"warning|info"' and pages["equal"] == ["cluster", "pod"]


def test_a_warning_never_mutes_a_critical_alert() -> None:
    known = {incident.id: incident for incident in load()}
    ticket = known["queue_saturation"]._replace(explains=("contract_breached",))
    assert [*mutings([ticket, known["contract_breached"]], Site())] == []
    assert ("kv_transfer_failing", "requests_failing", "warning") in muted()
    (page,) = (rule for rule in rules() if rule.get("labels", {}) | PAGE == rule.get("labels"))
    assert 'severity="critical",incident=~"' in page["expr"]


PAGE = {"incident": "requests_failing", "severity": "critical"}


@pytest.mark.prometheus
@pytest.mark.parametrize("place", PLACES)
def test_the_relabelling_gives_renamed_metrics_their_names_back(place: str) -> None:
    pages = [
        bad_servers.pages(prefix.encode() + b'num_requests_running{engine="0"} 3\ndiag_vllm_up 1\n')
        for prefix in ("vllm_", "kserve_vllm:", "ray_vllm_")
    ]
    with ExitStack() as targets:
        addresses = [targets.enter_context(bad_servers.serving(page)).url.removeprefix("http://") for page in pages]
        job = {"job_name": "vllm", "static_configs": [{"targets": addresses}]}
        job |= yaml.safe_load((ROOT / "alerts" / "relabel.yaml").read_text())
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [job]}
        with serving(program(place), [], yaml.safe_dump(config)) as server:
            held = until(lambda: whole(answer(server, '{__name__=~".*vllm.*"}'), 2 * len(pages)))
    assert {(labels["__name__"], labels["instance"]) for labels in map(dict, held)} == {
        (name, address) for name in ("vllm:num_requests_running", "diag_vllm_up") for address in addresses
    }


def whole(held: Answer | None, series: int) -> Answer | None:
    """Return the series in a Prometheus once it has so many."""
    return held if held and len(held) >= series else None
