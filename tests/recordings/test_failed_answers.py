"""Answers that are errors: HTTP 5xx are an incident of the server, a sudden wave of 4xx is a warning."""

import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support import rewriting
from support.sampling import sampled
from support.scenarios import present

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.progress import Liveness
from diag.diagnosis.report import Report
from diag.knowledge.signals.answers import ROUTES
from diag.report.coverage import over

Counters = Callable[[float], str]
"""The counters of HTTP answers so many seconds after the first scrape."""
FAILING, SURGE = "requests_failing", "client_errors_surge"
ALL_AT_ONCE = 1171


def answers(status: str, count: float, handler: str = "/v1/chat/completions") -> str:
    return f'http_requests_total{{handler="{handler}",method="POST",status="{status}"}} {count}\n'


def judged(folder: Path, counters: Counters, recording: str = "idle", change: Callable[[str], str] = str) -> Report:
    scrapes = list(rewriting.scrapes(recording))
    start = scrapes[0][0]
    pages = ((at, host, change(page) + counters(at - start)) for at, host, page in scrapes)
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", pages))]))


def state(report: Report, incident: str) -> str:
    (diagnosis,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == incident)
    return diagnosis.state


def born(status: str, count: float = ALL_AT_ONCE) -> Counters:
    """A series that appears in the middle, with its final value, as all events happen between two scrapes."""
    return lambda t: answers(status, count) if t > 30 else ""


@pytest.mark.parametrize("status", ["5xx", "500", "503"])
def test_errors_that_all_happen_between_two_scrapes_are_counted(tmp_path: Path, status: str) -> None:
    report = judged(tmp_path, born(status))
    (finding,) = (each for each in report.present if each.diagnosis.incident.id == FAILING)
    assert (report.verdict, finding.diagnosis.primary) == ("critical", True)
    (progress,) = report.progress
    assert (progress.state, "1,171" in progress.reason) == ("busy", True)


@pytest.mark.parametrize(("beside", "shown"), [("", False), ("diag_vllm_health_status 200\n", True)])
def test_a_dead_engine_is_ruled_out_only_where_its_death_would_be_seen(
    tmp_path: Path, beside: str, shown: bool
) -> None:
    """The page and its start time are those of the API server, which outlives the engine."""
    report = judged(tmp_path, lambda t: born("5xx")(t) + beside)
    (finding,) = (each for each in report.present if each.diagnosis.incident.id == FAILING)
    sides = [{each.name for each in side} for side in (finding.diagnosis.refuted, finding.diagnosis.open)]
    assert ["engine_dead" in side for side in sides] == [shown, not shown]


@pytest.mark.parametrize(
    ("every", "rate", "share", "begin", "end", "seed"),
    [
        (15, 0.3, 0.15, 1200, 3600, 3),
        (30, 0.3, 0.15, 1200, 3600, 3),
        *((5, 4.4, 0.12, 110, 330, n) for n in (0, 9)),
        *((2, 1.0, 0.28, 70, 220, n) for n in (5, 17)),  # few of the last answers fail, by chance
    ],
)
def test_failures_that_chance_spreads_over_few_answers_are_dated_by_the_first(
    tmp_path: Path, every: float, rate: float, share: float, begin: float, end: float, seed: int
) -> None:
    """Most scrapes between two failures show none, or the share wanders about the limits of its symptoms."""
    draw, served, failed, pages, first = random.Random(seed), 5000, 0, [], 0.0
    *_, (_, host, page) = rewriting.scrapes("healthy")
    text = re.sub(r"(http_requests|process_start)[^\n]*\n", "", page)
    for at in np.arange(0, end, every):
        for _ in range(round(rate * every)):
            fails = at >= begin and draw.random() < share
            served, failed, first = served + (not fails), failed + fails, first or at * fails
        pages.append((1.7e9 + at, host, text + answers("2xx", served) + (answers("5xx", failed) if failed else "")))
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    (finding,) = (each for each in report.present if each.diagnosis.incident.id == FAILING)
    assert (len(finding.diagnosis.episodes), finding.diagnosis.ongoing) == (1, True)
    assert abs((finding.diagnosis.since or 0) - 1.7e9 - first) <= 30


def test_failures_are_over_once_chance_no_longer_hides_them(tmp_path: Path) -> None:
    """A third of the answers fails, one in three seconds; 40 s later it is over, and ended with the last failure."""
    pages = []
    *_, (_, host, page) = rewriting.scrapes("healthy")
    text = re.sub(r"(http_requests|process_start)[^\n]*\n", "", page)
    for at in range(0, 230, 2):
        failed = max(0, min(at, 190) - 70) // 3
        pages.append((1.7e9 + at, host, text + answers("2xx", 5000 + at - failed) + answers("5xx", failed)))
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    (ended,) = (each.diagnosis for each in report.present if each.diagnosis.incident.id == FAILING)
    assert (ended.ongoing, ended.end) == (False, 1.7e9 + 190)


@sampled("every", [15, 60])
def test_failing_answers_are_dated_by_the_first_scrape_that_shows_them(tmp_path: Path, every: float) -> None:
    """The series of errors is born at the 20th scrape, with all errors of the interval before as its first value."""
    pages = []
    for at, (_, host, page) in enumerate([*rewriting.scrapes("healthy")] * 2):
        text = re.sub(r"(http_requests|process_start)[^\n]*\n", "", page)
        failed = answers("5xx", 40 * (at - 19)) if at >= 20 else ""
        pages.append((1.7e9 + every * at, host, text + answers("2xx", 5000 + 60 * min(at, 19)) + failed))
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages[:30]))]))
    (finding,) = (each for each in report.present if each.diagnosis.incident.id == FAILING)
    assert finding.diagnosis.since == 1.7e9 + every * 20


def test_a_few_errors_prove_nothing(tmp_path: Path) -> None:
    def few(t: float) -> str:
        return answers("2xx", 100 + t) + (answers("5xx", 4) if t > 30 else "")

    assert state(judged(tmp_path, few), FAILING) == "absent"


def test_server_whose_answers_fail_below_the_limit_of_an_incident_is_not_healthy(tmp_path: Path) -> None:
    without = partial(re.sub, r"http_requests[^\n]*\n", "")
    report = judged(tmp_path, lambda t: answers("2xx", 2 * t) + answers("5xx", 0.4 * t), "healthy", without)
    assert (report.verdict, report.health.lacking) == ("no_incident", ("answers",))
    assert report.health.missing[0].lacks.startswith("success: errors (HTTP 5xx)")


@pytest.mark.parametrize(("route", "lacks"), [("/v1/responses", True), ("/v1/completions", False)])
def test_a_route_that_only_fails_is_no_health(tmp_path: Path, route: str, lacks: bool) -> None:
    """A hundredth of all answers fails: where others of its route succeed, that is within the error budget."""
    report = judged(tmp_path, lambda t: answers("5xx", t // 20, route) if t else "", "healthy")
    assert report.verdict == ("no_incident" if lacks else "healthy")
    assert [item.name for item in report.health.missing] == ["answers"] * lacks


@pytest.mark.parametrize(
    ("failed", "expected"),
    [(lambda t: max(0, t - 20), "present"), (lambda t: 90 + t, "absent"), (lambda t: 12 * (t > 30), "absent")],
    ids=["a tenth, all at once", "a tenth, as ever", "twelve in one second"],
)
def test_a_share_below_the_fast_burn_is_told_if_it_rose_suddenly(
    tmp_path: Path, failed: Callable[[float], float], expected: str
) -> None:
    def counters(t: float) -> str:
        return answers("2xx", 900 + 9 * t) + (answers("5xx", failed(t)) if failed(t) else "")

    without = partial(re.sub, r"http_requests[^\n]*\n", "")
    report = judged(tmp_path, counters, "healthy", without)
    assert (state(report, FAILING), FAILING in present(report)) == (expected, expected == "present")


@pytest.mark.parametrize(
    ("failed", "told"), [(2.2, True), (0.8, False)], ids=["5.5 %, and none before", "2 %, and none before"]
)
def test_a_lasting_share_that_no_objective_allows_is_told_below_the_pages_of_its_budget(
    tmp_path: Path, failed: float, told: bool
) -> None:
    """Half an hour at 40 answers in 30 s, of which some fail for the last 15 minutes."""
    pages = []
    for at, (_, host, page) in enumerate(([*rewriting.scrapes("healthy")] * 2)[:60]):
        text = re.sub(r"(http_requests|process_start)[^\n]*\n", "", page)
        lost = failed * max(at - 30, 0)
        pages.append((1.7e9 + 30 * at, host, text + answers("2xx", 5000 + 40 * at - lost) + answers("5xx", lost)))
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    assert (FAILING in present(report)) == told


@pytest.mark.parametrize(("failed", "is_told"), [(4, True), (1, False)], ids=["a fifth", "a twentieth, briefly"])
def test_a_wave_of_errors_that_is_over_is_told(tmp_path: Path, failed: int, is_told: bool) -> None:
    """For three minutes some of 20 answers in 10 s fail; then none does for seven minutes."""
    pages = []
    for at, (_, host, page) in enumerate(([*rewriting.scrapes("healthy")] * 3)[:90]):
        text = re.sub(r"(http_requests|process_start)[^\n]*\n", "", page)
        lost = failed * min(max(at - 30, 0), 18)
        pages.append((1.7e9 + 10 * at, host, text + answers("2xx", 5000 + 20 * at - lost) + answers("5xx", lost)))
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    told = [each.diagnosis for each in report.present if each.diagnosis.incident.id == FAILING]
    assert [(each.severity, each.ongoing) for each in told] == [("info", False)] * is_told
    assert (FAILING in over(report)) == is_told


@pytest.mark.parametrize("waves", [(2.5, 2.5), (3.5, 2)], ids=["an eighth", "a sixth and a tenth by turns"])
def test_errors_that_rose_suddenly_go_on_where_the_fast_burn_flickers(tmp_path: Path, waves: tuple[float, ...]) -> None:
    """Five minutes at 20 answers in 5 s: the half minute of a look has fewer than 20 errors, or burns fast by turns."""
    pages, lost = [], 0.0
    for at, (_, host, page) in enumerate(rewriting.scrapes("healthy")):
        text = re.sub(r"(http_requests|process_start)[^\n]*\n", "", page)
        lost += waves[(at // 9 + 1) % 2] if at > 18 else 0
        pages.append((1.7e9 + 5 * at, host, text + answers("2xx", 5000 + 20 * at - lost) + answers("5xx", lost)))
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    (finding,) = (each for each in report.present if each.diagnosis.incident.id == FAILING)
    assert (finding.diagnosis.severity, finding.diagnosis.ongoing) == ("warning", True)


def test_few_answers_of_which_some_fail_are_unknown(tmp_path: Path) -> None:
    assert state(judged(tmp_path, born("5xx", 3)), FAILING) == "unknown"


def test_errors_from_before_the_first_scrape_are_no_news(tmp_path: Path) -> None:
    old = answers("5xx", 1171) + answers("4xx", 535) + answers("2xx", 9)
    report = judged(tmp_path, lambda _: f"{old}diag_vllm_health_status 200\n")
    assert (report.verdict, state(report, FAILING), state(report, SURGE)) == ("healthy", "absent", "absent")


def test_a_series_that_ends_with_a_restart_is_no_birth(tmp_path: Path) -> None:
    """The old process has failed in the past, and answers as it did; the new one has not failed."""
    scrapes = list(rewriting.scrapes("idle"))
    start = scrapes[0][0]

    def page(at: float, text: str) -> str:
        if at - start <= 30:
            return text + answers("5xx", 1171) + answers("2xx", 1000)
        return rewriting.with_value(text, "process_start_time_seconds", f"{start + 29}")

    pages = [(at, host, page(at, text)) for at, host, text in scrapes]
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    assert state(report, FAILING) == "absent"


@pytest.mark.parametrize("handler", ["none", "/v1/models", "/docs", "/tokenize", "/v1/load_lora_adapter"])
def test_errors_of_other_routes_do_not_count(tmp_path: Path, handler: str) -> None:
    def scan(t: float) -> str:
        return answers("2xx", 1000 + t) + (answers("4xx", 535, handler) + answers("5xx", 535, handler)) * (t > 30)

    report = judged(tmp_path, scan)
    assert (state(report, FAILING), state(report, SURGE)) == ("absent", "absent")


def test_a_sudden_wave_of_client_errors_is_a_warning(tmp_path: Path) -> None:
    def wave(t: float) -> str:
        return answers("2xx", 1000 + t) + (answers("4xx", 535) if t > 30 else "")

    report = judged(tmp_path, wave)
    assert (state(report, SURGE), state(report, FAILING)) == ("present", "absent")
    assert (report.verdict, SURGE in present(report)) == ("warning", True)


@pytest.mark.parametrize(
    ("before", "counted", "later", "expected"),
    [
        (0.02, 300, 0.22, "present"),
        (0.04, 5000, 0.3, "present"),
        (0.12, 5000, 0.3, "absent"),
        (0.02, 110, 0.21, "absent"),
    ],
    ids=["young counters", "seven-fold", "of a chronic client in bursts", "what few answers may hide"],
)
def test_a_wave_is_far_above_what_the_answers_before_allow(
    tmp_path: Path, before: float, counted: int, later: float, expected: str
) -> None:
    def wave(t: float) -> str:
        asked, since = counted + 5 * min(t, 30), 5 * max(0, t - 30)
        refused = round(before * asked + later * since)
        return answers("2xx", asked + since - refused) + answers("4xx", refused)

    assert state(judged(tmp_path, wave), SURGE) == expected


def test_errors_of_an_engine_that_does_not_move_are_no_kind_of_request(tmp_path: Path) -> None:
    """The engine is dead behind a page that lives: no request succeeds, and the first step is not to repeat one."""
    end = next(each.diagnosis.until for each in judged(tmp_path, lambda _: "", "engine_stalled").present)
    start, *_ = (at for at, _, _ in rewriting.scrapes("engine_stalled"))
    pages = (
        (at, host, page + answers("2xx", 1000) + answers("5xx", 4 * (at - start)))
        for at, host, page in rewriting.scrapes("engine_stalled")
        if at <= (end or 0)
    )
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "failing", pages))]))
    failing, stalled = (
        next(each.diagnosis for each in report.present if each.diagnosis.incident.id == name)
        for name in (FAILING, "engine_stalled")
    )
    assert (report.verdict, stalled.primary, failing.explained_by) == ("critical", True, "engine_stalled")


@pytest.mark.parametrize(
    "steady",
    [
        lambda t: answers("2xx", 1000 + 5 * t) + answers("4xx", 500 + 2.5 * t),
        lambda t: answers("2xx", 1000 + 5 * t) + (answers("4xx", 8) if t > 30 else ""),
    ],
    ids=["a third, as ever", "eight"],
)
def test_a_steady_share_or_a_few_client_errors_are_no_news(tmp_path: Path, steady: Counters) -> None:
    assert state(judged(tmp_path, steady), SURGE) == "absent"


@pytest.mark.parametrize(("refused", "verdict"), [(1, "healthy"), (4, "no_incident")])
def test_clients_most_of_which_are_refused_as_ever_show_no_health(tmp_path: Path, refused: float, verdict: str) -> None:
    def steady(t: float) -> str:
        return answers("2xx", 400 + 2 * t) + answers("4xx", (200 + t) * refused)

    report = judged(tmp_path, steady, "healthy", partial(re.sub, r"http_requests[^\n]*\n", ""))
    assert (report.verdict, state(report, SURGE)) == (verdict, "absent")
    assert [item.lacks for item in report.health.missing] == (
        [] if verdict == "healthy" else ["success: 66.7 % of the answers are client errors (HTTP 4xx)"]
    )


def test_load_that_is_shed_on_purpose_is_no_failure(tmp_path: Path) -> None:
    def shed(t: float) -> str:
        rejected = f'vllm:admission_rejections_total{{model_name="tiny",reason="requests"}} {8 * t}\n'
        return answers("2xx", 100 + t) + answers("5xx", 8 * t) + rejected

    assert state(judged(tmp_path / "shed", shed), FAILING) == "absent"
    without = judged(tmp_path / "fail", lambda t: re.sub(r"vllm:.*\n", "", shed(t)))
    assert state(without, FAILING) == "present"


@pytest.mark.parametrize(("refused", "verdict"), [(0.1, "healthy"), (0.4, "no_incident"), (3, "no_incident")])
def test_a_full_queue_that_refuses_a_tenth_of_the_requests_is_no_health(
    tmp_path: Path, refused: float, verdict: str
) -> None:
    def shed(t: float) -> str:
        rejected = f'vllm:admission_rejections_total{{model_name="tiny",reason="requests"}} {refused * t}\n'
        return answers("2xx", 2 * t) + answers("5xx", refused * t) + rejected

    report = judged(tmp_path, shed, "healthy", partial(re.sub, r"http_requests[^\n]*\n", ""))
    assert report.verdict == verdict
    is_told = [item.lacks.startswith("success: the full queue") for item in report.health.missing]
    assert is_told == [True] * (verdict != "healthy")


@pytest.mark.parametrize(("refused", "expected"), [(0, "absent"), (0.2, "absent"), (4, "present")])
def test_a_short_queue_is_full_by_the_requests_that_it_refuses(tmp_path: Path, refused: float, expected: str) -> None:
    """Requests beyond the one that waits are refused (--max-num-queued-reqs 1)."""

    def shed(t: float) -> str:
        rejected = f'vllm:admission_rejections_total{{model_name="tiny",reason="requests"}} {refused * t}\n'
        return rejected * bool(refused)

    short = partial(re.sub, r"(vllm:num_requests_waiting\{.*\}|\S*capacity\S*) \d+", r"\1 1")
    assert state(judged(tmp_path, shed, "queue_saturation", short), "queue_saturation") == expected


def test_streams_that_fail_after_their_status_was_sent_are_counted_by_the_engine(tmp_path: Path) -> None:
    def streams(t: float) -> str:
        done = f'vllm:request_success_total{{engine="0",finished_reason="error",model_name="tiny"}} {2 * t}\n'
        return answers("2xx", 2 * t) + done

    without = re.compile(r'vllm:request_success_total\{[^\n]*"error"[^\n]*\n')
    report = judged(tmp_path, streams, change=lambda page: without.sub("", page))
    assert state(report, FAILING) == "present"


def test_without_a_count_of_errors_they_are_unknown(tmp_path: Path) -> None:
    """A release without finished_reason="error", behind another HTTP server."""

    def change(page: str) -> str:
        return re.sub(r'vllm:request_success_total\{[^\n]*"error"[^\n]*\n|http_requests_total[^\n]*\n', "", page)

    assert state(judged(tmp_path, lambda _: "", "healthy", change), FAILING) == "unknown"


@pytest.mark.parametrize(
    ("route", "counts"),
    [
        ("/v1/completions", True),
        ("/v1/chat/completions", True),
        ("/v1/chat/completions/batch", True),
        ("/v1/responses", True),
        ("/v1/messages", True),
        ("/v1/audio/transcriptions", True),
        ("/v1/audio/translations", True),
        ("/inference/v1/generate", True),
        ("/invocations", True),
        ("/v1/embeddings", True),
        ("/v2/embed", True),
        ("/pooling", True),
        ("/classify", True),
        ("/score", True),
        ("/v1/score", True),
        ("/rerank", True),
        ("/v1/rerank", True),
        ("/v2/rerank", True),
        ("/v1/messages/count_tokens", False),
        ("/v1/chat/completions/render", False),
        ("/v1/responses/{response_id}/cancel", False),
        ("/tokenize", False),
        ("/v1/models", False),
        ("/scale_elastic_ep", False),
    ],
)
def test_routes_of_inference(route: str, counts: bool) -> None:
    assert bool(re.fullmatch(ROUTES, route)) is counts


def test_a_probe_is_answered_200_with_the_errors_in_its_text() -> None:
    """A restart does not mend requests that clients send, and all replicas may get these requests."""
    liveness = Liveness("server", 2.0)
    scrapes = list(rewriting.scrapes("idle"))
    counters = born("5xx")
    for at, _, page in scrapes:
        health = liveness.observe(round(1000 * at), (page + counters(at - scrapes[0][0])).encode())
    assert (health.alive, health.ready) == (True, True)
    assert "errors (HTTP 5xx)" in health.readiness


@pytest.mark.parametrize(("status", "found"), [("500", "present"), ("422", "absent"), ("200", "absent")])
def test_ray_serve_counts_the_answers_of_a_server_that_answers_no_http(tmp_path: Path, status: str, found: str) -> None:
    """The page of a Ray node, with the counter of its proxy as Ray 2.60 writes it."""

    def counted(code: str, count: float) -> str:
        labels = f'application="default",method="POST",route="/v1/chat/completions",status_code="{code}"'
        return f"ray_serve_num_http_requests_total{{{labels}}} {count}\n"

    report = judged(tmp_path, lambda t: counted("201", t) + counted(status, 20 * t), "renamed_by_ray")
    assert state(report, FAILING) == found
    assert report.verdict == ("critical" if status == "500" else "warning")  # the warning: its metrics are renamed
