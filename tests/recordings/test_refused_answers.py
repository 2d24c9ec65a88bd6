"""A server that refuses every request (HTTP 4xx) is ill, whatever the class; one that refuses some of them is not."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support import rewriting
from support.reports import judged_logs
from support.scenarios import found

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.log.load import MOST_NAMES, AnswerCounts

REFUSED, SURGE = "requests_refused", "client_errors_surge"
Counters = Callable[[float], str]
"""The counters of HTTP answers so many seconds after the first scrape."""


def answers(status: str, count: float, handler: str = "/v1/chat/completions", method: str = "POST") -> str:
    return f'http_requests_total{{handler="{handler}",method="{method}",status="{status}"}} {count}\n'


def judged(
    folder: Path, counters: Counters, recording: str = "idle", change: Callable[[str], str] = str, lasts: int = 0
) -> Report:
    scrapes = list(rewriting.scrapes(recording))
    start, *page = scrapes[0]
    scrapes = [(start + t, *page) for t in range(lasts)] or scrapes
    pages = ((at, host, change(page) + counters(at - start)) for at, host, page in scrapes)
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", pages))]))


def state(report: Report, incident: str = REFUSED) -> str:
    (diagnosis,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == incident)
    return diagnosis.state


def test_a_server_that_has_refused_every_request_since_its_start_is_a_warning(tmp_path: Path) -> None:
    report = judged(tmp_path, lambda t: answers("4xx", 5 + 2 * t))
    assert (report.verdict, found(report, REFUSED).diagnosis.primary) == ("warning", True)


def all_at_once(t: float) -> str:
    """Return the counters of a server that answers until 67 s, and refuses everything from then on."""
    return answers("2xx", 5000 + 14 * min(t, 67)) + answers("4xx", 3 * (t - 67)) * (t > 67)


@pytest.mark.parametrize(
    ("counters", "lasts", "expected"),
    [
        (lambda t: answers("2xx", 5000) + answers("4xx", 5 + 2 * t), 61, "critical"),
        *((all_at_once, lasts, "critical") for lasts in (110, 126, 151, 170)),
        (lambda t: all_at_once(t) + answers("2xx", t // 20, "/v1/completions"), 151, "absent"),
        (lambda t: all_at_once(min(t, 120)) + answers("2xx", max(5, t - 115), "/v1/completions"), 151, "absent"),
    ],
    ids=["all the time", "40 s", "a minute", "80 s", "100 s", "some succeed", "ended"],
)
def test_it_is_critical_where_the_same_process_served_before(
    tmp_path: Path, counters: Counters, lasts: int, expected: str
) -> None:
    """However long the look is: a wave of client errors does not hide that none succeeds since it began."""
    report = judged(tmp_path, counters, lasts=lasts)
    diagnosis = found(report, REFUSED).diagnosis if state(report) == "present" else None
    assert (diagnosis.severity if diagnosis else state(report)) == expected
    if diagnosis and counters is all_at_once:
        start, *_ = (at for at, _, _ in rewriting.scrapes("idle"))
        assert (diagnosis.primary, (diagnosis.since or 0) - start) == (True, pytest.approx(68, abs=2))
        assert found(report, SURGE).diagnosis.explained_by == REFUSED


def test_after_a_restart_the_successes_of_the_former_process_do_not_count(tmp_path: Path) -> None:
    scrapes = list(rewriting.scrapes("idle"))
    start = scrapes[0][0]

    def page(t: float, text: str) -> str:
        if t <= 20:
            return text + answers("2xx", 5000)
        return rewriting.with_value(text, "process_start_time_seconds", f"{start + 19}") + answers("4xx", 5 * (t - 20))

    pages = [(at, host, page(at - start, text)) for at, host, text in scrapes]
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    assert found(report, REFUSED).diagnosis.severity == "warning"


@pytest.mark.parametrize(
    ("counters", "verdict"),
    [
        (lambda t: answers("2xx", 100 + t / 4) + answers("4xx", 500 + 5 * t), "no_incident"),
        (lambda t: answers("4xx", 500), "healthy"),
        (lambda t: answers("4xx", 10 * t, "/v1/completions", "GET") + answers("2xx", 3), "healthy"),
        (
            lambda t: answers("4xx", 10 * t, "none") + answers("4xx", 10 * t, "/v1/models", "GET") + answers("2xx", 3),
            "healthy",
        ),
    ],
    ids=["some succeed", "before the first scrape", "probes with GET", "scans of other routes"],
)
def test_it_is_absent(tmp_path: Path, counters: Counters, verdict: str) -> None:
    report = judged(tmp_path, lambda t: counters(t) + "diag_vllm_health_status 200\n")
    assert (report.verdict, state(report)) == (verdict, "absent")


def test_a_scanner_without_a_key_beside_a_server_at_work_is_nothing(tmp_path: Path) -> None:
    """The busy server of this recording has no metrics of HTTP: its tokens show that requests succeed."""
    without = re.compile(r"http_requests_total[^\n]*\n")
    scan = judged(tmp_path, lambda t: answers("4xx", 2 * t), "healthy", lambda page: without.sub("", page))
    assert state(scan) == "absent"


def test_too_few_answers_are_unknown(tmp_path: Path) -> None:
    assert state(judged(tmp_path, lambda t: answers("4xx", 4 if t > 30 else 1))) == "unknown"


def test_without_any_count_of_answers_it_is_unknown(tmp_path: Path) -> None:
    assert state(judged(tmp_path, lambda _: "", "idle", lambda page: re.sub(r"http_[^\n]*\n", "", page))) == "unknown"


# -- by a log alone ---------------------------------------------------------------------------------------------------

API = "(APIServer pid=7) "
START = [
    f"{API}INFO 11-20 10:04:00 [api_server.py:1977] vLLM API server version 0.32.0",
    f"{API}INFO 11-20 10:04:30 [launcher.py:195] Route: /v1/completions, Methods: POST",
    "INFO:     Started server process [7]",
    "INFO:     Application startup complete.",
]


def line(status: int, route: str = "/v1/chat/completions", method: str = "POST") -> str:
    return f'INFO:     10.0.0.7:51234 - "{method} {route} HTTP/1.1" {status} Status'


def by_log(folder: Path, *lines: str) -> Report:
    (folder / "server.log").write_text("\n".join([*START, *lines]) + "\n")
    return judged_logs(folder / "server.log")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429])
def test_a_log_alone_shows_it_at_once_whatever_the_status(tmp_path: Path, status: int) -> None:
    report = by_log(tmp_path, *[line(status)] * 12)
    assert (report.verdict, found(report, REFUSED).diagnosis.primary) == ("warning", True)
    advice = " ".join(each.text for each in found(report, REFUSED).proposals)
    assert ("VLLM_HTTP_MAX_REQUEST_BODY_SIZE" in advice) is (status == 413)


@pytest.mark.parametrize(("status", "bounds", "noted"), [(401, 1, True), (401, 2, False), (200, 1, False)])
def test_errors_whose_time_nothing_bounds_are_said_to_be_spread(
    tmp_path: Path, status: int, bounds: int, noted: bool
) -> None:
    begin = next(rewriting.scrapes("weights_not_reloaded"))[0]
    times = (datetime.fromtimestamp(begin + later, UTC) for later in (0, 50)[:bounds])
    started, *ended = (f"INFO {time:%m-%d %H:%M:%S} [api_server.py:1] a" for time in times)
    rewriting.pages_alone(tmp_path, "weights_not_reloaded")
    (tmp_path / "server.log").write_text("\n".join([started, *[line(status)] * 3, *ended]) + "\n")
    notes = doctor.run(ObserveOptions([str(tmp_path)])).observed.notes
    assert ("3 errors in server.log without a time: assumed to be spread evenly" in notes) == noted


def test_the_order_of_the_lines_shows_a_wave_behind_successes(tmp_path: Path) -> None:
    """Neither kind of line has a time; of 401 no other line does either."""
    report = by_log(tmp_path, *[line(200)] * 300, *[line(401)] * 100)
    assert found(report, REFUSED).diagnosis.severity == "critical"


@pytest.mark.parametrize(
    "lines",
    [
        [*[line(200)] * 300, *[line(401)] * 12],
        [*([line(200), *[line(400)] * 40] * 3), *[line(400)] * 50],
        [line(401), line(200), line(401)] * 50,
        [line(404, "/", "GET"), line(404, "/robots.txt", "GET"), line(404, "/.env", "POST"), line(405, method="GET")]
        * 50,
        [line(307)] * 50,
    ],
    ids=["a burst at the end", "a client in bursts", "a scanner", "scans of other routes", "redirections"],
)
def test_a_log_alone_shows_no_incident(tmp_path: Path, lines: list[str]) -> None:
    assert by_log(tmp_path, *lines).verdict == "no_incident"


def test_a_wrong_base_url_is_named(tmp_path: Path) -> None:
    report = by_log(tmp_path, *[line(404, "/chat/completions")] * 40)
    (names,) = (each for each in found(report, REFUSED).diagnosis.supports if "in vain" in each.condition.signal.name)
    assert names.culprits == ('route "/chat/completions"',)


# -- what clients ask for ---------------------------------------------------------------------------------------------


def model_error(name: str) -> str:
    return f"Error with model error=ErrorInfo(message='The model `{name}` does not exist.', type='NotFoundError')"


def named(counts: AnswerCounts) -> list[str]:
    return [labels[1] for name, labels, _ in counts.samples() if name == "diag_vllm_log_refused_name_timestamp_seconds"]


def test_a_clients_text_is_printable_short_and_without_secrets() -> None:
    counts = AnswerCounts()
    counts.read_error(model_error("a\x1b[31m\nb" + "x" * 300), 1.0)
    counts.read_error(model_error("hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"), 2.0)
    for name in named(counts):
        assert name.isprintable()
        assert len(name) <= 100
        assert "abcdefghijklmnop" not in name


def test_clients_cannot_make_many_names() -> None:
    counts = AnswerCounts()
    for number in range(1000):
        counts.read_error(model_error(f"model-{number}"), float(number))
    assert named(counts) == [f"model-{number}" for number in range(MOST_NAMES)]
    counts.read_error(model_error("later"), 10_000.0)
    assert named(counts)[-1] == "later"
