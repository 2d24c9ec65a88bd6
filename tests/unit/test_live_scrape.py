"""Live servers, good and bad: real ones on 127.0.0.1, asked over real sockets."""

import gc
import gzip
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import bad_servers as bad
from support.bad_servers import PAGE, Answer, Reply, Request, Server, on_metrics, pages, serving, talking

from diag.core.errors import BadUsage, Unreachable
from diag.core.metric_families import Collected
from diag.exporter.page import host_collectors
from diag.exporter.process.collector import ProcessCollector
from diag.http.address import Credentials
from diag.http.vllm_server import VllmServer
from diag.promql import evaluate
from diag.sources.live import server as live_server
from diag.sources.live.scrape import POST_MORTEM_HINT, ScrapePlan, ScrapeProgress, scrape
from diag.sources.live.server import JoinedPages, ScrapeClock
from diag.sources.observation import Observation

HTML = Reply(b"<!DOCTYPE html><html><body>Welcome</body></html>\n", headers={"Content-Type": "text/html"})
ONCE = {"every": 0.1, "duration": 0.0}
ADDRESS = "; is this the address of a vLLM server?"
WAYS = "DIAG_BEARER_TOKEN, DIAG_BASIC_AUTH or DIAG_HEADERS_FILE"


def look(*servers: Server | str, **plan: Any) -> Observation:
    """A watch of some three scrapes; a busy machine may leave one out."""
    targets = [each if isinstance(each, str) else each.url for each in servers]
    return scrape(targets, ScrapePlan(**{"every": 0.1, "duration": 0.2, "credentials": Credentials(), **plan}))


def three(server: Server) -> Callable[[Observation], bool]:
    """Watch on until there were three scrapes: a busy machine may have left one out."""
    return lambda _: len(server.asked("/metrics")) < 3


def values(observed: Observation, query: str) -> list[list[float]]:
    vector = evaluate(query, observed.samples, observed.instants)
    return np.where(vector.present, vector.values, np.nan).tolist()


def refusal(*servers: Server | str, **plan: Any) -> str:
    with pytest.raises(Unreachable) as error:
        look(*servers, **plan)
    assert str(error.value).isprintable()
    return str(error.value)


def scrape_times(observed: Observation, server: Server) -> Any:
    return next(each.times for each in observed.samples.select([]) if each.labels[0]["instance"] == server.instance)


SCALING = Reply(b'{"error":"The model is currently scaling. Please try again later."}', status=503)


@pytest.mark.parametrize(("reply", "expected"), [(SCALING, 1.0), (Reply(b"no upstream", status=503), np.nan)])
def test_vllm_that_refuses_requests_because_it_scales_is_told_from_one_that_is_gone(
    reply: Reply, expected: float
) -> None:
    with serving(on_metrics(Reply(PAGE), reply, reply, reply, reply, reply)) as server:
        observed = look(server, should_go_on=three(server))
    found = values(observed, "last_over_time(diag_vllm_elastic_scaling[1m])")
    assert [row[-1] for row in found] == ([expected] if expected == 1.0 else [])


# What is good


def test_live_server_is_scraped_until_the_end() -> None:
    with serving(pages(PAGE)) as server:
        observed = look(server)
        asked = len(server.asked("/metrics"))
    assert (observed.source, observed.target, observed.scrapes) == ("scrape", server.url, asked)
    assert set(values(observed, "vllm:num_requests_running")[0]) == {3}
    assert (observed.failed_scrapes, observed.notes) == (0, ())


def test_duration_of_zero_is_one_scrape() -> None:
    with serving(pages(PAGE)) as server:
        observed = look(server, **ONCE)
    assert (observed.scrapes, len(observed.instants), observed.interval) == (1, 1, 0.1)


@pytest.mark.slow
def test_scrapes_keep_to_their_grid_however_long_an_answer_takes() -> None:
    def answer(request: Request) -> Reply:
        time.sleep(0.6)
        return Reply()

    with serving(answer) as server:
        times = scrape_times(look(server, every=1.2, duration=4.8), server)  # one of four is begun in time
    late = (times[1:] - times[0]) % 1200
    assert late.min() < 550  # 600 at least, if each scrape were counted from the end of the one before


@pytest.mark.slow
def test_a_slow_server_does_not_delay_the_others() -> None:
    """The second page of the slow one comes after the fourth of the other one, and in time: else its scrape fails."""
    fourth = threading.Event()

    def slowly(request: Request) -> Reply:
        if request.count > 1:
            fourth.wait(60)
        return Reply()

    def quickly(request: Request) -> Reply:
        if request.count == 4:
            fourth.set()
        return Reply()

    with serving(slowly) as slow, serving(quickly) as quick:
        observed = look(slow, quick, every=0.2, duration=3.0, timeout=30.0)
    assert len(scrape_times(observed, quick)) >= 4
    assert observed.failed_scrapes == 0


@pytest.mark.parametrize("given", ["{}", "{}/", "{}/metrics", "127.0.0.1:{port}"])
def test_the_page_of_a_base_address_is_found(given: str) -> None:
    with serving(pages(PAGE)) as server:
        assert look(given.format(server.url, port=server.port), **ONCE).notes == ()


@pytest.mark.parametrize("at_v1", [Reply(b"", 404), HTML, Reply(b'{"a": 1}')])
def test_page_at_another_path_is_found_and_noted(at_v1: Reply) -> None:
    def answer(request: Request) -> Reply:
        return {"/v1": at_v1, "/metrics": Reply()}.get(request.path, Reply(b"", 404))

    with serving(answer) as server:
        observed = look(f"{server.url}/v1")
    assert observed.notes == (f"{server.url}/v1 is not a metrics page: /metrics was used",)
    assert len(server.asked("/v1")) == 1


def with_api_key(root: str) -> Answer:
    """Answer like vLLM with an API key: the API needs the key, the page does not."""

    def answer(request: Request) -> Reply:
        if request.path.startswith(f"{root}/v1"):
            return Reply(b'{"error": "Unauthorized"}', 401)
        return {f"{root}/metrics": Reply(), f"{root}/health": Reply(b"")}.get(request.path, Reply(b"", 404))

    return answer


@pytest.mark.parametrize("root", ["", "/model-a", "/v1/model-a"])
@pytest.mark.parametrize("given", ["/v1", "/v1/", "/v1/chat/completions", "/metrics", "/metrics/", "/health", ""])
def test_page_is_found_from_any_address_of_the_server(root: str, given: str) -> None:
    with serving(with_api_key(root)) as server:
        assert look(f"{server.url}{root}{given}", **ONCE).failed_scrapes == 0


def test_server_description_is_requested_once() -> None:
    said = {
        "/version": {"version": "0.32.0"},
        "/v1/models": {"data": [{"id": "tiny", "max_model_len": 2048}]},
        "/server_info?config_format=json": {"vllm_config": {"scheduler_config": {"max_num_seqs": 64}}},
    }

    def answer(request: Request) -> Reply:
        return Reply(json.dumps(said[request.path]).encode()) if request.path in said else Reply()

    with serving(answer) as server:
        observed = look(server)
    assert observed.versions == {server.instance: "0.32.0"}
    assert values(observed, 'max(diag_vllm_config{flag="max_model_len"})')[0][-1] == 2048
    assert values(observed, 'max(diag_vllm_config{flag="max_num_seqs"})')[0][-1] == 64
    assert [len(server.asked(path)) for path in said] == [1, 1, 1]


def test_slow_response_beside_the_page_is_awaited() -> None:
    def answer(request: Request) -> Reply:
        if request.path == "/version":
            time.sleep(0.3)
            return Reply(b'{"version": "0.32.0"}')
        return Reply()

    with serving(answer) as server:
        assert look(server, **ONCE).versions == {server.instance: "0.32.0"}


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"data": [1, {"x": 2}], "version": null}', b"[" * 100_000])
def test_invalid_response_beside_the_page_is_ignored(body: bytes) -> None:
    with serving(lambda request: Reply() if request.path == "/metrics" else Reply(body)) as server:
        observed = look(server)
    assert (observed.notes, observed.versions) == ((), {})


def test_the_launch_command_is_kept() -> None:
    with serving(pages(PAGE)) as server:
        observed = look(server, launch="vllm serve m --max-num-seqs 9")
    assert values(observed, 'max(diag_vllm_config{flag="max_num_seqs"})')[0][-1] == 9
    assert observed.launch == {server.instance: "vllm serve m --max-num-seqs 9"}


def test_gzip_is_requested_and_unpacked() -> None:
    reply = Reply(gzip.compress(PAGE), headers={"Content-Encoding": "gzip"})
    with serving(on_metrics(reply)) as server:
        observed = look(server)
        request = server.asked("/metrics")[0]
    assert observed.failed_scrapes == 0
    assert (request.headers["Accept-Encoding"], request.headers["Accept"]) == ("gzip", "text/plain;version=0.0.4")


def test_a_wrong_content_type_does_not_matter() -> None:
    with serving(on_metrics(Reply(headers={"Content-Type": "application/octet-stream"}))) as server:
        assert look(server, **ONCE).failed_scrapes == 0


def test_a_redirect_on_the_same_server_is_followed() -> None:
    def answer(request: Request) -> Reply:
        return Reply(b"", 307, {"Location": "/real/metrics"}) if request.path == "/metrics" else Reply()

    with serving(answer) as server:
        assert look(server, **ONCE).failed_scrapes == 0


# What is bad from the first contact on


def test_closed_port_is_one_sentence() -> None:
    port = bad.closed_port()
    assert refusal(f"127.0.0.1:{port}") == (
        f"cannot connect to http://127.0.0.1:{port}: connection refused; is the server up, is the port right?"
        f"{POST_MORTEM_HINT}"
    )


def test_unknown_host_is_reported() -> None:
    assert "unknown host name; is the name right?" in refusal("http://no-such-host.invalid:8000")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("talk", "timeout", "reason"),
    [
        (bad.hang, 1.0, "accepted the connection but sent nothing for 1 s; is the server overloaded or stopped?"),
        (bad.drip, 1.0, "did not finish its response within 2 s; is the server overloaded?"),
        (bad.break_off, 30.0, "closed the connection in the middle of its response"),
        (bad.babble, 30.0, f"sent something that is not HTTP{ADDRESS}"),
        (bad.slam, 30.0, "closed the connection without a response; is it https?"),
    ],
)
def test_a_server_that_does_not_answer_properly(talk: Callable[..., None], timeout: float, reason: str) -> None:
    with talking(talk) as server:
        assert refusal(server, timeout=timeout) == f"{server.url} {reason}"


def test_page_of_200_megabytes_is_refused() -> None:
    with talking(bad.flood) as server:
        assert refusal(server, timeout=30.0) == f"{server.url} sent more than 16 MiB"


def test_a_gzip_bomb_is_not_unpacked() -> None:
    bomb = Reply(gzip.compress(b"#" * 200 * 2**20, 1), headers={"Content-Encoding": "gzip"})
    with serving(on_metrics(bomb)) as server:
        assert refusal(server, timeout=30.0) == f"{server.url} sent more than 16 MiB"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(b"", 401), f"requires credentials (HTTP 401); set {WAYS}"),
        (Reply(b"", 403), f"requires credentials (HTTP 403); set {WAYS}"),
        (Reply(b"", 404), f"has no page /metrics (HTTP 404){ADDRESS}"),
        (Reply(b"", 500), f"answered HTTP 500{ADDRESS}"),
        (HTML, f"answered an HTML page, not metrics{ADDRESS}"),
        (Reply(b'{"status": "ok"}'), f"answered JSON, not metrics{ADDRESS}"),
        (Reply(b""), "answered an empty page"),
        (Reply(b"\x1b[2Jhello\n"), "answered no metrics: line 1 is not a metric: \\x1b[2Jhello"),
        (Reply(b"x", headers={"Content-Encoding": "br"}), "answered in an encoding that was not requested (br)"),
        (Reply(b"no gzip", headers={"Content-Encoding": "gzip"}), "sent a damaged gzip body"),
        (
            Reply(gzip.compress(PAGE)[:-9], headers={"Content-Encoding": "gzip"}),
            "closed the connection in the middle of its response",
        ),
        (
            Reply(b"", 302, {"Location": "/metrics"}),
            "redirects in a loop; use the address where the redirects should end",
        ),
    ],
)
def test_a_server_without_a_page_of_metrics(reply: Reply, reason: str) -> None:
    with serving(lambda _: reply) as server:
        assert refusal(server) == f"{server.url} {reason}"


def test_missing_page_error_lists_the_tried_addresses() -> None:
    with serving(lambda request: HTML if request.path == "/ui" else Reply(b"", 404)) as server:
        places = "/ui (answered an HTML page, not metrics), /ui/metrics (HTTP 404), /metrics (HTTP 404)"
        assert refusal(f"{server.url}/ui") == f"{server.url}/ui has no metrics at {places}{ADDRESS}"


@pytest.mark.parametrize("status", [401, 403])
def test_missing_credentials_are_reported_before_missing_pages(status: int) -> None:
    with serving(lambda request: Reply(b"", status if request.path == "/metrics" else 404)) as server:
        wanted = f"{server.url}/v1/models requires credentials (HTTP {status}); set {WAYS}"
        assert refusal(f"{server.url}/v1/models") == wanted


def test_several_servers_that_all_fail_are_one_sentence() -> None:
    port = bad.closed_port()
    with serving(lambda _: HTML) as server:
        assert refusal(f"127.0.0.1:{port}", server) == (
            f"none of 2 servers returned metrics: http://127.0.0.1:{port} (connection refused), "
            f"{server.url} (answered an HTML page, not metrics); is the server up, is the port right?"
        )


def test_a_dead_server_among_others_is_data() -> None:
    dead = f"127.0.0.1:{bad.closed_port()}"
    with serving(pages(PAGE)) as server:
        observed = look(server, dead)
    assert observed.failed_scrapes > 0
    (note,) = observed.notes
    assert note.endswith(f" of {dead} failed: connection refused (all of them)")
    assert values(observed, f'max(up{{instance="{dead}"}})')[0][-1] == 0


# What goes bad meanwhile


def test_a_server_that_fails_later_is_data() -> None:
    with serving(on_metrics(Reply(), Reply(b"", 500))) as server:
        observed = look(server, should_go_on=three(server))
    up = values(observed, "up")[0]
    assert (up[0], set(up[1:])) == (1, {0})
    failed = f"{observed.scrapes - 1} of {observed.scrapes} scrapes of {server.instance} failed"
    assert observed.notes[0].startswith(f"{failed}: answered HTTP 500 (from ")


def beside(log: str = "") -> Callable[[VllmServer], JoinedPages]:
    """Return the samples of this host about a server on it."""
    return lambda server: JoinedPages(server, host_collectors(server.address, log, None))


def test_a_server_of_this_host_that_fails_later_is_no_longer_up() -> None:
    with serving(on_metrics(Reply(), Reply(b"", 500))) as server:
        observed = look(server, beside=beside(), should_go_on=three(server))
    assert values(observed, "diag_vllm_up")[0][-1] == values(observed, "up")[0][-1] == 0
    assert "failed: answered HTTP 500" in observed.notes[0]


def test_a_closed_port_of_a_server_whose_log_is_named_is_data(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("(APIServer pid=1) ERROR 11-21 02:10:01 [async_llm.py:1] AsyncLLM output_handler failed.\n")
    observed = look(f"127.0.0.1:{bad.closed_port()}", beside=beside(str(log)), duration=1.0)
    deaths = values(observed, 'diag_vllm_log_event_last_timestamp_seconds{event="engine_dead"}')[0]
    assert deaths[-1] > 0
    assert observed.failed_scrapes == observed.scrapes


@pytest.mark.parametrize("limit", [8.0, 0.01])
def test_without_a_page_what_stands_beside_it_gets_more_time_and_decides_only_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    look_at_processes = ProcessCollector.collect

    def slow(self: ProcessCollector) -> Collected:
        time.sleep(0.5)
        return look_at_processes(self)

    monkeypatch.setattr(ProcessCollector, "collect", slow)
    monkeypatch.setattr(live_server, "SECONDS", 0.01)
    monkeypatch.setattr(live_server, "ALONE_SECONDS", limit)
    (tmp_path / "vllm.log").touch()
    asked: list[Observation] = []
    target, host = f"127.0.0.1:{bad.closed_port()}", beside(str(tmp_path / "vllm.log"))
    longest = 600.0 if limit > 1 else 1.0  # ended by the decision; nothing may be decided of what is partial
    observed = look(target, beside=host, duration=longest, is_decided=lambda seen: asked.append(seen) is None)
    assert bool(asked) is (limit > 1)
    took = values(observed, 'diag_scrape_duration_seconds{collector="process"}')[0]
    assert min(took) > 0.4 or not asked


def test_a_port_that_orphaned_engines_keep_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.log").touch()
    monkeypatch.setattr(ProcessCollector, "serves_nobody", lambda _: True)
    with talking(bad.hang) as server:  # a scrape that waited for its page would take all of the 600 s
        host = beside(str(tmp_path / "vllm.log"))
        observed = look(server, beside=host, timeout=600.0, duration=600.0, is_decided=lambda seen: seen.scrapes >= 3)
    assert observed.failed_scrapes == observed.scrapes >= 3
    assert "the process that would has ended" in observed.notes[0]


def test_wrong_response_is_not_a_silent_server(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").touch()
    with serving(lambda _: Reply(b"", 404)) as server:
        assert "no page" in refusal(server, beside=beside(str(tmp_path / "vllm.log")))


def test_a_server_that_closes_its_port_is_data() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(pages(PAGE)))
        observed = look(server, on_progress=lambda _: stack.close(), should_go_on=lambda seen: seen.scrapes < 2)
    up = values(observed, "up")[0]
    assert (up[0], set(up[1:])) == (1, {0})
    assert "connection refused" in observed.notes[0]


def test_scraping_ends_with_the_refused_scrape_that_decides() -> None:
    asked: list[int] = []
    with ExitStack() as stack:
        server = stack.enter_context(serving(pages(PAGE)))

        def decided(seen: Observation) -> bool:
            asked.append(seen.failed_scrapes)
            return len(asked) == 2

        observed = look(server, duration=600.0, on_progress=lambda _: stack.close(), is_decided=decided)
    assert asked == [2, 3]  # right after a scrape; later after half as many more, for judging takes time
    assert observed.failed_scrapes == asked[-1]


def test_truncated_page_is_used_up_to_the_cut() -> None:
    with talking(bad.cut_off) as server:
        observed = look(server)
    assert values(observed, "vllm:num_requests_running")[0][-1] == 3
    assert values(observed, "process_start_time_seconds") == []
    pages = f"{observed.scrapes} of {observed.scrapes} pages of {server.instance}"
    assert observed.notes == (f"{pages} ended in the middle of a line: the rest counts as missing",)


def test_restart_and_model_change_are_noted() -> None:
    other = PAGE.replace(b"1.79522728772e+09", b"1.79522729999e+09").replace(b"tiny", b"other").replace(b"444", b"4")
    with serving(pages(PAGE, other)) as server:
        observed = look(server, should_go_on=three(server))
    assert [note.split(" at ")[0] for note in observed.notes] == [
        f"{server.instance} restarted",
        f"the served model of {server.instance} changed from tiny to other",
    ]


def test_odd_values_and_texts_are_kept_as_data() -> None:
    page = PAGE + b'a NaN\nb +Inf\nc{x="\xff\x1b[31m\\n"} 1 1795227337480\nc{x="\xff\x1b[31m\\n"} 1\n'
    with serving(pages(page)) as server:
        observed = look(server)
    assert values(observed, "b")[0][-1] == np.inf
    assert values(observed, 'c{x="\ufffd\x1b[31m\\n"}')[0][-1] == 1
    assert len(observed.notes) == 2
    assert all(note.isprintable() for note in observed.notes)


# Credentials


SECRET = Credentials(headers={"Authorization": "Bearer abc", "X-Scope": "me"})


def guarded(request: Request) -> Reply:
    return Reply() if request.headers.get("Authorization") == "Bearer abc" else Reply(b"", 401)


def test_credentials_are_sent_with_every_request() -> None:
    with serving(guarded) as server:
        look(server, credentials=SECRET)
    assert {each.path for each in server.requests} > {"/metrics", "/version"}
    assert all(each.headers.get("X-Scope") == "me" for each in server.requests)


def test_credentials_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIAG_BEARER_TOKEN", "abc")
    with serving(guarded) as server:
        assert look(server, credentials=None, **ONCE).failed_scrapes == 0


def test_refused_credentials_are_reported() -> None:
    with serving(lambda _: Reply(b"", 401)) as server:
        assert refusal(server, credentials=SECRET) == (f"{server.url} rejects the credentials (HTTP 401); check {WAYS}")


def test_credentials_do_not_follow_a_redirect_to_another_server() -> None:
    with serving(pages(PAGE)) as other:
        away = Reply(b"", 302, {"Location": f"{other.url}/metrics"})
        with serving(lambda _: away) as server:
            said = refusal(server, credentials=SECRET)
    assert said == f"{server.url} redirects to another server ({other.url}), which is not followed; use that address"
    assert other.requests == []


def test_a_password_in_the_address_is_sent_and_shown_nowhere() -> None:
    with serving(lambda request: Reply() if "Authorization" in request.headers else Reply(b"", 401)) as server:
        observed = look(f"http://me:secret@127.0.0.1:{server.port}/metrics?token=secret")
        port = bad.closed_port()
        said = refusal(f"http://me:secret@127.0.0.1:{port}/?token=secret")
    assert observed.failed_scrapes == 0
    assert "secret" not in f"{observed} {said}"


def test_no_proxy_comes_between_this_machine_and_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{bad.closed_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(pages(PAGE)) as server:
        assert look(server, **ONCE).failed_scrapes == 0


def test_other_hosts_are_contacted_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: Reply()) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        observed = look("http://server.invalid:8000", **ONCE)
    assert observed.instances == ("server.invalid:8000",)
    assert proxy.requests[0].path == "http://server.invalid:8000/metrics"


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: bad.certificate(folder, name) for name in ("server", "client")}


def test_untrusted_certificate_is_refused(certificates: dict[str, tuple[Path, Path]]) -> None:
    with serving(pages(PAGE), bad.server_context(*certificates["server"])) as server:
        assert refusal(server) == (
            f"{server.url} has a certificate that is not trusted (self-signed certificate); set DIAG_CA_FILE"
        )


def test_own_certificate_authority_is_trusted(certificates: dict[str, tuple[Path, Path]]) -> None:
    with serving(pages(PAGE), bad.server_context(*certificates["server"])) as server:
        assert look(server, credentials=Credentials(ca_file=str(certificates["server"][0]))).failed_scrapes == 0


def test_client_certificate_is_sent(certificates: dict[str, tuple[Path, Path]]) -> None:
    cert, key = certificates["client"]
    access = Credentials(ca_file=str(certificates["server"][0]), client_cert=str(cert), client_key=str(key))
    with serving(pages(PAGE), bad.server_context(*certificates["server"], clients=cert)) as server:
        assert look(server, credentials=access, **ONCE).failed_scrapes == 0


def test_missing_client_certificate_is_reported(certificates: dict[str, tuple[Path, Path]]) -> None:
    access = Credentials(ca_file=str(certificates["server"][0]))
    context = bad.server_context(*certificates["server"], clients=certificates["client"][0])
    with serving(pages(PAGE), context) as server:
        said = refusal(server, credentials=access)
    # Whether the server's alert arrives before it closes the connection is a matter of luck.
    assert re.fullmatch(
        f"{server.url} (requires a client certificate that it trusts;|(reset the|closed the encrypted) connection;"
        " if it requires a client certificate,) set DIAG_CLIENT_CERT and DIAG_CLIENT_KEY",
        said,
    )


def test_https_to_an_http_server_is_reported() -> None:
    with serving(pages(PAGE)) as server:
        assert refusal(f"https://127.0.0.1:{server.port}") == (
            f"https://127.0.0.1:{server.port} does not speak TLS; is it http instead of https?"
        )


def test_unusable_tls_file_is_a_usage_error() -> None:
    with pytest.raises(BadUsage):
        look("https://127.0.0.1:1", credentials=Credentials(ca_file="/no/file"))


# The reader's say


def test_progress_is_reported_after_every_scrape() -> None:
    told: list[ScrapeProgress] = []
    with serving(on_metrics(Reply(), Reply(b"", 500))) as server:
        look(server, on_progress=told.append, should_go_on=three(server))
    assert [(each.scrapes, each.failed, each.of_seconds) for each in told[:3]] == [
        (1, 0, 0.2),
        (2, 1, 0.2),
        (3, 2, 0.2),
    ]


def test_observation_is_extended_on_request() -> None:
    seen: list[int] = []

    def more(observed: Observation) -> bool:
        seen.append(observed.scrapes)
        return len(seen) < 3

    with serving(pages(PAGE)) as server:
        observed = look(server, should_go_on=more, timeout=1.0)
    assert seen[0] <= 3
    assert seen[0] < seen[1] < seen[2] == observed.scrapes


def interrupt(after: int, presses: int = 1) -> Callable[[ScrapeProgress], None]:
    def stop(progress: ScrapeProgress) -> None:
        if progress.scrapes == after:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)

    return stop


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupted_observation_is_judged(presses: int, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(pages(PAGE)) as server:
        observed = look(server, duration=60.0, on_progress=interrupt(2, presses))
    gc.collect()  # asyncio reports what nobody has awaited as it is deleted
    assert capfd.readouterr().err == ""
    assert observed.scrapes == 2
    assert observed.notes == ("interrupted: only the scrapes until then were used",)


def test_a_watch_that_is_interrupted_before_anything_was_seen_is_interrupted() -> None:
    with serving(lambda _: HTML) as server, talking(bad.hang) as other, pytest.raises(KeyboardInterrupt):
        look(server, other, on_progress=interrupt(1))


def test_ctrl_c_ends_an_observation_without_output_on_standard_error() -> None:
    code = """
import sys
from diag.sources.live.scrape import ScrapePlan, scrape
seen = scrape(sys.argv[1:], ScrapePlan(every=0.1, duration=60))
print(seen.scrapes > 2, seen.notes)
"""
    with serving(pages(PAGE)) as server:
        command = [sys.executable, "-c", code, server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while len(server.asked("/metrics")) < 4 and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
    assert (out.strip(), err) == ("True ('interrupted: only the scrapes until then were used',)", "")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["new_event_loop", "_cancel_all_tasks"])
def test_ctrl_c_while_the_event_loop_is_set_up_or_closed_leaves_nothing_in_pieces(moment: str) -> None:
    """The asyncio module handles Ctrl-C itself only in between."""
    code = f"""
import asyncio, signal, sys
from diag.sources.live.scrape import ScrapePlan, scrape
module = asyncio.events if {moment!r} == "new_event_loop" else asyncio.runners
unhurt = getattr(module, {moment!r})
setattr(module, {moment!r}, lambda *args: (signal.raise_signal(signal.SIGINT), unhurt(*args))[1])
try:
    print(scrape(sys.argv[1:], ScrapePlan(every=0.1, duration=0)).notes)
except KeyboardInterrupt:
    print("interrupted before the first scrape")
"""
    with serving(pages(PAGE)) as server:
        result = subprocess.run(
            [sys.executable, "-c", code, server.url], check=False, capture_output=True, text=True, timeout=120
        )
    ends = {"new_event_loop": "interrupted before the first scrape", "_cancel_all_tasks": "('interrupted: only"}
    assert (result.stdout.startswith(ends[moment]), result.stderr) == (True, "")


# The probe


def with_completions(status: int, wait: Callable[[], object] = lambda: None) -> bad.Answer:
    def answer(request: Request) -> Reply:
        if request.path == "/v1/models":
            return Reply(b'{"data": [{"id": "tiny"}]}')
        if request.path == "/v1/completions":
            wait()
            return Reply(b"{}", status)
        return Reply()

    return answer


def test_no_probe_is_sent_without_the_option() -> None:
    with serving(with_completions(200)) as server:
        observed = look(server)
    assert {each.method for each in server.requests} == {"GET"}
    assert values(observed, "diag_probe_success") == []


def test_a_probe_that_succeeds_is_published() -> None:
    with serving(with_completions(200)) as server:
        observed = look(server, probe=5.0)
    assert values(observed, "diag_probe_success")[0][-1] == 1
    assert 0 <= values(observed, "diag_probe_duration_seconds")[0][-1] < 5
    assert [each.method for each in server.asked("/v1/completions")] == ["POST"]


@pytest.mark.parametrize("status", [500, 503])
def test_a_probe_that_fails_is_published(status: int) -> None:
    with serving(with_completions(status)) as server:
        assert values(look(server, probe=5.0), "diag_probe_success")[0][-1] == 0


def test_a_probe_without_an_answer_fails_after_its_time() -> None:
    stop = threading.Event()
    with serving(with_completions(200, wait=lambda: stop.wait(10))) as server:
        observed = look(server, probe=0.4)
        stop.set()
    assert values(observed, "diag_probe_success")[0][-1] == 0
    assert values(observed, "diag_probe_duration_seconds")[0][-1] >= 0.4


def test_refused_probe_is_no_evidence() -> None:
    with serving(with_completions(404)) as server:
        observed = look(server, probe=5.0)
    assert values(observed, "diag_probe_success") == []
    assert observed.notes == (f"{server.instance} rejected the probe (HTTP 404): this says nothing about the engine",)


def test_an_exporters_own_probe_is_kept() -> None:
    own = PAGE + b"diag_probe_success 0\ndiag_probe_duration_seconds 9\n"

    def answer(request: Request) -> Reply:
        return Reply(own) if request.path == "/metrics" else Reply(b"{}")

    with serving(answer) as server:
        observed = look(server, probe=5.0)
    assert values(observed, "diag_probe_success")[0][-1] == 0
    assert observed.notes == ()


# The clock


class Clock:
    def __init__(self, *moments: tuple[float, float]) -> None:
        self.moments = list(moments)

    def wall(self) -> float:
        return self.moments[0][0]

    def steady(self) -> float:
        return self.moments[0][1]


def stamps(*moments: tuple[float, float]) -> tuple[list[int], list[str]]:
    clock = Clock(*moments)
    wall = ScrapeClock(clock.wall, clock.steady)
    times = []
    while clock.moments:
        times.append(wall.now())
        clock.moments.pop(0)
    return times, wall.jumps


def test_a_clock_that_is_set_back_does_not_set_back_the_scrapes() -> None:
    times, jumps = stamps((1000, 50), (1002, 52), (1000.8, 54), (1002.8, 56))
    assert times == [1_000_000, 1_002_000, 1_004_000, 1_006_000]
    assert jumps == [
        "the clock jumped back by 3.2 s at 00:16:44 UTC; the times of the scrapes continue as if it had not"
    ]


def test_clock_set_forward_is_noted() -> None:
    times, jumps = stamps((1000, 50), (4602, 52))
    assert times == [1_000_000, 1_002_000]
    assert jumps[0].startswith("the clock jumped forward by 3600.0 s at ")


def test_slewed_clock_is_not_noted() -> None:
    assert stamps((1000, 50), (1002.1, 52), (1004.2, 54))[1] == []
