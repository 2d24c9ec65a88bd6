"""A server has the same verdict with the names of older releases, at other intervals and beside other engines."""

import itertools
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from support import rewriting as re
from support.sampling import sampled, some

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report

LONG_PREFILLS = "prefill_decode_contention"
SICK = {
    "kv_cascade": "kv_eviction_cascade",
    "contention_bigbatch": "prefill_decode_contention",
    "queue_saturation": "queue_saturation",
    "kv_saturated_fit": "kv_pool_saturated",
    "engine_stalled": "engine_stalled",
    "engine_dead": "engine_dead",
}
OLDER = (re.before_0_9_2, re.before_0_8_3, re.both_names)


def judged(folder: Path) -> Report:
    return doctor.run(ObserveOptions([str(folder)]))


def primary(report: Report) -> list[str]:
    return [each.diagnosis.incident.id for each in report.present if each.diagnosis.primary]


@sampled(("recording", "change"), product(SICK, OLDER), 7)
def test_an_older_release_is_judged_the_same(tmp_path: Path, recording: str, change: Callable[[str], str]) -> None:
    report = judged(re.write(tmp_path, re.changed(re.scrapes(recording), change)))
    assert primary(report) == [SICK[recording]]


@pytest.mark.parametrize("change", OLDER, ids=lambda each: each.__name__)
def test_a_healthy_older_release_is_healthy(tmp_path: Path, change: Callable[[str], str]) -> None:
    report = judged(re.write(tmp_path, re.changed(re.scrapes("healthy"), change)))
    assert report.verdict == "healthy"
    assert [each.state for each in report.progress] == ["busy"]


@pytest.mark.parametrize("every", some([2, 3, 5, 10], 2))
@pytest.mark.parametrize("recording", SICK)
def test_a_slower_cadence_finds_the_same(tmp_path: Path, recording: str, every: float) -> None:
    assert primary(judged(re.write(tmp_path, re.thinned(re.scrapes(recording), every)))) == [SICK[recording]]


def of_another_model() -> Iterator[re.Scrape]:
    """A healthy server that is no peer with room."""
    return re.changed(re.scrapes("healthy"), lambda page: re.of_model(page, "another"))


def test_a_sick_engine_is_not_averaged_away_by_a_healthy_one(tmp_path: Path) -> None:
    report = judged(re.write(tmp_path, re.as_ranks(re.scrapes("kv_cascade"), of_another_model())))
    found = [each.diagnosis for each in report.present if each.diagnosis.primary]
    assert [(each.incident.id, dict(each.subject)["engine"]) for each in found] == [("kv_eviction_cascade", "0")]
    assert [each.state for each in report.progress] == ["busy", "busy"]


def test_two_servers_are_judged_separately(tmp_path: Path) -> None:
    first, well = list(re.scrapes("kv_cascade")), list(of_another_model())
    later = first[0][0] - well[0][0]
    moved = [(time + later, "other:8000", page) for time, _, page in well]
    report = judged(re.write(tmp_path, sorted([*first, *moved])))
    assert primary(report) == ["kv_eviction_cascade"]
    assert len(report.progress) == 2


def test_a_replica_that_shows_no_vllm_metrics_does_not_vanish(tmp_path: Path) -> None:
    first = list(re.scrapes("healthy"))
    blind = [(time, "blind:8000", "process_cpu_seconds_total 1\n") for time, _, _ in first]
    report = judged(re.write(tmp_path, sorted([*first, *blind])))
    assert report.verdict == "unknown"
    assert [dict(each.subject)["instance"] for each in report.not_judged] == ["blind:8000"]
    unknown = {each.diagnosis.incident.id for each in report.findings if each.diagnosis.state == "unknown"}
    assert "kv_eviction_cascade" in unknown


def test_one_scrape_is_unknown(tmp_path: Path) -> None:
    report = judged(re.write(tmp_path, list(re.scrapes("kv_cascade"))[30:31]))
    assert report.verdict == "unknown"
    assert "too few scrapes" in report.not_judged[0].sentence


def test_scrapes_that_fail_again_and_again_are_the_reason(tmp_path: Path) -> None:
    """Scraped every 15 s, and of three scrapes two fail."""
    first = list(re.scrapes("healthy"))[::2]
    missed = [
        (15 * at + float(first[0][0]), instance, page if (len(first) - 1 - at) % 3 == 0 else "")
        for at, (_, instance, page) in enumerate(first)
    ]
    report = judged(re.write(tmp_path, missed))
    assert report.verdict == "unknown"
    assert "scrapes fail again and again" in report.not_judged[0].sentence


def test_scrapes_a_minute_apart_are_judged(tmp_path: Path) -> None:
    first = list(re.scrapes("healthy"))
    slow = [(first[0][0] + 60 * at, name, page) for at, (_, name, page) in enumerate(first[::10])]
    assert judged(re.write(tmp_path, slow)).verdict == "healthy"


def test_buckets_that_users_chose_leave_contention_undecided(tmp_path: Path) -> None:
    def other_edges(page: str) -> str:
        return page.replace('le="1.0"', 'le="1.7"')

    report = judged(re.write(tmp_path, re.changed(re.scrapes("contention_bigbatch"), other_edges)))
    states = {each.diagnosis.incident.id: each.diagnosis.state for each in report.findings}
    assert states["prefill_decode_contention"] == "unknown"


def test_a_standstill_shorter_than_half_a_minute_is_no_stall(tmp_path: Path) -> None:
    """The first 20 s of a real stall: so far it may be one large prefill."""
    all_scrapes = list(re.scrapes("engine_stalled"))
    report = judged(re.write(tmp_path, all_scrapes[10:21]))
    assert "engine_stalled" not in primary(report)


def test_server_that_another_process_serves_again_was_restarted(tmp_path: Path) -> None:
    """The pages do not show whether the process crashed, and how its requests ended; 38 s are in the notes."""
    first, well = list(re.scrapes("engine_dead")), list(re.scrapes("healthy"))
    later = first[-1][0] + 2 - well[0][0]
    anew = ("process_start_time_seconds 1.7952", "process_start_time_seconds 1.7953")
    back = [(time + later, first[0][1], page.replace(*anew)) for time, _, page in well]
    report = judged(re.write(tmp_path, [*first, *back]))
    (dead,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == "engine_dead")
    assert (report.verdict, dead.state, len(dead.episodes)) == ("no_incident", "absent", 1)
    assert report.health.lacking == ("requests before a restart",)
    assert [each.state for each in report.progress] == ["busy"]
    notes = "; ".join(report.observed.notes)
    assert "restarted at 03:17:23 UTC" in notes
    assert "failed: refused (from 03:16:43 UTC to 03:17:21 UTC)" in notes


def test_a_server_that_is_still_starting_when_the_watch_begins_is_not_dead(tmp_path: Path) -> None:
    well = list(re.scrapes("healthy"))
    before = [(well[0][0] - 40 + 2 * at, well[0][1], "") for at in range(20)]
    report = judged(re.write(tmp_path, [*before, *well]))
    assert report.verdict == "healthy"


def test_long_prompts_that_are_prefilled_in_chunks_are_no_stall(tmp_path: Path) -> None:
    """No token for 40 s, but each step takes KV blocks: the pages of a real stall, with a gauge that grows."""
    gauge = 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} '
    grown = []
    for at, (time, name, page) in enumerate(re.scrapes("engine_stalled")):
        before, _, rest = page.partition(gauge)
        grown.append((time, name, f"{before}{gauge}{at / 100}\n{rest.partition(chr(10))[2]}"))
    report = judged(re.write(tmp_path, grown[:31]))
    assert "engine_stalled" not in primary(report)
    assert [each.state for each in report.progress] == ["slow"]


def test_long_step_after_long_steps_is_no_stall(tmp_path: Path) -> None:
    """A step of 110 s with a long prompt, and 45 s of the next one."""
    report = judged(re.write(tmp_path, list(re.scrapes("contention_long_steps"))[:40]))
    assert "engine_stalled" not in {each.diagnosis.incident.id for each in report.present}
    assert [each.state for each in report.progress] == ["slow"]


@pytest.mark.parametrize(
    ("recording", "start", "series", "value", "absent"),
    [
        # evictions alone rule a queue out: the cascade's pages with a pool that looks empty
        ("kv_cascade_base", 0, "vllm:kv_cache_usage_perc", "0.2", "queue_saturation"),
        # and so does a full pool alone: requests that hardly fit, with the evictions taken out
        ("kv_undersized", 0, "vllm:num_preemptions_total", "0", "queue_saturation"),
        # stream pauses over 40 s alone rule contention out after a stall, from within which the pages begin: every
        # prompt counts as long
        ("engine_stalled", 20, 'vllm:request_prompt_tokens_bucket{engine="0",le="500.0"', "0", LONG_PREFILLS),
    ],
)
def test_incident_is_absent_if_any_single_guard_is_false(
    tmp_path: Path, recording: str, start: int, series: str, value: str, absent: str
) -> None:
    scrapes = itertools.islice(re.scrapes(recording), start, None)
    pages = re.changed(scrapes, lambda page: re.with_value(page, series, value))
    report = judged(re.write(tmp_path, pages))
    assert absent not in {each.diagnosis.incident.id for each in report.present}


def test_short_prompts_are_enough_to_rule_contention_out_after_a_stall(tmp_path: Path) -> None:
    """The pages of a stall of 42 s, with its gaps counted as shorter than 40 s."""
    edge = 'vllm:inter_token_latency_seconds_bucket{engine="0",le="%s"'

    def shorter(page: str) -> str:
        return page.replace(edge % "40.0", edge % "39.0").replace(edge % "80.0", edge % "40.0")

    report = judged(re.write(tmp_path, re.changed(re.scrapes("engine_stalled"), shorter)))
    assert LONG_PREFILLS not in {each.diagnosis.incident.id for each in report.present}


QUEUE_HISTOGRAMS = ("request_success_total", "request_queue_time_seconds_", "e2e_request_latency_seconds_")


def nobody_finishes(page: str) -> str:
    """The page of a server whose answers take longer than it is watched."""
    for name in QUEUE_HISTOGRAMS:
        page = re.with_value(page, f"vllm:{name}", "7")
    return page


@pytest.mark.parametrize(("recording", "queues"), [("queue_saturation", True), ("healthy", False)])
def test_queue_time_is_known_while_no_request_finishes(tmp_path: Path, recording: str, queues: bool) -> None:
    report = judged(re.write(tmp_path, re.changed(re.scrapes(recording), nobody_finishes)))
    assert ("queue_saturation" in {each.diagnosis.incident.id for each in report.present}) is queues


def test_requests_that_wait_while_nothing_moves_are_no_queue(tmp_path: Path) -> None:
    def waits(page: str) -> str:
        return re.with_value(page, "vllm:num_requests_waiting", "9")

    stands = list(re.scrapes("engine_stalled"))[12:30]
    report = judged(re.write(tmp_path, re.changed(stands, waits)))
    assert [each.diagnosis.incident.id for each in report.present] == ["engine_stalled"]


@pytest.mark.parametrize(("fits", "beside"), [("0.8", {"kv_pool_undersized"}), ("8.0", set())])
def test_a_kv_cache_below_the_context_is_named_beside_requests_that_are_not_admitted(
    tmp_path: Path, fits: str, beside: set[str]
) -> None:
    """The pages of a stall, with its requests waiting for capacity instead of running."""

    def nothing_runs(page: str) -> str:
        page = re.with_value(page, "vllm:num_requests_running", "0")
        page = re.with_value(page, "vllm:num_requests_waiting{", "4")
        return page.replace('kv_cache_max_concurrency="8.0"', f'kv_cache_max_concurrency="{fits}"')

    stands = list(re.scrapes("engine_stalled"))[12:30]
    report = judged(re.write(tmp_path, re.changed(stands, nothing_runs)))
    assert primary(report) == ["admission_deadlock"]
    assert {each.diagnosis.incident.id for each in report.present} == {"admission_deadlock", *beside}
