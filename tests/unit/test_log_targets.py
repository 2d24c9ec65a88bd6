"""Logs as the only evidence: what is told of them, in every layout in which people paste them."""

import csv
import gzip
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.forged_access import access_lines, behind_line_feeds
from support.paths import LOGS, RECORDINGS
from support.reports import judged_logs as judged

from diag.core.errors import BadRecording, BadUsage
from diag.diagnosis.report import Report
from diag.log.parse_line import Line
from diag.log.paste import as_logged, by_source
from diag.report.terminal import render

OUT_OF_MEMORY = (LOGS / "v1_0.8.5_no_kv_memory.log").read_text(encoding="utf-8").splitlines()
SERVING = (LOGS / "v1_0.32.0_cpu_small.log").read_text(encoding="utf-8").splitlines()
CAUSE = "ValueError: No available memory for the cache blocks."
BEGAN = datetime(2026, 4, 25, 9, tzinfo=UTC)


def told(report: Report) -> str:
    """The short report as one line: a test of what it says is none of how it is wrapped."""
    return " ".join(render(report).split())


def first(report: Report) -> str:
    return report.present[0].diagnosis.incident.id if report.present else ""


def write(folder: Path, lines: list[str], name: str = "server.log") -> Path:
    file = folder / name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


# -- layouts of a paste -----------------------------------------------------------------------------------------------


def stamped(form: str) -> Callable[[list[str]], list[str]]:
    """Return a layout that writes a head with a time before each line."""

    def lay_out(lines: list[str]) -> list[str]:
        times = (BEGAN + timedelta(seconds=second) for second in range(len(lines)))
        return [f"{at:{form}}{line}" for at, line in zip(times, lines, strict=True)]

    return lay_out


def docker(lines: list[str]) -> list[str]:
    return [json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-04-25T09:00:00.1Z"}) for line in lines]


def newest_first(lines: list[str]) -> list[str]:
    """Return a document of JSON as a log store exports it: its last record is the oldest line."""
    records = [
        {
            "line": line,
            "timestamp": str(int((BEGAN + timedelta(seconds=at)).timestamp() * 1e9)),
            "fields": {"app": "vllm"},
        }
        for at, line in enumerate(lines)
    ]
    return json.dumps(records[::-1], indent=1).splitlines()


def table(lines: list[str]) -> list[str]:
    """Return a table of CloudWatch, with times in milliseconds and the quotes of CSV."""
    text = io.StringIO()
    times = (int(BEGAN.timestamp() * 1000) + 1000 * second for second in range(len(lines)))
    csv.writer(text).writerows([("timestamp", "message"), *zip(times, lines, strict=True)])
    return text.getvalue().splitlines()


def journal(lines: list[str]) -> list[str]:
    return [json.dumps({"__REALTIME_TIMESTAMP": "1777107600000000", "_PID": "9", "MESSAGE": line}) for line in lines]


def with_prefix(lines: list[str]) -> list[str]:
    """Return the lines with VLLM_LOGGING_PREFIX, which a traceback lacks."""
    return [re.sub(r"(DEBUG|INFO|WARNING|ERROR) (?=\d\d-\d\d )", r"[prod-a] \1 ", line, count=1) for line in lines]


def wrapped(lines: list[str]) -> list[str]:
    return [line[at : at + 80] for line in lines for at in range(0, max(len(line), 1), 80)]


LAYOUTS: dict[str, Callable[[list[str]], list[str]]] = {
    "as it is": list,
    "kubectl logs --timestamps": stamped("%Y-%m-%dT%H:%M:%S.123456789Z "),
    "kubectl logs --prefix": lambda lines: [f"[pod/vllm-0/vllm] {line}" for line in lines],
    "docker compose logs": lambda lines: [f"vllm-1  | {line}" for line in lines],
    "journalctl": stamped("%b %d %H:%M:%S host vllm[4711]: "),
    "journalctl -o short-iso": stamped("%Y-%m-%dT%H:%M:%S+0000 host vllm[4711]: "),
    "a file of Docker": docker,
    "a file of CRI": stamped("%Y-%m-%dT%H:%M:%S.123456789Z stderr F "),
    "Buildkite": stamped("[%Y-%m-%dT%H:%M:%SZ] "),
    "a quotation": lambda lines: [f"> {line}" for line in lines],
    "a fence": lambda lines: ["The log:", "```text", *lines, "```"],
    "four blanks": lambda lines: [f"    {line}" for line in lines],
    "deep in a list": lambda lines: [f"{' ' * 14}{line}" for line in lines],
    "numbers of an editor": lambda lines: [f"  Line {at}: {line}" for at, line in enumerate(lines, 100)],
    "grep -n with a context": lambda lines: [f"{at}{':-'[at % 3 > 0]}{line}" for at, line in enumerate(lines, 7)],
    "without line feeds": lambda lines: [" ".join(" ".join(lines).split())],
    "logfmt": lambda lines: [
        f'time="2026-04-25T09:00:00Z" level=info msg={json.dumps(line)} component=vllm' for line in lines
    ],
    "colours as text": lambda lines: [f"\\x1b[1;36m{line}\\x1b[0m" for line in lines],
    "carets": lambda lines: [f"^[[36m{line}^[[0m^M" for line in lines],
    "colours without their escape character": lambda lines: [f"[36m{line}[0m" for line in lines],
    "stern": lambda lines: [f"vllm-7d9c-abcde vllm {line}" for line in lines],
    "logcli": lambda lines: stamped("%Y-%m-%dT%H:%M:%SZ ")([f'{{app="vllm", pod="vllm-0"}} {line}' for line in lines]),
    "klog": stamped("I0425 %H:%M:%S.%f       1 logs.go:32] "),
    "grep -n": lambda lines: [f"{at}:{line}" for at, line in enumerate(lines, 1)],
    "a quotation of a quotation": lambda lines: [f"> > {line}" for line in lines],
    "VLLM_LOGGING_PREFIX": with_prefix,
    "journalctl -o json": journal,
    "CSV": table,
    "newest first in JSON": newest_first,
    "newest first": lambda lines: stamped("%Y-%m-%dT%H:%M:%SZ ")(lines)[::-1],
    "wrapped by a terminal": wrapped,
    "carriage returns": lambda lines: [f"{line}\r" for line in lines],
    "from the middle": lambda lines: lines[next(at for at, line in enumerate(lines) if "Traceback" in line) :],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_changes_neither_verdict_nor_cause(tmp_path: Path, layout: Callable[[list[str]], list[str]]) -> None:
    report = judged(write(tmp_path, layout(OUT_OF_MEMORY)))
    assert first(report) == "gpu_out_of_memory"
    assert CAUSE in told(report)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_no_layout_makes_a_healthy_server_ill(tmp_path: Path, layout: Callable[[list[str]], list[str]]) -> None:
    if layout is LAYOUTS["from the middle"]:
        layout = lambda lines: lines[len(lines) // 2 :]  # noqa: E731
    report = judged(write(tmp_path, layout(SERVING)))
    assert report.verdict == "no_incident"
    assert "ends with the server at work" in told(report)


def test_records_of_several_lines_are_sorted_and_their_lines_are_not(tmp_path: Path) -> None:
    traceback = [f"{ENGINE}ERROR 11-20 10:01:00 [core.py:1] {line}" for line in raised("", "ValueError: the cause")]
    texts = ["\n".join(START), "\n".join(traceback), CORE_FAILED[-1]]
    records = [{"line": text, "timestamp": f"2026-11-20T10:0{at}:00Z"} for at, text in enumerate(texts)]
    report = judged(write(tmp_path, json.dumps(records[::-1], indent=1).splitlines()))
    assert first(report) == "startup_failed"
    assert "ValueError: the cause" in told(report)


# -- how a log ends ---------------------------------------------------------------------------------------------------

API, ENGINE, WORKER = "(APIServer pid=1) ", "(EngineCore pid=77) ", "(Worker_TP1 pid=99) "
CORE_FAILED = [
    f"{API}Traceback (most recent call last):",
    f'{API}  File "/usr/local/bin/vllm", line 8, in <module>',
    f"{API}    sys.exit(main())",
    f"{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}",
]
"""The API server's last lines when its engine does not start."""
START = [
    f"{API}INFO 11-20 10:00:00 [api_utils.py:347] vLLM server version 0.32.0, serving model m",
    f"{ENGINE}INFO 11-20 10:00:20 [core.py:112] Initializing a V1 LLM engine (v0.32.0) with config: model='m'",
    f"{ENGINE}INFO 11-20 10:00:30 [gpu_model_runner.py:4978] Starting to load model m...",
]
READY = [
    f"{API}INFO:     Application startup complete.",
    f'{API}INFO:     10.0.0.7:51234 - "POST /v1/completions HTTP/1.1" 200 OK',
]


def raised(head: str, text: str, function: str = "load_model") -> list[str]:
    """A traceback as vLLM logs it: with the head of its record before each line."""
    return [
        f"{head}Traceback (most recent call last):",
        f'{head}  File "/vllm/v1/worker/gpu_worker.py", line 9, in {function}',
        f"{head}    self.run()",
        f"{head}{text}",
    ]


def test_a_shutdown_in_order_is_no_incident(tmp_path: Path) -> None:
    lines = [*START, *READY, f"{API}INFO:     Shutting down", f"{API}INFO:     Application shutdown complete."]
    assert "ends with an orderly shutdown, 2026-11-20 10:00:30 UTC" in told(judged(write(tmp_path, lines)))


def test_an_engine_that_dies_is_told_with_its_reason(tmp_path: Path) -> None:
    head = f"{ENGINE}ERROR 11-20 11:00:00 [core.py:1510] "
    lines = [
        *START,
        *READY,
        f"{head}EngineCore encountered a fatal error.",
        *raised(head, "KeyError: 'x'", "execute_model"),
    ]
    report = judged(write(tmp_path, lines))
    assert first(report) == "engine_dead"
    assert "KeyError: 'x'" in told(report)
    assert "with a dead engine, 2026-11-20 11:00:00 UTC; 5 lines of errors" in told(report)


def test_a_log_that_stops_during_the_start_tells_nothing(tmp_path: Path) -> None:
    report = judged(write(tmp_path, START))
    assert report.verdict == "unknown"
    assert "OOMKilled" in told(report)
    assert "ends during a start, in the phase load_weights" in told(report)


def test_a_text_that_is_no_log_tells_nothing(tmp_path: Path) -> None:
    assert judged(write(tmp_path, ["Dear team,", "the server is slow."])).verdict == "unknown"


def test_answers_that_were_refused_stand_beside_no_failure(tmp_path: Path) -> None:
    asked = '(APIServer pid=1) INFO:     10.0.0.7:39458 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request'
    lines = [asked.replace("400 Bad Request", "200 OK"), *[asked] * 3]
    assert "0 of its last 4 answers HTTP 5xx and 3 HTTP 4xx" in told(judged(write(tmp_path, lines)))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match="nothing to judge"):
        judged(write(tmp_path, [""]))


def test_an_empty_file_hides_no_other(tmp_path: Path) -> None:
    write(tmp_path, [""], "a.log")
    write(tmp_path, OUT_OF_MEMORY, "b.log")
    report = judged(tmp_path)
    assert report.verdict == "critical"
    assert any("a.log has no text" in note for note in report.observed.notes)
    assert "successful scrapes" not in render(report, verbose=True)


@pytest.mark.parametrize(
    "line",
    [
        "Killed",
        "slurmstepd: error: *** JOB 8891 ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE TO TIME LIMIT ***",
        "/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be"
        " 6 leaked shared_memory objects to clean up at shutdown",
    ],
    ids=["shell", "Slurm", "Python"],
)
@pytest.mark.parametrize("served", [True, False], ids=["at work", "starting"])
def test_a_server_that_was_ended_from_outside_is_not_at_work(tmp_path: Path, line: str, served: bool) -> None:
    report = judged(write(tmp_path, [*START, *(READY if served else []), line]))
    assert (report.verdict, report.present) == ("unknown", ())
    assert "ended from outside" in told(report)


def test_a_start_that_a_signal_stopped_did_not_fail(tmp_path: Path) -> None:
    head = f"{ENGINE}ERROR 11-20 10:00:40 [core.py:1010] "
    lines = [*START, f"{head}EngineCore failed to start.", *raised(head, "KeyboardInterrupt: terminated")]
    report = judged(write(tmp_path, lines))
    assert "ended from outside" in told(report)


def test_a_process_that_is_interrupted_because_another_failed_hides_no_failure(tmp_path: Path) -> None:
    other = "(Worker_TP0 pid=98) "
    lines = [
        *START,
        *raised(f"{WORKER}ERROR 11-20 10:00:40 [multiproc_executor.py:949] ", "ValueError: head size 80"),
        *raised(other, "KeyboardInterrupt: terminated"),
        *CORE_FAILED,
    ]
    report = judged(write(tmp_path, lines))
    assert first(report) == "startup_failed"
    assert "ValueError: head size 80" in told(report)


def test_the_reason_inside_of_a_wrapper_is_quoted(tmp_path: Path) -> None:
    head = f"{ENGINE}ERROR 11-20 10:00:40 [core.py:1010] "
    wrapped_error = raised(head, "ray.exceptions.RayTaskError(ValueError): ray::RayWorkerWrapper.execute_method()")
    lines = [*START, f"{head}EngineCore failed to start.", *wrapped_error, f"{head}ValueError: expected 22, got 21"]
    assert "Log ValueError: expected 22, got 21" in told(judged(write(tmp_path, lines)))


def test_a_lone_exception_of_a_library_is_not_the_reason(tmp_path: Path) -> None:
    noise = "AttributeError: 'MessageFactory' object has no attribute 'GetPrototype'"
    goes_on = f"{ENGINE}INFO 11-20 10:00:35 [cuda.py:300] Using Flash Attention backend."
    lines = [*START, noise, goes_on, *raised("", "ValueError: Cannot find the config file for awq")]
    assert "Cannot find the config file for awq" in told(judged(write(tmp_path, lines)))


def test_a_traceback_of_the_server_itself_needs_no_line_of_vllm(tmp_path: Path) -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/vllm/entrypoints/openai/api_server.py", line 59, in <module>',
        "    main()",
        "vllm.exceptions.VLLMValidationError: The supplied chat template string (/x) appears path-like",
    ]
    report = judged(write(tmp_path, lines))
    assert (first(report), report.verdict) == ("startup_failed", "critical")


def test_a_web_server_that_is_no_vllm_is_not_called_healthy(tmp_path: Path) -> None:
    lines = ["INFO:     Application startup complete.", 'INFO:     10.0.0.7:51234 - "GET /index HTTP/1.1" 200 OK']
    stamped_lines = stamped("%Y-%m-%dT%H:%M:%SZ ")([*lines, *lines[1:] * 60])
    assert judged(write(tmp_path, stamped_lines)).verdict == "unknown"
    sglang = ["server_args=ServerArgs(model_path='m')", "INFO:     Started server process [31319]", READY[1]]
    assert judged(write(tmp_path, stamped("[%Y-%m-%d %H:%M:%S] ")([*sglang, *lines]))).verdict == "unknown"


def test_a_log_of_two_years_is_judged_at_its_end(tmp_path: Path) -> None:
    lines = [f"2024-01-01T00:00:00.931Z {START[0]}", *(f"2026-11-20T10:00:00Z {line}" for line in OUT_OF_MEMORY)]
    assert first(judged(write(tmp_path, lines))) == "gpu_out_of_memory"


def test_powershell_writes_utf_16_and_truncation_leaves_nul(tmp_path: Path) -> None:
    text = "\n".join(OUT_OF_MEMORY)
    (tmp_path / "a.log").write_bytes(text.encode("utf-16"))
    (tmp_path / "b.log").write_bytes(bytes(9_000) + text.encode())
    for name in ("a.log", "b.log"):
        assert CAUSE in told(judged(tmp_path / name))


# -- the root of a failure --------------------------------------------------------------------------------------------


def test_the_first_reason_is_quoted_not_its_consequences(tmp_path: Path) -> None:
    lines = [
        *START,
        *raised(
            f"{WORKER}ERROR 11-20 10:00:40 [multiproc_executor.py:949] ", "ValueError: head size 80 is not supported"
        ),
        *raised(
            f"{ENGINE}ERROR 11-20 10:00:41 [core.py:1010] ",
            "Exception: WorkerProc initialization failed due to an"
            " exception in a background process. See stack trace for root cause.",
        ),
        *CORE_FAILED,
    ]
    report = judged(write(tmp_path, lines))
    assert first(report) == "startup_failed"
    assert "Log ValueError: head size 80 is not supported" in told(report)
    assert "lines of errors in 3 processes" in told(report)


@pytest.mark.parametrize("head", ["", API, f"{ENGINE}ERROR 11-20 10:00:40 [core.py:1010] "])
def test_an_exception_without_its_traceback_is_an_end_too(tmp_path: Path, head: str) -> None:
    report = judged(write(tmp_path, [f"{head}OSError: You are trying to access a gated repo."]))
    assert first(report) == "startup_failed"
    assert "gated repo" in told(report)


def test_an_exception_that_the_start_survived_is_no_end(tmp_path: Path) -> None:
    failed_import = raised(f"{ENGINE}ERROR 11-20 10:00:25 [flash.py:1] ", "ImportError: no flash_attn")
    assert not judged(write(tmp_path, [*START[:2], *failed_import, START[2], *READY])).present
    assert judged(write(tmp_path, [*START[:2], *failed_import, START[2]])).verdict == "unknown"


def test_frames_that_have_lost_their_blanks_are_frames(tmp_path: Path) -> None:
    lines = [
        line.replace("]   ", "] ")
        for line in raised(f"{ENGINE}ERROR 11-20 10:00:40 [core.py:343] ", "AttributeError: no x")
    ]
    assert "AttributeError: no x" in told(judged(write(tmp_path, [*START, *lines])))


@pytest.mark.parametrize(
    ("function", "incident"), [("_initialize_kv_caches", "startup_failed"), ("run_busy_loop", "engine_dead")]
)
def test_the_frames_tell_a_start_from_work_in_old_releases(tmp_path: Path, function: str, incident: str) -> None:
    head = "ERROR 04-03 18:30:13 [core.py:343] "
    first_line, *rest = raised(head, "TypeError: x", function)
    report = judged(write(tmp_path, [first_line.replace("Traceback", "EngineCore hit an exception: Traceback"), *rest]))
    assert first(report) == incident


def test_what_a_client_sent_ends_no_server(tmp_path: Path) -> None:
    """A request is logged with its line breaks, as the last lines of the log."""
    head = f"{API}INFO 11-20 10:05:00 [logger.py:39] "
    lines = [
        f"{head}Received request 1: prompt: 'x",
        f"{head}Traceback (most recent call last):",
        "ValueError: Free memory'",
    ]
    lines += raised("", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "execute_model")
    assert not judged(write(tmp_path, [*START, *READY, *lines])).present


def test_a_request_that_fails_ends_no_server(tmp_path: Path) -> None:
    lines = [f"{API}ERROR:    Exception in ASGI application", *raised(API, "ValueError: too long", "create_completion")]
    assert not judged(write(tmp_path, [*START, *READY, *lines])).present


def test_answers_that_are_errors_are_told_with_their_exception(tmp_path: Path) -> None:
    answers = []
    for second in range(0, 120, 2):
        answers += [
            f"{API}INFO 11-20 10:{5 + second // 60:02}:{second % 60:02} [loggers.py:259] Engine 000: idle",
            f'{API}INFO:     10.0.0.7:51234 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error',
            f"{API}ERROR:    Exception in ASGI application",
            *raised(API, "KeyError: 'tool_calls'", "create_chat_completion"),
        ]
    report = judged(write(tmp_path, [*START, *READY, *answers]))
    assert first(report) == "requests_failing"
    assert "KeyError: 'tool_calls'" in told(report)


# -- targets ----------------------------------------------------------------------------------------------------------


def test_several_logs_are_several_servers(tmp_path: Path) -> None:
    shutil.copy(write(tmp_path, OUT_OF_MEMORY, "a.log"), tmp_path / "b.log")
    write(tmp_path, SERVING, "c.txt")
    (tmp_path / "notes.md").write_text("no log")
    report = judged(tmp_path)
    assert report.servers == ("a.log", "b.log", "c.txt")
    assert {dict(found.diagnosis.subject)["instance"] for found in report.present} == {"a.log", "b.log"}


def test_standard_input_and_gzip_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write(tmp_path, OUT_OF_MEMORY).read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert "standard input" in told(judged("-"))
    (tmp_path / "old.log.gz").write_bytes(gzip.compress(raw))
    assert CAUSE in told(judged(tmp_path / "old.log.gz"))


def test_recordings_and_urls_are_no_logs(tmp_path: Path) -> None:
    recording = next(path for path in sorted(RECORDINGS.iterdir()) if path.is_dir() and (path / "server.log").exists())
    assert judged(recording).observed.source == "recording"
    with pytest.raises(BadUsage, match="is no log"):
        judged(write(tmp_path, SERVING), "http://127.0.0.1:1")


@pytest.mark.parametrize(
    "content",
    [b"# HELP vllm:x y\n# TYPE vllm:x gauge\nvllm:x 1\n", b"<!DOCTYPE html>\n<html></html>", bytes(5000)],
    ids=["a page of metrics", "HTML", "no text"],
)
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadRecording):
        judged(tmp_path / "file")


def test_the_middle_of_a_large_log_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diag.log.files.FIRST", 2_000)
    monkeypatch.setattr("diag.log.files.LAST", 20_000)
    access = [f'{API}INFO:     10.0.0.7:51234 - "POST /v1/completions HTTP/1.1" 200 OK'] * 5_000
    report = judged(write(tmp_path, [*START, *READY, *access, *OUT_OF_MEMORY]))
    assert "only the first" in told(report)
    assert CAUSE in told(report)


def test_lines_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line feeds alone are no lines; of too many lines the last ones are read."""
    monkeypatch.setattr("diag.sources.logs.FIRST_LINES", 20)
    monkeypatch.setattr("diag.sources.logs.LAST_LINES", 500)
    (tmp_path / "feeds.log").write_bytes(b"\n" * 5_000_000 + b"x")
    assert judged(tmp_path / "feeds.log").verdict == "unknown"
    report = judged(write(tmp_path, [*["x"] * 1_000, *OUT_OF_MEMORY]))
    assert first(report) == "gpu_out_of_memory"


def test_files_of_vllm_whose_name_begins_like_a_colour_stay_in_their_head() -> None:
    line = "(APIServer pid=1) INFO 07-01 09:38:58 [model.py:611] Resolved architecture: M"
    assert as_logged([Line(1, line)])[0].text == line


TOLD = [f"INFO 11-20 03:12:0{second} [core.py:97] step {second}" for second in range(6)]


@pytest.mark.parametrize(
    ("pasted", "read"),
    [
        ([text for text in TOLD for _ in "12"], TOLD),  # two collectors
        ([*TOLD, "", *TOLD], TOLD),
        (TOLD * 3, TOLD),
        (TOLD, TOLD),
        ([*TOLD, *TOLD[:5], "INFO 11-20 03:12:07 [core.py:97] another"], None),
    ],
)
def test_a_line_that_was_copied_is_read_once(pasted: list[str], read: list[str] | None) -> None:
    lines = as_logged([Line(number, text) for number, text in enumerate(pasted, 1)])
    assert [line.text for line in lines] == (pasted if read is None else read)


def test_the_release_and_the_launch_may_be_told(tmp_path: Path) -> None:
    report = judged(write(tmp_path, OUT_OF_MEMORY[20:]), version="0.8.5", launch="vllm serve m")
    assert report.observed.servers[0].version == "0.8.5"


# -- requests that fail while the server goes on ----------------------------------------------------------------------


def test_the_exception_of_a_request_is_told_and_makes_no_server_ill(tmp_path: Path) -> None:
    head = "(APIServer pid=1) ERROR 09-02 10:11:12 [serving.py:254] "
    frame = '  File "/usr/lib/python3.12/site-packages/vllm/tool_parsers/hermes_tool_parser.py", line 310, in extract'
    raised = [
        head + text for text in ("Error", "Traceback (most recent call last):", frame, "    x()", "KeyError: 'a'")
    ]
    report = judged(write(tmp_path, [*SERVING, *raised]))
    assert report.verdict == "no_incident"
    assert "a request failed" in told(report)
    assert "--tool-call-parser" in told(report)


def test_a_fragment_with_the_exception_of_a_request_tells_that_and_no_failed_start(tmp_path: Path) -> None:
    head = "(APIServer pid=1) ERROR 09-02 10:11:12 [serving.py:254] "
    frame = (
        '  File "/site-packages/vllm/entrypoints/openai/chat_completion/serving.py", line 225, in render_chat_request'
    )
    raised = ("Error in preprocessing", "Traceback (most recent call last):", frame, "    x()", "ValueError: bad role")
    report = judged(write(tmp_path, [head + text for text in raised]))
    assert report.verdict == "unknown"
    assert "a request failed (line 5): ValueError: bad role" in told(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        "ERROR 04-28 02:37:03 [core.py:398] ",  # 0.8
        "(EngineCore_DP0 pid=414) ERROR 10-15 03:21:24 [core.py:710] ",  # 0.11
        "(EngineCore pid=2150) ERROR 06-29 11:22:29 [core.py:1231] ",  # 0.20 to 0.33
        "(EngineCore_DP1 pid=1526) ERROR 09-01 11:22:29 [v1/engine/core.py:1339] ",
    ],
)
@pytest.mark.parametrize("frames", [[], ['  File "/x/vllm/v1/engine/core.py", line 9, in step', "    step()"]])
def test_an_announced_exception_needs_no_traceback(tmp_path: Path, head: str, frames: list[str]) -> None:
    lines = [head + text for text in ("EngineCore encountered a fatal error.", *frames, "KeyError: 'w13_scale'")]
    report = judged(write(tmp_path, lines))
    assert first(report) == "engine_dead"
    assert "Log KeyError: 'w13_scale'" in told(report)
    assert f"server.log:{len(lines)}" in told(report).replace(" ", ""), "a long path is wrapped"


PARSER = '  File "/site-packages/vllm/{}", line 310, in {}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "file", "function", "incident"),
    [
        ("", "tool_parsers/qwen3coder_tool_parser.py", "_parse_function", ""),
        ("", "reasoning/deepseek_r1_reasoning_parser.py", "extract_content", ""),
        ("(APIServer pid=1) ERROR 09-02 10:11:12 [serving.py:932] ", "renderers/hf.py", "render", ""),
        ("ERROR 03-12 08:11:44 [serving_chat.py:1181] ", "v1/x.py", "run", ""),
        ("", "tool_parsers/abstract_tool_parser.py", "get_tool_parser", "startup_failed"),
        ("", "entrypoints/openai/api_server.py", "build_async_engine_client", "startup_failed"),
        ("", "model_executor/layers/linear.py", "create_weights", "startup_failed"),
    ],
)
def test_the_place_of_an_exception_tells_a_request_from_a_start(
    tmp_path: Path, head: str, file: str, function: str, incident: str
) -> None:
    texts = ("Traceback (most recent call last):", PARSER.format(file, function), "    x()", "ValueError: not found")
    report = judged(write(tmp_path, [head + text for text in texts]))
    assert first(report) == incident
    assert incident or "a request failed (line 4): ValueError: not found" in told(report)


@pytest.mark.parametrize(
    ("said", "tells", "alone"),
    [
        (
            "[14:02:11] /project/cpp/json_schema_converter.cc:795: Check failed: (x) is false: no object",
            "no object",
            False,
        ),
        (
            "(APIServer pid=1) ERROR 09-02 10:11:12 [serving.py:830] openai_harmony.HarmonyError: a",
            "HarmonyError: a",
            True,
        ),
        ("ERROR 09-02 10:11:12 [backend_xgrammar.py:160] Failed to advance FSM", "Failed to advance FSM", False),
    ],
)
def test_the_line_above_an_answer_500_is_told(tmp_path: Path, said: str, tells: str, alone: bool) -> None:
    """An exception with its class is `alone` told above any answer; a library's line only above a failed one."""
    answer = 'INFO:     10.0.0.7:51234 - "POST /v1/chat/completions HTTP/1.1" {}'
    failed, well = answer.format("500 Internal Server Error"), answer.format("200 OK")
    assert tells in told(judged(write(tmp_path, [*SERVING, said, failed])))
    assert (tells in told(judged(write(tmp_path, [*SERVING, said, well, failed])))) is alone


@pytest.mark.parametrize("above", [[], ["1 validation error for VllmConfig"]])
def test_the_last_line_of_pydantics_error_is_one_alone(tmp_path: Path, above: list[str]) -> None:
    said = (
        "  Value error, Unknown quantization method: mxfp6. Must be one of ['awq']. [type=value_error, input_value=1]"
    )
    report = judged(write(tmp_path, [*above, said]))
    assert first(report) == "startup_failed"
    assert 'no quantization method "mxfp6"' in told(report)
    assert not judged(write(tmp_path, [f"INFO 09-02 10:11:12 [x.py:1] {said}"])).present


def test_a_warning_of_vllms_names_the_cause_where_nothing_else_does(tmp_path: Path) -> None:
    head = "(EngineCore_DP0 pid=7) WARNING 02-18 08:20:50 [ray_utils.py:345] "
    short = f"{head}Tensor parallel size (16) exceeds available GPUs (8). This may result in Ray placement failures."
    report = judged(write(tmp_path, [short]))
    assert report.verdict == "unknown"
    assert "asks for 16" in told(report)
    waits = "INFO 02-18 08:21:00 [ray_utils.py:221] Waiting for creating a placement group of specs for 10 seconds."
    assert "--tensor-parallel-size 8" in told(judged(write(tmp_path, [short, waits])))


def test_an_exception_behind_a_foreign_head_names_the_cause_and_information_does_not(tmp_path: Path) -> None:
    said = "AttributeError: TokenizersBackend has no attribute all_special_tokens_extended."
    assert '"transformers<5"' in told(judged(write(tmp_path, [f"duuu9mr59pks4j[info]{said}"])))
    quoted = f"INFO 11-20 10:05:00 [logger.py:39] Received request 1: prompt: '{said}'"
    assert '"transformers<5"' not in told(judged(write(tmp_path, [quoted])))


def test_json_of_a_request_is_told_as_one(tmp_path: Path) -> None:
    head = "(APIServer pid=1) ERROR 09-02 10:11:12 [serving.py:254] "
    raised_in = ("Error", "Traceback (most recent call last):", PARSER.format("renderers/hf.py", "render"), "    x()")
    lines = [head + text for text in (*raised_in, "json.decoder.JSONDecodeError: Expecting value: line 1 column 1")]
    assert "Have the client send valid JSON" in told(judged(write(tmp_path, lines)))


def test_what_stopped_the_tokens_is_told(tmp_path: Path) -> None:
    failed = (
        "(Worker_TP0 pid=9) ERROR 11-20 10:05:00 [mooncake_connector.py:547] Mooncake transfer failed for request a"
    )
    stands = (
        f"{API}INFO 11-20 10:04:50 [loggers.py:259] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
        "throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 1 reqs, GPU KV cache usage: 9%, Prefix cache hit rate: 0%"
    )
    assert "Mooncake could not move" in told(judged(write(tmp_path, [*START, *READY, stands, failed])))


# -- scripts that use an engine without a server ----------------------------------------------------------------------

HEAD = "(EngineCore_DP0 pid=321) INFO 05-18 10:00:{:02d} [core.py:93] "
SCRIPT = [
    "INFO 05-18 10:00:00 [utils.py:253] non-default args: {'max_model_len': 1024, 'model': 'm'}",
    HEAD.format(5) + "Initializing a V1 LLM engine (v0.14.0) with config: model='m', dtype=torch.bfloat16",
    HEAD.format(30) + "init engine (profile, create kv cache, warmup model) took 15.00 seconds",
]
RAN = ["Processed prompts: 100%|##########| 4/4 [00:00<00:00, 20it/s]", "Prompt: 'Hello'"]
RAISED = ["Traceback (most recent call last):", '  File "/w/train_grpo.py", line 210, in <module>', "    main()"]
IN_PACKAGE = '  File "/usr/lib/python3.12/site-packages/trl/trainer/grpo_trainer.py", line 1400, in _compute_loss'
BY_MODULE = [
    "Traceback (most recent call last):",
    '  File "<frozen runpy>", line 198, in _run_module_as_main',
    IN_PACKAGE,
]


@pytest.mark.parametrize("engines", [1, 5], ids=["one engine", "five, one after the other"])
def test_a_script_that_ends_in_order_has_no_failure(tmp_path: Path, engines: int) -> None:
    lines = [line.replace("10:00", f"10:{minute:02d}") for minute in range(engines) for line in (*SCRIPT, *RAN)]
    assert judged(write(tmp_path, lines)).verdict == "no_incident"


def test_engines_that_vanish_one_after_the_other_are_a_crash_loop_of_a_script_too(tmp_path: Path) -> None:
    """A line since its own start shows that an engine is of a script, not one of another engine."""
    starts = [line.replace("10:00", f"10:{minute:02d}") for minute in range(2, 8) for line in SCRIPT]
    report = judged(write(tmp_path, [*SCRIPT, *RAN, *[line.replace("10:00", "10:01") for line in SCRIPT], *starts]))
    assert "crash_loop" in {finding.diagnosis.incident.id for finding in report.present}


def test_an_engine_that_a_script_ended_is_no_start_that_was_cut_off(tmp_path: Path) -> None:
    """Its start ends where the script has no bars, and a start that is cut off may have lacked memory."""
    head = "(EngineCore pid=321) INFO 05-18 10:01:00 [core.py:1257] "
    ended = [f"{head}Shutdown initiated (timeout=0)", f"{head}Shutdown complete", "overall: PASS"]
    assert judged(write(tmp_path, [*SCRIPT, *ended])).verdict == "no_incident"


@pytest.mark.parametrize(
    ("caller", "verdict"), [("vllm/entrypoints/llm.py", "unknown"), ("app/handler.py", "no_incident")]
)
def test_an_exception_in_a_script_is_no_error_of_a_request(tmp_path: Path, caller: str, verdict: str) -> None:
    """The engine goes on to end in order; a server would have answered the request with an error."""
    places = ((caller, "generate"), ("vllm/renderers/base.py", "_tokenize_prompt"))
    frames = [f'  File "/x/{file}", line 9, in {function}' for file, function in places]
    raised = ["Traceback (most recent call last):", *frames, "PanicException: ThreadPoolBuildError { code: 11 }"]
    head = "(EngineCore pid=321) INFO 05-18 10:01:00 [core.py:1257] Shutdown"
    assert (
        judged(write(tmp_path, [*SCRIPT, *raised, f"{head} initiated (timeout=0)", f"{head} complete"])).verdict
        == verdict
    )


@pytest.mark.parametrize("behind", [[], ["tracker.py:9: UserWarning: resource_tracker: There appear to be 1 leaked x"]])
def test_an_interrupted_start_is_told_as_such(tmp_path: Path, behind: list[str]) -> None:
    report = judged(write(tmp_path, [*SCRIPT[:2], *RAISED, "KeyboardInterrupt", *behind]))
    assert "leaked" not in told(report)
    assert report.verdict == "unknown"
    assert "Ctrl-C" in told(report) and "dmesg" not in told(report)


@pytest.mark.parametrize(
    ("waits", "says"),
    [([], "Look at the limits of the start script"), (["specs for 70 seconds. specs=[{'GPU': 1.0}]"], "fewer GPUs")],
)
def test_a_start_that_a_signal_or_a_time_limit_ended_tells_what_it_waited_for(
    tmp_path: Path, waits: list[str], says: str
) -> None:
    waited = [
        f"INFO 05-18 10:00:30 [ray_utils.py:233] Waiting for creating a placement group of {wait}" for wait in waits
    ]
    report = judged(write(tmp_path, [*SCRIPT[:2], *waited, *RAISED, "KeyboardInterrupt: terminated"]))
    assert report.verdict == "unknown"
    assert says in told(report) and "Ctrl-C, the signal SIGINT" not in told(report)


def test_the_rank_with_the_least_free_memory_decides(tmp_path: Path) -> None:
    text = (
        "ValueError: Free memory on device cuda:{rank} ({free}/79.18 GiB) on startup is less than desired GPU memory"
        " utilization (0.92, 72.84 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )
    ranks = [text.format(rank=rank, free=free) for rank, free in enumerate(("54.34", "41.10", "54.11"))]
    failed = [line.partition(CAUSE)[0] + rank for rank in ranks for line in OUT_OF_MEMORY if CAUSE in line]
    report = judged(write(tmp_path, [*(line for line in OUT_OF_MEMORY if CAUSE not in line), *failed]))
    assert "Only 41.10 of" in told(report) and "--gpu-memory-utilization 0.49" in told(report)


def test_a_line_of_another_year_hides_no_failure(tmp_path: Path) -> None:
    ray = "2024-05-18 10:00:31,430 INFO worker.py:1631 -- Connecting to existing Ray cluster at address: 10.0.0.1:6379"
    texts = [told(judged(write(tmp_path, [*OUT_OF_MEMORY[:2], *lines, *OUT_OF_MEMORY[2:]]))) for lines in ([], [ray])]
    assert CAUSE in texts[0] and CAUSE in texts[1]


@pytest.mark.parametrize("frames", [[*RAISED, IN_PACKAGE], BY_MODULE], ids=["a script", "a module"])
def test_the_exception_of_a_script_is_no_failed_start(tmp_path: Path, frames: list[str]) -> None:
    report = judged(write(tmp_path, [*SCRIPT, *frames, "    x()", "IndexError: reward 3 of 2"]))
    assert report.verdict == "unknown"
    assert "the script that used it ended with an exception" in told(report)
    assert "IndexError: reward 3 of 2" in told(report)


def test_a_script_whose_engine_does_not_start_is_ill(tmp_path: Path) -> None:
    report = judged(write(tmp_path, [*SCRIPT[:2], *RAISED, IN_PACKAGE, "    x()", "IndexError: reward 3 of 2"]))
    assert first(report) == "startup_failed"


def test_the_warning_of_nccl_says_more_than_its_exception(tmp_path: Path) -> None:
    warned = (
        "node1:91:180 [0] misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes"
    )
    failed = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
    frame = '  File "/usr/lib/python3.12/site-packages/vllm/v1/worker/gpu_worker.py", line 200, in init_device'
    report = judged(write(tmp_path, [*SCRIPT[:2], warned, *RAISED, frame, "    x()", failed]))
    assert "failed to extend /dev/shm" in report.present[0].quotes[0].text
    assert "--shm-size" in told(report)


# -- deaths that a client wrote ---------------------------------------------------------------------------------------

DIED = ("EngineCore encountered a fatal error.", "Traceback (most recent call last):", "RuntimeError: CUDA error: x")
ENGINE_OF_SERVING = "(EngineCore pid=24343) ERROR 11-21 20:00:00 [core.py:1510] "


def statistics(seconds: float, tokens: float = 10.0) -> str:
    at = f"{datetime(2026, 11, 21, 20, tzinfo=UTC) + timedelta(seconds=seconds):%m-%d %H:%M:%S}"
    rates = f"Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {tokens} tokens/s, Running: 2 reqs"
    return f"(APIServer pid=24326) INFO {at} [loggers.py:259] Engine 000: {rates}, Waiting: 0 reqs"


@pytest.mark.slow
@pytest.mark.parametrize("forged", [access_lines, behind_line_feeds])
def test_no_text_of_a_client_in_the_access_log_hides_a_death_or_makes_one(
    forged: Callable[[str, float], list[str]], tmp_path: Path
) -> None:
    """Sixty forms of access lines, each twice, more than half a minute after the death and without one."""
    lines = forged("\n".join(SERVING), datetime(2026, 11, 21, 20, 1, 30, tzinfo=UTC).timestamp())
    later = [statistics(90, 0.0), *lines, *lines]
    died = [ENGINE_OF_SERVING + text for text in DIED]
    report = judged(write(tmp_path, [*SERVING, *died, *later]))
    assert "engine_dead" in {found.diagnosis.incident.id for found in report.present}
    assert not judged(write(tmp_path, [*SERVING, *later])).present


def test_a_pipe_of_the_shell_is_read(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, "\n".join(OUT_OF_MEMORY).encode())
    os.close(write_end)
    assert first(judged(f"/dev/fd/{read_end}")) == "gpu_out_of_memory"
    os.close(read_end)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("later", "is_dead"),
    [
        ([statistics(second) for second in range(1, 200, 10)], False),
        ([statistics(90, 0.0), *['INFO:     10.0.0.7:51234 - "POST /v1/completions HTTP/1.1" 200 OK'] * 2], False),
        ([statistics(9), *(statistics(second, 0.0) for second in range(20, 90, 10))], True),
        ([statistics(2), *['INFO:     10.0.0.7:51234 - "POST /v1/completions HTTP/1.1" 200 OK'] * 9], True),
        ([statistics(90, 0.0), *['INFO:     10.0.0.7:51234 - "POST /v1/completions HTTP/1.1" 500'] * 9], True),
        ([*SERVING, *(statistics(second) for second in range(100, 200, 10))], True),
        ([statistics(90)], True),
    ],
    ids=["tokens", "answers", "stale statistics", "queued lines", "refusals", "a new start", "a single sign"],
)
def test_work_behind_a_death_refutes_it(tmp_path: Path, later: list[str], is_dead: bool) -> None:
    died = [ENGINE_OF_SERVING + text for text in DIED]
    report = judged(write(tmp_path, [*SERVING, statistics(-10), *died, *later]))
    named = {found.diagnosis.incident.id for found in report.present}
    assert ("engine_dead" in named) == is_dead
    assert ("these lines are ignored" in told(report)) != is_dead


def test_a_file_with_the_lines_of_several_servers_is_parted_by_server() -> None:
    healthy = ["(APIServer pid=1) INFO 11-21 02:32:18 [launcher.py:1] text"] * 4
    failed = ["(EngineCore pid=9) ERROR 11-21 02:33:18 [core.py:58] ValueError: text"] * 4
    pods = [line for pair in zip(healthy, failed, strict=True) for line in pair]
    of_pods = [f"[pod/vllm-{at % 2}/vllm] {line}" for at, line in enumerate(pods)]
    of_services = [f"{'ab'[at % 2]}-1  | {line}" for at, line in enumerate(pods)]
    joined = [*healthy, *(f"[pod/vllm-1/vllm] {line}" for line in failed)]
    titled = ["==> prefill.log <==", *healthy, "", "==> decode.log <==", *failed]
    forged = [*healthy, *(f"[pod/vllm-1/vllm] {line}" for line in failed[:3]), *healthy * 3]

    def names(texts: list[str]) -> list[str]:
        return [name for name, _ in by_source([Line(at, text) for at, text in enumerate(texts, 1)])]

    assert names(of_pods) == ["pod/vllm-0/vllm", "pod/vllm-1/vllm"]
    assert names(of_services) == ["a-1", "b-1"]
    assert names(joined) == ["", "pod/vllm-1/vllm"]
    assert names(titled) == ["prefill.log", "decode.log"]
    assert names(forged) == names(healthy) == names([f"vllm-1  | {line}" for line in pods]) == [""]
