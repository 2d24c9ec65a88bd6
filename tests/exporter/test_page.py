"""The exporter's page: vLLM's own as it is, what stands beside it, and what is said when a part fails."""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support import bad_servers
from support.bad_servers import PAGE, Reply, on_metrics, pages, serving, talking
from support.paths import MODELS

from diag.commands.exporter import Exporter, ExporterOptions
from diag.core.metric_families import Collected, families
from diag.exporter.page import CollectionResult, HostCollectors, HostPage
from diag.exporter.vllm_page import Scraped
from diag.exposition import render
from diag.exposition.scrapes import Target
from diag.vllm.running_config import ServerFacts

OTHER = PAGE.replace(b"1.79522728772e+09", b"1.70000000000e+09")


def exporter(url: str, **settings: object) -> Exporter:
    return Exporter(ExporterOptions(url, **{"timeout": 4.0, **settings}))


def values(page: bytes) -> dict[str, float]:
    """The value of every line, by what stands before it."""
    lines = (line for line in page.decode().splitlines() if line and not line.startswith("#"))
    return {head: float(value) for head, _, value in (line.rpartition(" ") for line in lines)}


def warnings(caplog: pytest.LogCaptureFixture, part: str = "vllm") -> list[str]:
    return [each.getMessage() for each in caplog.records if each.getMessage().startswith(f"{part}:")]


def test_vllms_page_comes_first_byte_for_byte() -> None:
    odd = PAGE + b'odd{label="\xff\\n\\"\\\\"}   7\n# EOF\n'
    with serving(pages(odd)) as server:
        page = exporter(server.url).page(4)
    assert page.startswith(odd)
    assert values(page[len(odd) :])["diag_vllm_up"] == 1


@pytest.mark.parametrize("prefix", [b"kserve_vllm:", b"ray_vllm_"])
def test_renamed_metrics_are_passed_on_unchanged_and_reported(prefix: bytes) -> None:
    configured = b'vllm:cache_config_info{enable_prefix_caching="True",engine="0"} 1\n'
    other = (PAGE + configured).replace(b"vllm:", prefix)
    with serving(pages(other)) as server:
        page = exporter(server.url).page(4)
    found = values(page)
    assert page.startswith(other)
    assert found["diag_vllm_up"] == found['diag_scrape_success{collector="vllm"}'] == 1
    assert found[f'diag_vllm_metrics_renamed{{prefix="{prefix.decode()}"}}'] == 1
    assert 'diag_vllm_config{flag="enable_prefix_caching"}' in found


def test_a_server_that_does_not_answer_costs_only_its_own_part() -> None:
    page = exporter(f"http://127.0.0.1:{bad_servers.closed_port()}").page(4)
    found = values(page)
    assert (found["diag_vllm_up"], found['diag_scrape_success{collector="vllm"}']) == (0, 0)
    assert 'diag_scrape_duration_seconds{collector="process"}' in found
    assert b"vllm:" not in page


def test_time_of_the_last_page_stays_without_a_new_page() -> None:
    with serving(on_metrics(Reply(), Reply(), Reply(b"", 500))) as server:
        one = exporter(server.url)
        pages_of_it = [values(one.page(4)) for _ in range(3)]
    last_up = [page["diag_vllm_last_up_timestamp_seconds"] for page in pages_of_it]
    assert [page["diag_vllm_up"] for page in pages_of_it] == [1, 1, 0]
    assert time.time() - 60 < last_up[0] < last_up[1] == last_up[2]
    never = values(exporter(f"http://127.0.0.1:{bad_servers.closed_port()}").page(4))
    assert "diag_vllm_last_up_timestamp_seconds" not in never


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (pages(b"<html>login</html>"), "answered an HTML page, not metrics"),
        (on_metrics(Reply(b"", 404)), "is this the address|has no page"),
        (on_metrics(Reply(b"", 503)), "answered HTTP 503"),
        (pages(b""), "answered an empty page"),
        (pages(PAGE[:-5]), "ends in the middle of a line"),
        (
            pages(b"\n" + render([("diag_build_info", ("1",), 1)])),
            "the page of a diag exporter: use the address of vLLM",
        ),
    ],
)
def test_page_without_vllm_metrics_is_not_passed_on(
    answer: bad_servers.Answer, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(answer) as server:
        page = exporter(server.url).page(4)
    assert values(page)["diag_vllm_up"] == 0
    assert page.count(b"\ndiag_build_info{") == 1
    assert len(warnings(caplog)) == 1
    assert re.search(reason, warnings(caplog)[0])


@pytest.mark.parametrize("talk", [bad_servers.flood, bad_servers.break_off, bad_servers.babble, bad_servers.hang])
def test_a_server_that_misbehaves_is_given_up(talk: Callable[..., None]) -> None:
    with talking(talk) as server:
        begun = time.monotonic()
        page = exporter(server.url, timeout=600.0).page(3)
    assert values(page)["diag_vllm_up"] == 0
    assert time.monotonic() - begun < 120


@pytest.mark.parametrize(
    "second",
    [
        Reply(b"<html>login</html>"),
        Reply(b"", 503),
        Reply(PAGE[:-5]),
        Reply(PAGE, 200, {"Content-Encoding": "br"}),
        Reply(PAGE, 200, {"Content-Length": "9000"}),
        Reply(PAGE + b"#\n" * 2**23),  # 16 MiB
    ],
)
def test_a_server_that_answered_well_is_watched_all_the_same(second: Reply) -> None:
    with serving(on_metrics(Reply(PAGE), second, second, Reply(PAGE))) as server:
        one = exporter(server.url)
        ups = [values(one.page(4))["diag_vllm_up"] for _ in range(4)]
    assert (ups[:2], ups[-1]) == ([1, 0], 1)  # an odd answer may be asked for twice


def test_one_connection_is_kept_for_all_scrapes() -> None:
    kept = []

    def talk(connection: socket.socket, over: threading.Event) -> None:
        kept.append(connection)
        while request := connection.recv(65536):
            body = PAGE if request.startswith(b"GET /metrics ") else b""
            status = b"200 OK" if body else b"404 Not Found"
            connection.sendall(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    with talking(talk) as server:
        one = exporter(server.url)
        one.page(4)
        one.page(4)
        before = len(kept)
        assert [values(one.page(4))["diag_vllm_up"] for _ in range(5)] == [1] * 5
    assert len(kept) == before


def test_a_server_that_closes_every_connection_is_scraped_all_the_same() -> None:
    closing = {"Content-Type": "text/plain", "Connection": "close"}
    with serving(on_metrics(Reply(PAGE, 200, closing))) as server:
        one = exporter(server.url)
        assert [values(one.page(4))["diag_vllm_up"] for _ in range(5)] == [1] * 5


def test_a_page_without_vllms_metrics_is_passed_on_and_is_not_up(caplog: pytest.LogCaptureFixture) -> None:
    with serving(pages(b"process_start_time_seconds 1\n")) as server:
        found = values(exporter(server.url).page(4))
    assert (found["process_start_time_seconds"], found["diag_vllm_up"]) == (1, 0)
    assert "without --disable-log-stats" in warnings(caplog)[0]


def test_invalid_line_is_left_out_of_the_page_and_noted(caplog: pytest.LogCaptureFixture) -> None:
    odd = b'vllm:cache_config_info{block_size="16,engine="0" 1.0\n'
    good = b'vllm:cache_config_info{block_size="16",engine="1"} 1.0\n'
    with serving(pages(PAGE + odd + good)) as server:
        page = exporter(server.url).page(4)
    assert page.startswith(PAGE + good)
    assert odd not in page
    assert values(page)['diag_vllm_config{flag="block_size"}'] == 16
    assert any("left out a line that is no metric: vllm:cache_config_info" in line for line in warnings(caplog))


def test_two_servers_behind_one_port_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    with serving(pages(PAGE, OTHER, PAGE, OTHER)) as server:
        one = exporter(server.url)
        success = [values(one.page(4))['diag_scrape_success{collector="vllm"}'] for _ in range(4)]
    assert success == [1, 1, 0, 0]
    assert values(one.page(4))["diag_vllm_up"] == 0  # it is gone by now
    assert "more than one server answers on this port" in warnings(caplog)[0]


def test_a_restart_is_no_second_server() -> None:
    with serving(pages(OTHER, PAGE, PAGE)) as server:
        one = exporter(server.url)
        assert [values(one.page(4))['diag_scrape_success{collector="vllm"}'] for _ in range(3)] == [1, 1, 1]


def test_a_problem_is_logged_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    with serving(on_metrics(Reply(b"", 503), Reply(b"", 503), Reply(PAGE), Reply(PAGE))) as server:
        one = exporter(server.url)
        for _ in range(4):
            one.page(4)
    assert [each.rpartition(": ")[2] for each in warnings(caplog)] == ["answered HTTP 503", "works again"]


def test_configuration_comes_from_command_and_page_and_the_version_from_its_endpoint() -> None:
    info = b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="8",sliding_window="None"} 1.0\n'

    def answer(request: bad_servers.Request) -> Reply | None:
        if request.path == "/version":
            return Reply(b'{"version": "0.32.0"}')
        return pages(PAGE + info)(request)

    with serving(answer) as server:
        one = exporter(server.url, launch="vllm serve m --max-num-seqs 64 --api-key sk-secret-secret")
        found = values(one.page(4))
        assert [len(server.asked("/version")) for _ in range(3) if one.page(4)] == [1, 1, 1]
    assert found['diag_vllm_config{flag="max_num_seqs"}'] == 64
    assert found['diag_vllm_config{flag="kv_cache_size_tokens"}'] == 128
    assert found['diag_vllm_info{device="",model="",version="0.32.0"}'] == 1
    assert b"secret" not in one.page(4)


def test_the_work_of_a_known_model_is_shown_once_its_server_is_up() -> None:
    launch = f"vllm serve {MODELS / 'llama-3.1-8b'}"
    with serving(pages(PAGE)) as server:
        found = values(exporter(server.url, launch=launch).page(4))
    assert found["diag_vllm_kv_cache_bytes_per_token"] == 131_072
    assert not {name for name in values(exporter(server.url, launch=launch).page(4)) if "per_token" in name}


class Odd:
    """A collector that does as it is told."""

    def __init__(self, name: str, collect: Callable[[], Collected]) -> None:
        self.name = name
        self.collect = collect


class Bare(HostCollectors):
    """A host of which nothing is known but these parts."""

    def __init__(self, *parts: Odd) -> None:
        super().__init__(None, None, None)
        object.__setattr__(self, "parts", parts)

    @property
    def collectors(self) -> tuple[Odd, ...]:  # type: ignore[override]
        return self.parts  # type: ignore[attr-defined,no-any-return]

    def completed(self, facts: ServerFacts) -> ServerFacts:
        return facts


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_part_that_hangs_or_raises_costs_only_itself(hanging: threading.Event) -> None:
    def broken() -> Collected:
        raise OSError("no such device")

    parts = (
        Odd("nvml", lambda: Collected([], str(hanging.wait(60)))),
        Odd("log", broken),
        Odd("process", lambda: Collected([("diag_vllm_process_stopped", ("1", "worker", "0"), 1.0)])),
    )
    beside = HostPage(Bare(*parts), render)
    nothing = CollectionResult[Scraped](None, "refused", 0.0, False)
    found = values(b"".join(beside.parts(nothing, beside.collect(), 0.3)))
    success = {name: found[f'diag_scrape_success{{collector="{name}"}}'] for name in ("nvml", "log", "process")}
    assert success == {"nvml": 0, "log": 0, "process": 1}
    assert found['diag_vllm_process_stopped{pid="1",rank="0",role="worker"}'] == 1


def test_a_part_that_ends_soon_is_not_disturbed_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diag.exporter.page.TURN", 30.0)
    events: list[str] = []

    def first() -> Collected:
        time.sleep(0.05)
        events.append("first ended")
        return Collected([])

    def second() -> Collected:
        events.append("second begun")
        return Collected([])

    for collection in HostPage(Bare(Odd("nvml", first), Odd("process", second)), render).collect():
        collection.result(30)
    assert events == ["first ended", "second begun"]


def test_a_configuration_that_changed_is_shown() -> None:
    beside = HostPage(Bare(), render)

    def shown(blocks: float) -> float:
        scraped = Scraped(b"", True, "", {"num_gpu_blocks": blocks}, ServerFacts())
        return values(b"".join(beside.parts(CollectionResult(scraped, "", 0.0, True), [], 1.0)))[
            'diag_vllm_config{flag="num_gpu_blocks"}'
        ]

    assert [shown(128.0), shown(128.0), shown(256.0)] == [128.0, 128.0, 256.0]


def test_a_problem_leaves_the_samples_that_there_are() -> None:
    beside = HostPage(Bare(Odd("nvml", lambda: Collected([("diag_gpu_up", ("0", "u"), 0.0)], "GPU 0 is lost"))), render)
    found = values(b"".join(beside.parts(CollectionResult[Scraped](None, "", 0.0, False), beside.collect(), 30)))
    assert found['diag_gpu_up{gpu="0",uuid="u"}'] == 0
    assert found['diag_scrape_success{collector="nvml"}'] == 0


def test_every_family_can_be_read_back() -> None:
    samples = [(name, tuple("x" for _ in family.labels), 1.0) for name, family in families().items()]
    target = Target("h:1")
    assert target.add(0, render(samples)) == ""
    assert {each["__name__"] for each in target.table().labels} == set(families())


def test_a_probe_is_sent_and_shown() -> None:
    def answer(request: bad_servers.Request) -> Reply | None:
        if request.path == "/v1/models":
            return Reply(b'{"data": [{"id": "tiny"}]}')
        return Reply(b"data: {}\n\n") if request.method == "POST" else pages(PAGE)(request)

    with serving(answer) as server:
        one = exporter(server.url, probe=0.2)
        one.page(4)
        one.start()
        end = time.monotonic() + 60
        while (found := values(one.page(4))).get("diag_probe_success") != 1 and time.monotonic() < end:
            time.sleep(0.05)
    assert found["diag_probe_success"] == 1
    assert 0 <= found["diag_probe_first_token_seconds"] <= found["diag_probe_duration_seconds"]


def test_no_probe_is_sent_without_the_option() -> None:
    with serving(pages(PAGE)) as server:
        one = exporter(server.url)
        one.start()
        assert b"diag_probe" not in one.page(4)
        assert not [each for each in server.requests if each.method == "POST"]


def test_successful_scrape_writes_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "diag.exporter")
    with serving(pages(PAGE)) as server:
        one = exporter(server.url)
        one.page(4)
        before = len(caplog.records)
        one.page(4)
    assert [each for each in caplog.records[before:] if each.name == "diag.exporter"] == []
