"""A report quotes the line of the log that decides, says where it stands, and proposes what that line asks for."""

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
