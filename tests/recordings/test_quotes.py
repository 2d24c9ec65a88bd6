"""A report quotes the line of the log that decides, says where it stands, and proposes what that line asks for."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import rewriting
from support.schemas import validator

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Finding, Report
from diag.knowledge.catalog import load
from diag.report import html, markdown, terminal
from diag.report import json as as_json

STARTED = 1_795_230_000.0
"""2026-11-21 03:00:00 UTC."""
ARGS = "(APIServer pid=1) INFO 11-21 03:00:01 [api_utils.py:286] non-default args: "
CORE = "(EngineCore pid=9) ERROR 11-21 03:00:05 [core.py:1510] "
CRASH = "startup_crash_blocksize16"
NO_ROOM = (
    "ValueError: To serve at least one request with the model's max seq len (8192), (0.50 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (0.25 GiB). Based on the available memory, the estimated "
    "maximum model length is 4096. Try increasing `gpu_memory_utilization`"
)
OUTDATED = (
    "RuntimeError: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver"
)
CUDA = (
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling N? Error "
)


def judged(path: str, launch: str = "") -> Report:
    return doctor.run(ObserveOptions([path], launch=launch))


def finding(report: Report, incident: str) -> Finding:
    return next(each for each in report.present if each.diagnosis.incident.id == incident)


def failed(folder: Path, lines: Sequence[str], launch: str = "") -> Report:
    """A server that never answers, with that log."""
    rewriting.write(folder, ((STARTED + 2 * at, "h:8000", "") for at in range(20)))
    (folder / "server.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return judged(str(folder), launch)


def of_engine(error: str) -> list[str]:
    """Return the log of an engine that did not start because of this error."""
    return [
        CORE + line for line in ("EngineCore failed to start.", "Traceback (most recent call last):", "  File", error)
    ]


# -- in each form -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbose", [False, True])
def test_a_terminal_shows_the_line_and_its_place(verbose: bool) -> None:
    words = " ".join(terminal.render(judged(f"tests/recordings/{CRASH}"), verbose=verbose).split())
    assert "ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)]). (tests/" in words
    assert "server.log:71, Worker)" in words


def test_markdown_and_html_show_the_quoted_line() -> None:
    report = judged(f"tests/recordings/{CRASH}")
    assert "No common block size for 16" in markdown.render(report)
    assert "No common block size for 16" in html.render(report)


def test_json_has_the_quote_as_data() -> None:
    document = json.loads(as_json.render(judged(f"tests/recordings/{CRASH}")))
    validator(Path("diag/report/diag.doctor.schema.json")).validate(document)
    (quote,) = document["diagnoses"][0]["quotes"]
    assert (quote["line"], quote["process"], quote["file"]) == (71, "Worker", f"tests/recordings/{CRASH}/server.log")
    assert [each["quotes"] for each in document["diagnoses"] if each["state"] != "present"] == [[]] * (
        len(document["diagnoses"]) - 1
    )


def test_no_proposal_reads_what_is_quoted(tmp_path: Path) -> None:
    report = failed(tmp_path, ["", *of_engine("ValueError: bad")])
    proposals = finding(report, "startup_failed").proposals
    assert proposals
    assert not any(proposal.fix.command for proposal in proposals)


def test_no_command_has_a_placeholder_for_the_log() -> None:
    assert not [fix.command for incident in load() for fix in incident.fixes if "<the log>" in fix.command]


# -- what the line asks for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (OUTDATED, "driver"),
        (
            CUDA + "803: system has unsupported display driver / cuda driver combination",
            "VLLM_ENABLE_CUDA_COMPATIBILITY",
        ),
        (CUDA + "804: forward compatibility was attempted on non supported HW", "VLLM_ENABLE_CUDA_COMPATIBILITY"),
        (CUDA + "802: system not yet initialized", "nvidia-fabricmanager"),
    ],
)
def test_an_error_that_is_known_has_its_own_action(tmp_path: Path, error: str, action: str) -> None:
    found = finding(failed(tmp_path, of_engine(error)), "startup_failed")
    assert found.failure is not None
    assert action in found.failure.do
    assert found.proposals[0].text == found.failure.do
    assert found.quotes[0].text.startswith(error[:60])


@pytest.mark.parametrize("flag", ["num_gpu_blocks_override", "kv_cache_memory_bytes"])
def test_a_pinned_kv_cache_is_unpinned_before_the_context_is_shortened(tmp_path: Path, flag: str) -> None:
    option = f"--{flag.replace('_', '-')}"
    lines = [ARGS + f"{{'model': 'm', 'max_model_len': 8192, '{flag}': 256}}", *of_engine(NO_ROOM)]
    found = finding(failed(tmp_path, lines, f"vllm serve m --max-model-len 8192 {option} 256"), "gpu_out_of_memory")
    assert [proposal.fix.flag for proposal in found.proposals][:2] == [option, "--max-model-len"]
    assert found.relaunch == "vllm serve m --max-model-len 8192"


def test_a_kv_cache_that_is_not_pinned_is_not_unpinned(tmp_path: Path) -> None:
    lines = [ARGS + "{'model': 'm', 'max_model_len': 8192}", *of_engine(NO_ROOM)]
    found = finding(failed(tmp_path, lines), "gpu_out_of_memory")
    assert [(proposal.fix.flag, proposal.after) for proposal in found.proposals] == [("--max-model-len", 4096)]


def test_a_flag_that_lint_finds_wrong_is_taken_out_of_the_launch_command(tmp_path: Path) -> None:
    refused = "api_server.py: error: unrecognized arguments: --num-scheduler-steps 8"
    found = finding(failed(tmp_path, [refused], "vllm serve m --num-scheduler-steps 8 --seed 1"), "startup_failed")
    assert found.relaunch == "vllm serve m --seed 1"


def test_lint_judges_the_arguments_in_the_line_where_the_command_is_not_known(tmp_path: Path) -> None:
    refused = "vllm serve: error: unrecognized arguments: --num-scheduler-steps 8 --frobnicate hush"
    found = finding(failed(tmp_path, [refused]), "startup_failed")
    said = [proposal.text for proposal in found.proposals if "diag lint" in proposal.text]
    assert {text.split(".")[0] for text in said} == {
        "diag lint says --num-scheduler-steps was removed: 0",
        "diag lint says --frobnicate: no vLLM release has this flag",
    }
    assert "hush" not in markdown.render(judged(str(tmp_path)))


def test_of_the_word_serve_the_kind_of_failure_says_more_than_lint(tmp_path: Path) -> None:
    found = finding(failed(tmp_path, ["vllm: error: unrecognized arguments: serve /models/tiny"]), "startup_failed")
    texts = [proposal.text for proposal in found.proposals]
    assert not [text for text in texts if "diag lint" in text]
    assert "leave `vllm serve` out" in terminal.render(
        failed(tmp_path / "told", ["vllm: error: unrecognized arguments: serve /models/tiny"])
    ).replace("\n              ", " ")


def test_lint_reports_nothing_for_a_valid_command(tmp_path: Path) -> None:
    found = finding(failed(tmp_path, of_engine("ValueError: bad"), "vllm serve m --max-num-seqs 8"), "startup_failed")
    assert not [proposal for proposal in found.proposals if "diag lint" in proposal.text]


REMOVED = "--swap-space 4 --num-scheduler-steps 8 --use-v2-block-manager --enable-reasoning --cuda-graph-sizes 64"


def test_every_removed_flag_of_the_line_is_named_and_dropped(tmp_path: Path) -> None:
    refused = f"vllm serve: error: unrecognized arguments: {REMOVED}"
    launch = f"vllm serve m {REMOVED} --seed 1"
    named = " ".join(terminal.render(failed(tmp_path / "known", [refused], launch)).split())
    assert all(f"remove {flag}" in named for flag in REMOVED.split() if flag.startswith("--"))
    found = finding(failed(tmp_path / "relaunch", [refused], launch), "startup_failed")
    assert found.relaunch == "vllm serve m --seed 1 --max-cudagraph-capture-size 64"
    line_alone = finding(failed(tmp_path / "line", [refused]), "startup_failed").proposals
    (text,) = [proposal.text for proposal in line_alone if "diag lint" in proposal.text]
    assert all(flag in text for flag in REMOVED.split() if flag.startswith("--"))


STATS = (
    "(APIServer pid=1) INFO 11-21 03:{minute:02}:00 [loggers.py:257] Engine 000: Avg prompt throughput: 500.0 tokens/s,"
    " Avg generation throughput: 900.0 tokens/s, Running: 5 reqs, Waiting: 0 reqs, GPU KV cache usage: 10.0%"
)
TEMPLATE = (
    "Error in chat completion",
    "Traceback (most recent call last):",
    '  File "/opt/vllm/vllm/entrypoints/openai/serving_chat.py", line 400, in create_chat_completion',
    "jinja2.exceptions.UndefinedError: 'dict object' has no attribute 'content'",
)


def beside_a_log(
    folder: Path, lines: Sequence[str], until: float, failing: float = 0.0, reason: str = "refused"
) -> Report:
    """A server whose page answers until some second of fifteen minutes, and counts so many HTTP 500 a second."""
    *_, (_, _, page) = rewriting.scrapes("healthy")
    page = rewriting.with_value(page, "process_start_time_seconds", f"{STARTED}")
    counted = "\n".join(line for line in page.splitlines() if not line.startswith("http_requests_total"))
    answers = 'http_requests_total{{handler="/v1/completions",method="POST",status="{}"}} {}'
    pages = (
        (
            at,
            "h:8000",
            "\n".join([counted, answers.format("2xx", 9 * t), answers.format("5xx", failing * t), ""]) * (t < until),
        )
        for t, at in ((t, STARTED + t) for t in range(15, 900, 15))
    )
    rewriting.write(folder, pages)
    stored = gzip.decompress((folder / "metrics.prom.gz").read_bytes())
    (folder / "metrics.prom.gz").write_bytes(gzip.compress(stored.replace(b" refused\n", f" {reason}\n".encode())))
    begun = [ARGS + "{}", "(APIServer pid=1) INFO 11-21 03:00:09 [api_server.py:1346] Starting vLLM server on :8000"]
    stats = [STATS.format(minute=minute) for minute in range(1, int(until // 60))]
    (folder / "server.log").write_text("\n".join([*begun, *stats, *lines]) + "\n", encoding="utf-8")
    return judged(str(folder))


def test_failing_requests_are_told_by_the_exception_in_their_log(tmp_path: Path) -> None:
    head = "(APIServer pid=1) ERROR 11-21 03:14:00 [serving_chat.py:420] "
    answer = 'INFO:     10.0.0.5:3300 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'
    failing = finding(
        beside_a_log(tmp_path, [*(head + line for line in TEMPLATE), answer], 900, failing=9), "requests_failing"
    )
    assert [quote.text for quote in failing.quotes] == [TEMPLATE[-1]]
    assert failing.failure is not None


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        (
            ["Fatal Python error: Bus error", "", "Thread 0x7f (most recent call first):"],
            "Fatal Python error: Bus error",
        ),
        ([], ""),
    ],
)
def test_a_death_is_told_by_the_last_lines_of_its_log(tmp_path: Path, lines: Sequence[str], quoted: str) -> None:
    """A native crash is told by nothing behind it; a log without a reason is quoted where it ends, not asked for."""
    dead = finding(beside_a_log(tmp_path, lines, 600), "engine_dead")
    assert [quote.text for quote in dead.quotes] == [quoted] * bool(quoted)
    texts = [proposal.text for proposal in dead.proposals]
    assert any("names no reason" in text and "throughput" in text for text in texts) is not bool(quoted)
    assert not any(text.startswith("Read the last lines") for text in texts)


def test_a_page_that_is_late_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    (why,) = beside_a_log(tmp_path, [], 600, reason="timed out").not_judged
    assert "Its log, its processes" in why.why
    assert "Its log ends at 03:09:00 UTC: Engine 000: Avg prompt throughput" in why.why
