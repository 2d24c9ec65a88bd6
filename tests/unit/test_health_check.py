"""GET /health beside each page: what vLLM itself answers counts, in time, and nothing else does."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.bad_servers import PAGE, Answer, Reply, Request, on_metrics, serving

from diag.commands import doctor
from diag.commands.exporter import PATIENCE, Exporter, ExporterOptions
from diag.commands.observe import ObserveOptions
from diag.core.errors import Unreachable
from diag.diagnosis.report import Report
from diag.exporter.vllm_page import PageScraper
from diag.http.address import Credentials, parse
from diag.http.client import Client
from diag.http.vllm_server import VllmServer
from diag.log.corroboration import Measurement
from diag.sources.live.scrape import ScrapePlan, scrape
from diag.sources.recording.writer import record

LONG = 120.0
"""Seconds of a look that ends as soon as the engine is known to be dead, also on a busy machine."""
UVICORN = {"server": "uvicorn"}
ENVOY = {"server": "istio-envoy", "x-envoy-upstream-service-time": "3"}
SCALES = Reply(b'{"error": "The model is currently scaling. Please try again later."}', 503, {"server": "uvicorn"})
ANSWERS: dict[str, tuple[Reply, int | None]] = {
    "vLLM with an engine": (Reply(b"", 200, UVICORN), 200),
    "vLLM with a dead engine": (Reply(b"", 503, UVICORN), 503),
    "vLLM behind Istio": (Reply(b"", 503, ENVOY), 503),
    "vLLM behind a proxy that names itself": (Reply(b"", 503, {"server": "nginx"}), 503),
    "vLLM that scales": (SCALES, None),
    "no such route": (Reply(b'{"detail":"Not Found"}', 404, UVICORN), None),
    "another method": (Reply(b"", 405, UVICORN), None),
    "Istio without an upstream": (Reply(b"no healthy upstream", 503, {"server": "istio-envoy"}), None),
    "Envoy without a word": (Reply(b"", 503, {"server": "envoy"}), None),
    "nginx without an upstream": (Reply(b"<html>503 Service Temporarily Unavailable</html>", 503, {}), None),
    "the API server of Kubernetes": (Reply(b'{"kind":"Status","code":503}', 503, {}), None),
    "a router's own health": (Reply(b'{"status": "healthy"}', 200, UVICORN), None),
    "nginx by itself": (Reply(b"", 200, {"server": "nginx"}), None),
    "a redirect": (Reply(b"", 302, {"Location": "/other"}), None),
}


def answers(health: Reply | None, before: str = "") -> Answer:
    """Answer with vLLM's page, and an answer of /health beside it; None closes the connection."""

    def answer(request: Request) -> Reply | None:
        if request.path == f"{before}/health":
            return health
        return Reply() if request.path == f"{before}/metrics" else Reply(b"", 404)

    return answer


def health(url: str) -> int | None:
    """The health beside the second page; the first one is found before its path is known."""
    address = parse(url)
    server = VllmServer(address, Client(address, Credentials(), 2.0))
    server.page()
    first = server.health
    server.page()
    assert server.health == first
    assert not server.unanswered or not server.health
    return server.health


@pytest.mark.parametrize("name", ANSWERS)
def test_only_an_answer_of_vllm_itself_counts(name: str) -> None:
    reply, expected = ANSWERS[name]
    # the header of the test's own HTTP server comes first; the last value counts
    with serving(answers(reply)) as server:
        assert health(server.url) == expected


def test_health_is_asked_beside_the_page_with_its_credentials() -> None:
    with serving(answers(Reply(b"", 200, UVICORN), before="/team-a")) as server:
        address = parse(f"{server.url}/team-a/metrics")
        asked = VllmServer(address, Client(address, Credentials({"Authorization": "Bearer x"}), 2.0))
        asked.page()
        assert asked.health == 200
        assert server.asked("/team-a/health")[0].headers["Authorization"] == "Bearer x"
        assert not server.asked("/health")


@contextmanager
def held() -> Iterator[tuple[Answer, threading.Event]]:
    """A server that answers /health once the event is set."""
    over = threading.Event()

    def answer(request: Request) -> Reply | None:
        if request.path == "/health":
            over.wait(600)
            return Reply(b"", 503, UVICORN)
        return Reply() if request.path == "/metrics" else Reply(b"", 404)

    try:
        yield answer, over
    finally:
        over.set()


def test_health_that_comes_late_is_not_measured_and_delays_no_page() -> None:
    with held() as (answer, over), serving(answer) as server:
        address = parse(server.url)
        asked = VllmServer(address, Client(address, Credentials(), 2.0))
        for _ in range(3):
            begin = time.monotonic()
            asked.page()
            assert time.monotonic() - begin < 120, "it is held for 600 s"
            assert asked.health is None
        assert len(server.asked("/health")) == 1, "a server that answers late gets no second request"
        assert not asked.unanswered, "it may still answer"
        over.set()
        end = time.monotonic() + 60
        while asked.health is None and time.monotonic() < end:
            asked.page()
        assert asked.health == 503


def judged(answer: Answer, duration: float = 4.0) -> Report:
    with serving(answer) as server:
        return doctor.run(ObserveOptions([server.url], every=0.5, duration=duration))


def present(report: Report) -> set[str]:
    return {each.diagnosis.incident.id for each in report.present}


def test_engine_behind_a_page_that_comes_is_dead_where_health_answers_503() -> None:
    report = judged(answers(Reply(b"", 503, UVICORN)), LONG)
    assert "engine_dead" in present(report)
    assert report.observed.scrapes < 100, "decided as soon as three looks in a row say so"
    assert {progress.state for progress in report.progress} == {"dead"}


@pytest.mark.slow
def test_engine_is_not_dead_where_anything_else_comes() -> None:
    """All at once, since each is looked at for seconds."""
    others = {name: reply for name, (reply, status) in ANSWERS.items() if status != 503}
    with ThreadPoolExecutor(len(others)) as together:
        reports = dict(zip(others, together.map(judged, map(answers, others.values())), strict=True))
    assert [name for name, report in reports.items() if "engine_dead" in present(report)] == []


def test_engine_is_not_dead_where_health_comes_late() -> None:
    with held() as (answer, _):
        assert "engine_dead" not in present(judged(answer))


def test_recording_keeps_the_health(tmp_path: Path) -> None:
    with serving(answers(Reply(b"", 503, UVICORN))) as server:
        plan = ScrapePlan(every=0.5, duration=4.0, credentials=Credentials())
        record([server.url], tmp_path / "recording", plan)
    report = doctor.run(ObserveOptions([str(tmp_path / "recording")]))
    assert "engine_dead" in present(report)


@pytest.mark.parametrize(
    ("name", "unanswered"), [("nginx without an upstream", True), ("no such route", False), ("vLLM that scales", True)]
)
def test_an_error_of_a_proxy_is_no_answer_of_health(name: str, unanswered: bool) -> None:
    with serving(answers(ANSWERS[name][0])) as server:
        page = Exporter(ExporterOptions(server.url)).page(PATIENCE)
    assert (b"\ndiag_vllm_health_unanswered 1.0\n" in page) == unanswered


def test_page_without_health_has_no_sample_of_it() -> None:
    with serving(on_metrics(Reply())) as server:
        seen = scrape([server.url], ScrapePlan(every=0.1, duration=0.2, credentials=Credentials()))
    names = {labels["__name__"] for block in seen.samples.select([]) for labels in block.labels}
    assert "diag_vllm_health_status" not in names
    assert "vllm:num_requests_running" in names


def without_page(health: Reply, first: int = 0) -> Answer:
    """Answer /health, and /metrics only the `first` times: after that the connection ends without an answer."""

    def answer(request: Request) -> Reply | None:
        if request.path == "/health":
            return health
        if request.path == "/metrics":
            return Reply(PAGE) if request.count <= first else None
        return Reply(b"", 404)

    return answer


@pytest.mark.parametrize("first", [0, 3])
def test_a_dead_engine_counts_although_the_page_is_missing(first: int) -> None:
    report = judged(without_page(Reply(b"", 503, UVICORN), first), LONG)
    assert report.verdict == "critical"
    assert "engine_dead" in present(report)


def test_no_page_and_a_good_health_is_no_server_to_judge() -> None:
    with pytest.raises(Unreachable):
        judged(without_page(Reply(b"", 200, UVICORN)))


def test_an_unknown_server_without_a_page_has_no_dead_engine() -> None:
    with pytest.raises(Unreachable):
        judged(without_page(Reply(b"", 503, {"server": "nginx"})))


def test_exporter_keeps_the_health_without_a_page() -> None:
    with serving(without_page(Reply(b"", 503, UVICORN), first=1)) as server:
        scraper = PageScraper(parse(server.url), 2.0)
        assert scraper.scrape().up
        alone = scraper.scrape()
    assert (alone.up, alone.page, alone.health) == (False, b"", 503)
    assert "closed the connection" in alone.problem
    assert alone.measured(0.0) == Measurement(0.0, page=False, answers=True, health=503)


def test_livez_waits_for_the_health_of_a_server_whose_page_hangs() -> None:
    over = threading.Event()

    def hangs(request: Request) -> Reply | None:
        if request.path == "/metrics" and request.count > 1:
            over.wait(30)
        return without_page(Reply(b"", 503, UVICORN), first=1)(request)

    with serving(hangs) as server:
        exporter = Exporter(ExporterOptions(server.url))
        assert b"\ndiag_vllm_up 1.0\n" in exporter.page(PATIENCE)
        page = exporter.page(PATIENCE)
        over.set()
    assert b"\ndiag_vllm_up 0.0\n" in page
    assert b"\ndiag_vllm_health_status 503.0\n" in page
