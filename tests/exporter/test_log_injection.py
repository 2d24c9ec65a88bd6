"""Client input in a server's log, in every known way, is no event, no configuration and no start."""

import json
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.forged_access import access_lines, behind_line_feeds
from support.imitations import SERVER_0_32 as NEW
from support.imitations import Heads, at_of, imitations
from support.paths import LOGS
from support.sampling import some

from diag.log.corroboration import Measurement
from diag.log.parse_line import read_timed_lines, split_redrawn
from diag.log.patterns import Pattern, patterns, recognise
from diag.log.server_log import ServerLog
from diag.log.tail import LogTail

NOW = datetime(2026, 11, 21, 20, tzinfo=UTC).timestamp()
TIME = "2026-11-21T19:50:00.000000000Z"
NOT_BELIEVED = (
    *("diag_vllm_log_hearsay_timestamp_seconds", "diag_vllm_log_last_line_timestamp_seconds"),
    # uvicorn's lines have no head: who imitates an answer can as well send the request
    *("diag_vllm_log_answers_total", "diag_vllm_log_refused_in_a_row"),
)


OLD = Heads(
    "INFO 11-21 19:40:00 [api_server.py:1043] vLLM API server version 0.8.5\n"
    "INFO 11-21 19:40:00 [api_server.py:1044] args: Namespace(max_num_seqs=16, served_model_name=['tiny'])\n"
    "INFO 11-21 19:40:10 [gpu_model_runner.py:1329] Starting to load model /models/tiny...\n"
    "INFO:     Application startup complete.\n",
    "INFO 11-21 19:50:00 [logger.py:39] ",
    "{level} 11-21 19:50:00 [{file}] ",
)


def line_feed(server: Heads, sent: str) -> list[str]:
    """Return a line feed as vLLM's formatter writes it: with the record's head repeated."""
    return [f"{server.api}Received request x\r", f"{server.api}{sent}"]


def line_feed_to_the_engine(server: Heads, sent: str) -> list[str]:
    head = server.engine.format(level="ERROR", file="core.py:2057")
    return [f"{head}Unexpected error pre-processing request x\r", f"{head}{sent}\r"]


def carriage_return(server: Heads, sent: str) -> list[str]:
    return [f"{server.api}Received request x\r{sent}"]


def other_separators(server: Heads, sent: str) -> list[str]:
    return [f"{server.api}Received request x{each}{sent}" for each in "\x85\u2028\u2029\v\f\x1c\x1e"]


def behind_a_bar(server: Heads, sent: str) -> list[str]:
    bar = "Capturing CUDA graphs: 3%|▏  | 3/67 [01:00<00:44,  1.48it/s]"
    return [f"{server.api}Received request {bar}{sent}", f"{bar}{sent}", f"{bar}\r{sent}"]


def exception_text(server: Heads, sent: str) -> list[str]:
    trace = ["ERROR:    Exception in ASGI application", "Traceback (most recent call last):", '  File "a.py", line 1']
    return [*trace, "ValueError: x", sent, "Process EngineCore:", "Traceback (most recent call last):", sent]


def exception_nobody_took(server: Heads, sent: str) -> list[str]:
    return ["Task exception was never retrieved", "future: <Task finished>", "ValueError: x", sent]


def other_frames(server: Heads, sent: str) -> list[str]:
    docker = json.dumps({"log": sent + "\n", "stream": "stderr", "time": TIME})
    return [f"{TIME} stderr F {sent}", f"Nov 21 19:50:00 host vllm[1]: {sent}", f"vllm-1  | {sent}", docker]


def json_records(server: Heads, sent: str) -> list[str]:
    known = {"asctime": "2026-11-21 19:50:00,000", "levelname": "ERROR", "process": 24326, "processName": "APIServer"}
    own = {**known, "name": "vllm.entrypoints.serve.utils.request_logger", "message": f"Received request x\n{sent}"}
    web = {**known, "name": "uvicorn.error", "message": f"Exception in ASGI application\n{sent}", "exc_info": sent}
    foreign = [{"message": sent}, {"message": f"x\n{sent}"}, {**known, "name": "app", "message": sent}]
    return [json.dumps(each) for each in (own, web, *foreign)]


def client_address(server: Heads, sent: str) -> list[str]:
    """Uvicorn prints the header X-Forwarded-For as it came, in front of the request."""
    request = ':0 - "GET /health HTTP/1.1" 200 OK'
    colour = f'\x1b[32mINFO\x1b[0m:     {sent}:0 - "\x1b[1mGET /health HTTP/1.1\x1b[0m" \x1b[32m200 OK\x1b[0m'
    plain = f"INFO:     {sent}{request}"
    bar = f"INFO:     Capturing CUDA graphs: 3%|x| 3/67 [01:00<00:44, 1.48it/s]{sent}{request}"
    return [plain, colour, bar, f"INFO:     {sent}{'x' * 70_000}", f"(APIServer pid=24326) {plain}", in_cri(colour)]


WAYS = (
    client_address,
    line_feed,
    line_feed_to_the_engine,
    carriage_return,
    other_separators,
    behind_a_bar,
    exception_text,
    exception_nobody_took,
    other_frames,
    json_records,
)


def feed(state: ServerLog, *lines: str) -> None:
    for line in lines:
        for part in split_redrawn(line):
            state.feed(part, NOW, live=False)


def known(state: ServerLog) -> tuple[object, ...]:
    samples = [sample for sample in state.samples(NOW) if sample[0] not in NOT_BELIEVED]
    return samples, dict(state.config.numbers), state.config.version, state.config.model


def without_places(state: ServerLog) -> tuple[object, ...]:
    """Return what is known, without the files and the numbers of quoted lines."""
    samples, *others = known(state)
    told = [(name, [one for one in labels if not one.isdigit() and "/" not in one], at) for name, labels, at in samples]  # type: ignore[attr-defined]
    return told, *others


def serving(server: Heads, frame: Callable[[str], str] = str) -> ServerLog:
    state = ServerLog(UTC, "server.log")
    feed(state, *(frame(line) for line in server.start.split("\n") if line.strip()))
    feed(state, frame(f"{server.api}Received request cmpl-1"))
    return state


def unchanged(begun: ServerLog, written: Callable[[str], list[str]], server: Heads) -> None:
    """Each line that imitates one is written into a log of its own."""
    saved = pickle.dumps(begun)
    feed(begun, *written("as others do"))
    before = known(begun)
    for sent in imitations(server):
        if "pre-processing request" in sent and "pre-processing" in written("x")[0]:
            continue  # that is what happened, as often as it is said
        state = pickle.loads(saved)  # a copy in C
        feed(state, *written(sent))
        assert known(state) == before, sent


@pytest.mark.parametrize("server", [NEW, OLD], ids=["0.32", "0.8.5"])
@pytest.mark.parametrize("way", some(WAYS, 3), ids=lambda way: way.__name__)
def test_client_input_in_the_log_changes_no_result(way: Callable[[Heads, str], list[str]], server: Heads) -> None:
    unchanged(serving(server), lambda sent: way(server, sent), server)


def test_client_input_in_a_real_log_changes_no_result() -> None:
    """Request ids, prompts and names of models with every text that the doctor knows, and refused grammars."""
    state, ready = ServerLog(UTC, "server.log"), None
    for entry in read_timed_lines(LOGS / "v1_0.32.0_clients_imitate.log", UTC, NOW + 7 * 86_400):
        state.feed(entry.text, entry.at, live=False)
        ready = known(state) if entry.text == "INFO:     Application startup complete." else ready
    assert state.config.version == "0.32.0"
    assert known(state) == ready


def in_cri(line: str) -> str:
    return f"{TIME} stderr F {line}"


def in_docker(line: str) -> str:
    return json.dumps({"log": line + "\n", "stream": "stderr", "time": TIME})


def in_journal(line: str) -> str:
    return f"Nov 21 19:50:00 host vllm[123]: {line}"


def cri_parts(server: Heads, sent: str) -> list[str]:
    """Another stream's line between two parts of one."""
    begun = f"{TIME} stderr P {server.api}Received request x"
    return [begun, f"{TIME} stdout F what a library prints", in_cri(sent)]


def docker_parts(server: Heads, sent: str) -> list[str]:
    begun = json.dumps({"log": f"{server.api}Received request x", "stream": "stderr", "time": TIME})
    other = json.dumps({"log": "INFO:     127.0.0.1:1\n", "stream": "stdout", "time": TIME})
    return [begun, other, in_docker(sent), in_docker(f"{server.api}x\n{sent}"), in_docker(f"{server.api}x\r{sent}")]


def journal_parts(server: Heads, sent: str) -> list[str]:
    return [in_journal(f"{server.api}Received request ".ljust(48 * 2**10, "x")), in_journal(sent)]


@pytest.mark.parametrize(
    ("frame", "way"),
    [(in_cri, cri_parts), (in_docker, docker_parts), (in_journal, journal_parts)],
    ids=["CRI", "Docker", "journald"],
)
def test_a_line_that_was_split_is_no_line_of_its_own(
    frame: Callable[[str], str], way: Callable[[Heads, str], list[str]]
) -> None:
    unchanged(serving(NEW, frame), lambda sent: way(NEW, sent), NEW)


@pytest.mark.parametrize(
    ("message", "expected"),
    [("x" * (48 * 2**10 - 1), {"engine_dead": 1}), ("x" * 48 * 2**10, {}), ("é" * 24 * 2**10, {})],
    ids=["a byte less", "48 KiB", "48 KiB in fewer characters"],
)
def test_line_behind_a_long_one_in_the_journal_is_its_rest_only_from_48_kibibytes(
    message: str, expected: dict[str, float]
) -> None:
    state = serving(NEW, in_journal)
    feed(state, in_journal(message), in_journal(FATAL + DIED))
    assert events(state) == expected


@pytest.mark.parametrize("dies", [False, True], ids=["alive", "dead"])
@pytest.mark.parametrize("forged", [access_lines, behind_line_feeds])
def test_forged_access_lines_in_a_followed_log_hide_and_make_nothing(
    forged: Callable[[str, float], list[str]], dies: bool, tmp_path: Path
) -> None:
    """Follow a log with and without them, a death among them or not; the server's page ends with that."""

    def followed(name: str, *forged: str) -> ServerLog:
        now, file = [NOW], tmp_path / name
        file.write_text(NEW.start, encoding="utf-8")
        tail = LogTail(str(file), UTC, lambda: now[0])
        tail.step()
        died = [f"{FATAL}{DIED}", f"{FATAL}Traceback (most recent call last):", f"{FATAL}RuntimeError: CUDA error: x"]
        for at, lines in enumerate(([], forged, died if dies else [], forged, [], forged, [])):
            now[0] = NOW + 100 * at
            with file.open("a", encoding="utf-8") as log:
                log.writelines(f"{line}\n" for line in lines)
            tail.step()
            alive = not dies or at < 2
            tail.page(Measurement(now[0], page=alive, answers=alive, started={"page": NOW - 900}, tokens=7.0 + at))
        return tail.state

    ours, theirs = followed("a.log", *forged(NEW.start, NOW)), followed("a.log")
    assert without_places(ours) == without_places(theirs)
    assert (ours.state, events(ours)) == (("dead", {"engine_dead": 1, "cuda_error": 1}) if dies else ("serving", {}))
    assert ours.withdrawn is None


# -- what is true stays true ------------------------------------------------------------------------------------------

DIED = "EngineCore encountered a fatal error."
FATAL = NEW.engine.format(level="ERROR", file="core.py:1512").replace("19:50:00", "19:50:09")


def events(state: ServerLog) -> dict[str, float]:
    return {
        labels[0]: value for name, labels, value in state.samples(NOW) if name == "diag_vllm_log_events_total" and value
    }


def test_the_death_of_an_engine_is_believed_whatever_was_written_before() -> None:
    for way in WAYS:
        state = serving(NEW)
        feed(state, *way(NEW, DIED), f"{NEW.api.replace('19:50:00', '19:50:08')}Received request cmpl-2")
        feed(state, FATAL + DIED, f"{FATAL}Traceback (most recent call last):", f'{FATAL}  File "a.py", line 1')
        feed(state, f"{FATAL}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        assert events(state).items() >= {"engine_dead": 1, "cuda_out_of_memory": 1}.items(), way


def test_live_line_counts_two_seconds_after_an_exception_of_the_web_server() -> None:
    for later, expected in ((1.9, {}), (2.0, {"engine_dead": 1})):
        state = serving(NEW)
        state.feed("ERROR:    Exception in ASGI application", NOW, live=True)
        state.feed(FATAL + DIED, NOW + later, live=True)
        assert events(state) == expected


def is_of_a_shutdown(pattern: Pattern) -> bool:
    """True for a line that counts only after the server was told to stop (test_planned.py)."""
    return pattern.name in ("requests_cut_at_shutdown", "drain_ended") and not pattern.numbers


@pytest.mark.parametrize(
    "pattern", [each for each in patterns() if each.logger and each.kind == "event" and not is_of_a_shutdown(each)]
)
def test_event_counts_only_from_the_source_files_that_log_it(pattern: object) -> None:
    texts = [case.split("\t") for case in (LOGS / "texts.tsv").read_text(encoding="utf-8").splitlines()]
    level, text = next((level, text) for _, level, _, text in texts if recognise(text, level) is pattern)
    for file in pattern.logger.split():  # type: ignore[attr-defined]
        believed, not_believed = serving(NEW), serving(NEW)
        feed(believed, NEW.engine.format(level=level or "ERROR", file=f"{file}:7") + text)
        feed(not_believed, NEW.engine.format(level=level or "ERROR", file="serving.py:7") + text)
        assert (events(believed), events(not_believed)) == ({pattern.name: 1}, {})  # type: ignore[attr-defined]


def test_exception_counts_in_its_own_record() -> None:
    missed = "AssertionError: Expected a cached item for mm_hash='ad7273d2c432b59015c01c998985ee2f'"
    head = NEW.engine.format(level="ERROR", file="core.py:2057")
    state = serving(NEW)
    feed(state, f"{head}Unexpected error pre-processing request cmpl-1", f"{head}Traceback (most recent call last):")
    feed(state, f'{head}  File "a.py", line 1', head + missed)
    assert events(state) == {"request_preprocessing_failed": 1, "multimodal_cache_miss": 1}


def test_engine_line_without_a_head_is_recognised_by_its_process() -> None:
    died = "Exception in thread Thread-4 (process_input_sockets):"
    for process, expected in (("EngineCore pid=24343", {"input_thread_died": 1}), ("EngineCore pid=4711", {})):
        state = serving(NEW)
        feed(state, f"({process}) {died}", f"({process}) AssertionError: x")
        assert events(state) == expected


def test_imitated_time_is_not_the_time_of_a_line() -> None:
    state = serving(NEW)
    state.feed(f"{NEW.api}Received request x", NOW, live=True)
    state.feed("\rINFO 11-22 19:00:00 [core.py:1] x", NOW, live=True)
    assert state.current.clock.ahead == at_of(NEW.api) - NOW


def test_a_process_that_the_start_did_not_show_is_hearsay() -> None:
    state = serving(NEW)
    feed(state, (FATAL + DIED).replace("24343", "4711"))
    assert events(state) == {}
    assert [labels for name, labels, _ in state.samples(NOW) if name == NOT_BELIEVED[0]] == [("engine_dead",)]


def test_claimed_lines_whose_numbers_add_up_are_no_measured_zero() -> None:
    step = "(Worker_EP9 pid=4711) INFO 11-21 19:51:00 [eplb_state.py:9] EPLB step: 1 for model m: avg_tokens=8"
    state = serving(NEW)
    counted = ("diag_vllm_log_events_total", ("eplb_balance",), 0)
    assert counted in state.samples(NOW)
    feed(state, step + ", max_tokens=9, balancedness=0.5000, steps until the next: 2")
    assert counted not in state.samples(NOW)


def test_the_records_of_vllms_json_format_are_believed() -> None:
    record = {"asctime": "2026-11-21 19:50:09,000", "levelname": "ERROR", "processName": "EngineCore", "process": 24343}
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1\ntorch.OutOfMemoryError: CUDA out of memory.'
    state = serving(NEW)
    feed(state, json.dumps({**record, "name": "vllm.v1.engine.core", "message": DIED, "exc_info": trace}))
    assert events(state) == {"engine_dead": 1, "cuda_out_of_memory": 1}


def test_restart_is_believed_once_another_source_file_continues_it() -> None:
    state = serving(NEW)
    again = NEW.start.replace("0.32.0", "0.33.0").replace("19:4", "19:5")
    banner, _, rest = again.partition("[model.py:733]")
    feed(state, *banner.split("\n")[:-1])
    assert state.config.version == "0.32.0"
    feed(state, f"(APIServer pid=24326) INFO 11-21 19:57:13 [model.py:733]{rest}".split("\n")[0])
    assert state.config.version == "0.33.0"
