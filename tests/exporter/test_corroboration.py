"""A log's claims about a server are believed unless its page and its processes refute them."""

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.imitations import SERVER_0_32 as NEW
from support.imitations import at_of
from support.processes import TP2
from support.processes import serving as serving_processes

from diag.exporter.page import HostCollectors
from diag.exporter.process.collector import ProcessCollector
from diag.log.corroboration import Measurement, measure
from diag.log.server_log import ServerLog
from diag.log.tail import LogTail
from diag.sources.kubernetes.pod_object import Candidate, ContainerStatus
from diag.sources.kubernetes.servers import ContainerLog

BEGAN = at_of(NEW.start.splitlines()[4]) - 5
"""The start of the process whose start-up the log shows."""
NOW = at_of(NEW.api)
ENGINE = NEW.engine.format(level="ERROR", file="core.py:1512")
DEATH = [
    f"{ENGINE}EngineCore encountered a fatal error.",
    f"{ENGINE}Traceback (most recent call last):",
    f'{ENGINE}  File "/opt/vllm/v1/engine/core.py", line 1503, in run_engine_core',
    f"{ENGINE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]
SHUTDOWN = ["INFO:     Shutting down", "INFO:     Application shutdown complete."]
_OTHER = NEW.start.replace("0.32.0", "9.9.9").replace("19:47:", "19:49:5").replace("pid=24326", "pid=4711")
BANNER = re.sub(r"19:49:5(\d)\d", r"19:49:5\1", _OTHER).splitlines()[4:40]
XGRAMMAR = "[19:50:00] /project/cpp/json_schema_converter.cc:1499: Warning: URI should be a plain string, but got #x"
FORGED = {
    "a death": DEATH,
    "an orderly shutdown": SHUTDOWN,
    "a start": BANNER,
    "a death behind another library's warning": [XGRAMMAR, *DEATH],
    "a start behind another library's warning": [XGRAMMAR, *BANNER],
    "a failed start": ["Traceback (most recent call last):", '  File "/usr/bin/vllm", line 8, in <module>', "X: y"],
}
PROCESSES = frozenset({(24326, BEGAN), (24343, BEGAN + 9)})


def measured(after: float, tokens: float = 0.0, began: float | None = BEGAN, **other: object) -> Measurement:
    """A page that came so many seconds after NOW."""
    started: Mapping[str, float] = {} if began is None else {"process_start_time_seconds": began}
    seen = Measurement(NOW + after, page=True, answers=True, started=started, tokens=tokens)
    return seen._replace(**other)  # type: ignore[arg-type]


def silent(after: float, **other: object) -> Measurement:
    return Measurement(NOW + after, page=False, answers=False)._replace(**other)  # type: ignore[arg-type]


def feed(state: ServerLog, lines: list[str], after: float = 0.0, live: bool = True) -> None:
    for number, line in enumerate(lines, 1):
        state.feed(line, NOW + after, live, number)


def serving(*, began: float | None = BEGAN, tokens: float = 100.0, **other: object) -> ServerLog:
    """A server whose log was read from its beginning, and whose page has just come."""
    state = ServerLog(UTC, "server.log")
    first = measured(-1, tokens, began, **other)
    state.page(first)
    feed(state, NEW.start.splitlines(), after=-1, live=False)
    state.page(first)
    return state


def told(state: ServerLog, after: float) -> tuple[dict[str, float], str, str, str]:
    """The events counted, the phase, the release, and the line quoted as the reason."""
    samples = state.samples(NOW + after)
    events = {labels[0]: value for name, labels, value in samples if name == "diag_vllm_log_events_total" and value}
    phases = [labels[0] for name, labels, value in samples if name == "diag_vllm_startup_phase" and value]
    quoted = [labels[4] for name, labels, _ in samples if name == "diag_vllm_log_error_timestamp_seconds"]
    return events, "".join(phases), state.config.version, "".join(quoted)


def claimed(state: ServerLog) -> set[str]:
    return {labels[0] for name, labels, _ in state.samples(NOW) if name == "diag_vllm_log_claim_timestamp_seconds"}


AT_WORK = ({}, "ready", "0.32.0", "")
DIED = ({"engine_dead": 1.0, "cuda_out_of_memory": 1.0}, "ready", "0.32.0", DEATH[-1].removeprefix(ENGINE))


@pytest.mark.parametrize("began", [BEGAN, None], ids=["start time", "counters alone"])
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_line_changes_nothing_while_the_same_process_answers(name: str, began: float | None) -> None:
    state = serving(began=began)
    assert told(state, 0) == AT_WORK
    config = dict(state.config.numbers)
    feed(state, FORGED[name])
    for after in (2, 4, 6, 8):
        state.page(measured(after, 100.0 + after, began))
        assert (told(state, after), state.config.numbers) == (AT_WORK, config)
    state.page(silent(9))  # one page that does not come makes nothing true that was refuted
    assert told(state, 9) == AT_WORK


@pytest.mark.parametrize("name", ["a death", "an orderly shutdown", "a start"])
def test_a_claim_that_is_contradicted_is_told_with_its_line(name: str) -> None:
    state = serving()
    feed(state, FORGED[name])
    assert (
        claimed(state)
        == {
            "a death": {"engine_dead", "cuda_out_of_memory"},
            "an orderly shutdown": {"shut_down"},
            "a start": {"start"},
        }[name]
    )
    lines = [labels for each, labels, _ in state.samples(NOW) if each == "diag_vllm_log_claim_timestamp_seconds"]
    assert all(file == "server.log" and int(number) and text for _, file, number, text, _ in lines)


def states(state: ServerLog) -> set[str]:
    """The states of the claims that do not count: open or refuted."""
    return {labels[4] for name, labels, _ in state.samples(NOW) if name == "diag_vllm_log_claim_timestamp_seconds"}


def test_page_of_an_idle_server_neither_proves_nor_refutes_the_death_of_its_engine() -> None:
    """The API server may outlive its engine (VLLM_KEEP_ALIVE_ON_ENGINE_DEATH): its page proves itself alone."""
    state = serving()
    feed(state, DEATH)
    for after in range(2, 610, 4):
        state.page(measured(after, 100.0))
        assert (told(state, after), states(state)) == (AT_WORK, {"open"})
    state.page(silent(612))  # its host is shut down long after
    assert told(state, 612) == AT_WORK


@pytest.mark.parametrize("name", ["an orderly shutdown", "a start"])
def test_page_of_an_idle_server_refutes_what_a_line_says_of_its_api_server(name: str) -> None:
    state = serving()
    feed(state, FORGED[name])
    for after in (2, 290, 310):
        assert states(state) == {"open"}
        state.page(measured(after, 100.0))
    assert states(state) == {"refuted"}


def test_health_of_200_refutes_a_claimed_death_once_a_process_would_have_ended() -> None:
    state = serving(processes=PROCESSES)
    feed(state, DEATH)
    for after, expected in ((2, "open"), (20, "open"), (31, "refuted")):
        state.page(measured(after, 100.0, health=200, processes=PROCESSES - {(24343, BEGAN + 9)}))
        assert (told(state, after), states(state)) == (AT_WORK, {expected})


def test_health_of_503_proves_a_claimed_death_until_it_is_200_again() -> None:
    state = serving()
    feed(state, DEATH)
    state.page(measured(2, 100.0, health=503))
    assert told(state, 2) == DIED
    state.page(measured(4, 100.0))  # answered too late to be measured
    assert told(state, 4) == DIED
    state.page(measured(6, 100.0, health=200))
    assert told(state, 6) == AT_WORK


@pytest.mark.parametrize("name", ["an orderly shutdown", "a start"])
def test_health_of_503_proves_nothing_about_an_api_server(name: str) -> None:
    state = serving()
    feed(state, FORGED[name])
    state.page(measured(2, 100.0, health=503))
    assert told(state, 2) == AT_WORK


FAILING: dict[str, tuple[dict[str, object], bool]] = {
    "all requests fail": ({"failed": 8.0}, True),
    "few requests fail": ({"failed": 6.0}, False),
    "one request succeeds": ({"failed": 8.0, "succeeded": 51.0}, False),
    "tokens are processed": ({"failed": 8.0, "tokens": 101.0}, False),
    "/health passes": ({"failed": 8.0, "health": 200}, False),
    "no engine process": ({"lacks_engine": True}, True),
    "no engine process here, and /health passes": ({"lacks_engine": True, "health": 200}, False),
}


@pytest.mark.parametrize("name", FAILING)
def test_death_is_believed_where_requests_fail_at_once_or_no_engine_runs(name: str) -> None:
    """A request that fails at once is never in flight."""
    later, died = FAILING[name]
    before: dict[str, object] = {"failed": 2.0, "succeeded": 50.0}
    state = serving(**before)
    feed(state, DEATH)
    state.page(measured(2, 100.0, **before))
    state.page(measured(4, **{"tokens": 100.0, **before, **later}))  # type: ignore[arg-type]
    assert (told(state, 4) == DIED) == died


def test_a_real_death_is_told_once_the_page_is_silent_whatever_was_refuted_before() -> None:
    state = serving()
    feed(state, [*BANNER, *SHUTDOWN], after=-30)
    for after in (-28, -26, -24):
        state.page(measured(after, 200.0 + after))
    feed(state, DEATH)
    state.page(measured(0.5, 180.0))  # the API server answers for a moment
    assert told(state, 0.5) == AT_WORK
    state.page(silent(2.5))
    assert told(state, 2.5) == DIED


def test_an_out_of_memory_death_right_behind_an_exception_of_the_web_server_keeps_its_cause() -> None:
    state = serving()
    feed(state, ["ERROR:    Exception in ASGI application", "Traceback (most recent call last):"])
    feed(state, ['  File "a.py", line 1, in x', "ValueError: x"])
    feed(state, DEATH, after=1)
    state.page(silent(3))
    assert told(state, 3) == DIED


@pytest.mark.parametrize("fell", [False, True], ids=["start time", "counters"])
def test_another_process_is_a_new_start_though_no_page_was_missed(fell: bool) -> None:
    state = serving(began=None if fell else BEGAN)
    feed(state, SHUTDOWN)
    for after in (2, 4):
        state.page(measured(after, 100.0 + after, None if fell else BEGAN))
    assert claimed(state) == {"shut_down"}
    feed(state, [*DEATH, *BANNER], after=5)
    state.page(measured(30, 5.0, None if fell else NOW + 10))
    events, _, version, _ = told(state, 30)
    assert (events, version) == ({"engine_dead": 1.0, "cuda_out_of_memory": 1.0}, "9.9.9")
    assert not claimed(state), "claims about the process before are settled"


def test_a_death_is_believed_where_requests_are_in_flight_and_no_token_is_processed() -> None:
    state = serving()
    feed(state, DEATH)
    for after in (2, 30, 60):
        state.page(measured(after, 100.0, in_flight=3.0))
        assert told(state, after) == AT_WORK
    for after in (63, 400):
        state.page(measured(after, 100.0, in_flight=3.0))
        assert told(state, after) == DIED


def test_a_death_is_believed_where_the_engines_process_is_gone_though_the_page_comes() -> None:
    state = serving(processes=PROCESSES)
    feed(state, DEATH)
    state.page(measured(2, 100.0, processes=PROCESSES - {(24343, BEGAN + 9)}))
    assert told(state, 2) == DIED


def test_a_death_is_not_believed_where_all_processes_outlive_it_though_no_page_comes() -> None:
    state = serving(processes=PROCESSES)
    feed(state, DEATH)
    state.page(silent(2, processes=PROCESSES))
    assert told(state, 2) == DIED  # processes take a while to end
    state.page(silent(31, processes=PROCESSES))
    assert told(state, 31) == AT_WORK


def test_a_banner_in_a_log_whose_beginning_is_lost_starts_nothing_and_configures_nothing() -> None:
    state = ServerLog(UTC, "server.log")
    state.page(measured(-600, 100.0))
    feed(state, BANNER, live=False)
    state.page(measured(0, 200.0))
    events, phase, version, _ = told(state, 0)
    assert (events, phase, version, dict(state.config.numbers)) == ({}, "", "", {})
    assert claimed(state) == {"start"}


@pytest.mark.parametrize("live", [True, False], ids=["followed", "read whole"])
@pytest.mark.parametrize("before", [[], [XGRAMMAR]], ids=["alone", "behind another library's warning"])
def test_a_young_server_whose_log_begins_with_forged_lines_did_not_run_out_of_memory(
    before: list[str], live: bool
) -> None:
    """A log that was truncated within two minutes of the start: a banner alone may be its own, a death is none."""
    state = ServerLog(UTC, "server.log")
    state.page(measured(0, 100.0, NOW - 30))
    feed(state, [*before, *BANNER[:20], *DEATH, *SHUTDOWN], live=live)
    state.page(measured(0, 100.0, NOW - 30))
    assert told(state, 0)[0] == {}
    assert not state.config.numbers or not (before or live)


def test_a_second_banner_right_behind_the_own_start_starts_nothing() -> None:
    state = ServerLog(UTC, "server.log")
    state.page(measured(0, 100.0))
    feed(state, [*NEW.start.splitlines(), *(line.replace("19:49:5", "19:48:0") for line in BANNER)], live=False)
    state.page(measured(0, 100.0))
    assert told(state, 0) == AT_WORK
    assert claimed(state) == {"start"}


def test_a_start_whose_end_is_not_logged_has_ended_when_the_page_comes() -> None:
    """No line says that the server is ready if it was started with --uvicorn-log-level warning."""
    ready = next(at for at, line in enumerate(NEW.start.splitlines()) if "Starting vLLM" in line)
    state = ServerLog(UTC, "server.log")
    feed(state, NEW.start.splitlines()[:ready], live=False)
    for after, phase in ((0.0, "warm_up"), (11.0, "ready")):
        state.page(measured(after))
        assert told(state, after)[1] == phase


def test_a_proxy_that_answers_with_an_error_for_a_dead_server_is_no_sign_of_life() -> None:
    state = serving()
    feed(state, DEATH)
    state.page(silent(2, answers=True))
    assert told(state, 2) == DIED


def test_a_page_measures_its_start_its_tokens_and_the_requests_in_flight() -> None:
    page = (
        b"\nprocess_start_time_seconds 1.7e+09\n"
        b'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
        b'vllm:num_requests_waiting{engine="0"} 4\nvllm:prompt_tokens_total{engine="0"} 10\n'
        b'vllm:generation_tokens_total{engine="0"} 20\nvllm:generation_tokens_total{engine="1"} x\n'
    )
    answers = (
        b'http_requests_total{handler="/v1/completions",method="POST",status="5xx"} 3\n'
        b'http_requests_total{handler="/v1/completions",method="POST",status="200"} 7\n'
        b'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 9\n'
        b"diag_vllm_health_status 503\n"
    )
    started = {"process_start_time_seconds": 1.7e9}
    seen = Measurement(5.0, True, True, started, tokens=30.0, in_flight=9.0)
    assert measure(5.0, page) == seen
    assert measure(5.0, page + answers) == seen._replace(failed=3.0, succeeded=7.0, health=503)
    assert measure(5.0, b"\nx 1\n") == Measurement(5.0, True, True)


def test_the_death_of_an_earlier_process_is_no_claim_about_the_one_that_answers() -> None:
    """An old log is read whole: what it says of the time before the start is past, what it says after it is a claim."""
    state, again = ServerLog(UTC, "server.log"), NOW + 60
    later = [line.replace("19:47", "19:51") for line in NEW.start.splitlines()]
    state.page(measured(600, 100.0, again))
    feed(state, [*NEW.start.splitlines(), *DEATH, *later], live=False)
    feed(state, [line.replace("19:50:00", "19:58:00") for line in DEATH], live=False)
    state.page(measured(600, 100.0, again))
    assert told(state, 600)[:3] == (DIED[0], "ready", "0.32.0")
    assert claimed(state) == {"engine_dead", "cuda_out_of_memory"}


def test_another_server_behind_the_same_address_proves_no_restart() -> None:
    state = serving()
    feed(state, DEATH)
    for after in (2, 4, 6, 8):
        state.page(measured(after, 100.0, BEGAN - 500 * (after % 4 == 0)))
    assert told(state, 8) == AT_WORK


def test_an_answer_that_is_no_page_proves_no_death_of_a_server_that_never_showed_one() -> None:
    state = ServerLog(UTC, "server.log")
    feed(state, NEW.start.splitlines(), after=-60, live=False)
    for after in (-4, -2):
        state.page(silent(after, answers=True))
    feed(state, [XGRAMMAR, *DEATH])
    state.page(silent(2, answers=True))
    assert told(state, 2) == AT_WORK


class KubeletLog:
    """The part of `Api` that a `ContainerLog` asks: the log of a container, each line with the kubelet's time."""

    def __init__(self, lines: list[str], began: float) -> None:
        stamps = (datetime.fromtimestamp(began + 8 + at / 10, UTC).isoformat() for at in range(len(lines)))
        self.text = "".join(f"{stamp} {line}\n" for stamp, line in zip(stamps, lines, strict=True))

    def log(self, *_: object) -> bytes:
        return self.text.encode()


@pytest.mark.parametrize("answers", [True, False])
def test_a_container_without_a_restart_did_not_die_though_its_log_claims_so(answers: bool) -> None:
    lines = [*NEW.start.splitlines(), *DEATH, *BANNER]
    api, status = KubeletLog(lines, BEGAN), ContainerStatus(running_since=BEGAN)
    log = ContainerLog(api, "inference", Candidate("pod", "vllm", (8000,), "", True, ""), status, clock=lambda: NOW)  # type: ignore[arg-type]
    log.begin()
    for after in (0.0, 2.0, 4.0):
        log.scraped(measured(after, 100.0 + after) if answers else silent(after))
    samples = {(name, *labels): value for name, labels, value in log.collect().samples}
    assert samples["diag_vllm_log_events_total", "engine_dead"] == (not answers)
    assert log.state.config.version == ("0.32.0" if answers else "9.9.9")


def test_processes_that_outlive_their_death_in_the_log_are_not_dead(tmp_path: Path) -> None:
    """Real processes; the page comes only before the death in the log, as that of an overloaded server."""
    log = tmp_path / "server.log"
    log.write_text("\n".join([*NEW.start.splitlines(), ""]), encoding="utf-8")
    with serving_processes(tmp_path, TP2) as played:
        processes, tail = ProcessCollector(played.port), LogTail(str(log), UTC)
        end = time.monotonic() + 180
        while len(processes.identities()) < 4 and time.monotonic() < end:
            processes.collect()
        host = HostCollectors(None, tail, processes)
        tail.catch_up()
        now = time.time()
        host.scraped(Measurement(now, page=True, answers=True))
        with log.open("a", encoding="utf-8") as written:
            written.write("\n".join([*DEATH, ""]))
        while not claimed(tail.state) and time.monotonic() < end:
            time.sleep(0.05)
        for after, died in ((2.0, True), (40.0, False)):
            processes.collect()
            host.scraped(Measurement(now + after, page=False, answers=False))
            assert ("engine_dead" in told(tail.state, 0)[0]) == died
        tail.stop()


STOPS = NEW.engine.format(level="INFO", file="core.py:1655")
DRAINS = [
    f"{NEW.api[: NEW.api.index(chr(91))]}[launcher.py:254] [shutdown] API server: shutdown triggered",
    f"{STOPS}[shutdown] EngineCore: draining in-flight requests count=3 timeout=60s",
]


def test_a_server_that_drains_goes_on_for_its_time_out_and_ends_in_order() -> None:
    """Its page counts the tokens of its last requests: that refutes no shutdown."""
    state = serving(in_flight=3.0)
    feed(state, DRAINS)
    for after in (2, 4, 6, 8):
        state.page(measured(after, 100.0 + after, in_flight=3.0 - after // 4))
        assert claimed(state) == set()
    for after in (10, 12, 14):
        state.page(silent(after))
    events, phase, _, _ = told(state, 14)
    assert (events.get("shut_down"), phase) == (1.0, "")


def test_a_claimed_drain_is_refuted_by_a_server_that_accepts_requests() -> None:
    state = serving(in_flight=3.0)
    feed(state, DRAINS)
    for after, in_flight in ((2, 3.0), (4, 1.0), (6, 2.0), (8, 2.0), (10, 2.0)):
        state.page(measured(after, 100.0 + after, in_flight=in_flight))
    state.page(silent(12))
    assert "shut_down" not in told(state, 12)[0]
