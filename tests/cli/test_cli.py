"""The commands as a user types them: what is printed, where, and the exit status."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from support import rewriting
from support.bad_servers import Answer, Reply, Server, hang, on_metrics, serving, talking
from support.cli import CASCADE, DIAG, diag
from support.paths import ROOT

from diag.cli.app import app, main
from diag.commands import doctor, observe
from diag.commands.explain import run
from diag.commands.observe import ObserveOptions

STILL = b"".join(
    b'vllm:%s{engine="0",model_name="m"} %d\n' % (name, value)
    for name, value in (
        (b"num_requests_running", 1),
        (b"num_requests_waiting", 0),
        (b"kv_cache_usage_perc", 0),
        (b"generation_tokens_total", 7),
        (b"prompt_tokens_total", 7),
        (b"request_success_total", 1),
    )
)
IDLE = STILL.replace(b'running{engine="0",model_name="m"} 1', b'running{engine="0",model_name="m"} 0')


@pytest.mark.parametrize(
    ("recording", "status"),
    [
        ("healthy", 0),
        ("idle", 0),
        ("prefix_unique", 0),
        ("queue_saturation", 1),
        ("kv_cascade", 2),
        ("startup_hang", 3),
    ],
)
def test_the_exit_status_is_the_verdict(recording: str, status: int) -> None:
    assert diag("doctor", f"tests/recordings/{recording}").returncode == status


@pytest.mark.parametrize(
    ("recording", "fail_on", "status"),
    [
        ("queue_saturation", "warning", 1),
        ("queue_saturation", "critical", 0),
        ("kv_cascade", "critical", 2),
        ("kv_cascade", "never", 0),
        ("startup_hang", "critical", 3),
        ("startup_hang", "never", 0),
    ],
)
def test_fail_on_sets_the_lowest_failing_verdict(recording: str, fail_on: str, status: int) -> None:
    assert diag("doctor", f"tests/recordings/{recording}", "--fail-on", fail_on).returncode == status


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["doctor"], 69, "cannot connect to http://127.0.0.1:8000: connection refused"),
        (["doctor", CASCADE, "--nonsense"], 64, "No such option: --nonsense"),
        (["doctor", CASCADE, "--json", "--markdown"], 64, "exclude each other: choose one"),
        (["doctor", CASCADE, "--quiet", "--json"], 64, "--quiet prints line 1 only"),
        (["doctor", CASCADE, "--stacks"], 64, "--stacks reads the processes of a server on this host"),
        (["doctor", CASCADE, CASCADE], 64, "a recording is diagnosed alone"),
        (["doctor", CASCADE, "--fail-on", "often"], 64, "--fail-on"),
        (["doctor", CASCADE, "--incidents", "nowhere"], 64, "nowhere: not a folder"),
        (
            ["doctor", CASCADE, "--contract", "nowhere.toml"],
            64,
            "nowhere.toml cannot be read: No such file or directory",
        ),
        (["doctor", "ftp://host/metrics"], 64, "ftp"),
        (["doctor", "127.0.0.1:1"], 69, "connection refused"),
        (["doctor", "tests"], 64, "diag record"),
        (
            ["explain", "kv_evictoin"],
            64,
            "no incident, signal, lint rule, check or vLLM flag 'kv_evictoin' (did you mean kv_eviction_cascade?)",
        ),
        (["doctor", "./nowhere"], 64, "./nowhere does not exist: name the folder of a recording, or a URL"),
        (["doctor", "two..dots:8000"], 64, "two..dots:8000 has no valid host name"),
        (["config", "/nowhere"], 64, "/nowhere does not exist"),
        (["nonsense"], 64, "nonsense"),
        (["record", "127.0.0.1:1", "tests"], 64, "already exists"),
    ],
)
def test_bad_input_is_one_sentence_and_a_status(words: list[str], status: int, sentence: str) -> None:
    done = diag(*words)
    assert done.returncode == status
    assert sentence in done.stderr
    assert done.stderr.count("\n") == (5 if words == ["doctor"] else 1)  # with what it can be given
    assert not done.stdout


def test_without_a_command_diag_prints_its_help() -> None:
    done = diag()
    assert (done.returncode, done.stdout, done.stderr) == (0, diag("--help").stdout, "")
    assert "doctor" in done.stdout


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("kv", {"kv_eviction_cascade", "kv_pool_saturated", "kv_cache_filling", "kv_budget_too_small"}),
        ("sats", {"kv_pool_saturated", "queue_saturation"}),
        ("KV-pool", {"kv_pool_saturated", "kv_pool_undersized"}),
        ("engine_daed", {"engine_dead"}),
        ("zebra", set()),
    ],
)
def test_mistyped_id_is_answered_with_similar_ids(name: str, close: set[str]) -> None:
    said = diag("explain", name).stderr
    offered = set(said.partition("did you mean ")[2].partition("?")[0].split(", ")) - {""}
    assert offered >= close
    assert bool(offered) is bool(close)


def test_v_is_verbose_and_q_is_the_first_line() -> None:
    short, verbose, quiet = (diag("doctor", CASCADE, *option).stdout for option in ([], ["-v"], ["-q"]))
    assert verbose == diag("doctor", CASCADE, "--verbose").stdout != short
    assert quiet == diag("doctor", CASCADE, "--quiet").stdout == short.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("incident", "state", "row"),
    [
        ("kv_eviction_cascade", "present, ongoing since", "symptom   preemptions / finished request"),
        ("queue_saturation", "absent: KV cache usage with one more request is 93.9 %, not <= 90 %", "does not hold"),
        ("host_memory_exhausted", "unknown: host memory running out is not measured", "not measured"),
    ],
)
def test_why_prints_each_condition_with_its_outcome(incident: str, state: str, row: str) -> None:
    done = diag("doctor", CASCADE, "--why", incident)
    first, *rows = done.stdout.splitlines()
    assert done.returncode == 2
    assert state in " ".join(done.stdout.split())
    assert first.startswith(f"{incident} on 127.0.0.1:8101")
    assert any(row in line for line in rows)


def test_debug_log_names_sources_collectors_requests_and_queries_but_no_credentials() -> None:
    with serving(on_metrics(Reply(IDLE))) as server:
        url = server.url.replace("http://", "http://user:SECRET@")
        command = [DIAG, "doctor", url, "--for", "1", "--every", "0.5", "--log-level", "debug"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    logged = re.findall(r"^\d\d:\d\d:\d\d\.\d{3} diag(?:\.exporter)?: (\w+) .*: \d+\.\d ms$", done.stderr, re.MULTILINE)
    assert {"source", "collector", "request", "query"} <= set(logged)
    assert "SECRET" not in done.stderr + done.stdout
    assert "query" not in diag("doctor", CASCADE).stderr


@pytest.mark.parametrize("slashes", ["//", "/"])
@pytest.mark.parametrize(
    "words",
    [
        *(
            ("doctor", "{}"),
            ("doctor", "{}", "{}"),
            ("doctor", CASCADE, "--baseline", "{}"),
            ("explain", "{}"),
            ("{}",),
        ),
        *(("doctor", CASCADE, "--contract", "{}"), ("doctor", CASCADE, "--incidents", "{}"), ("replay", "{}")),
        *(("doctor", CASCADE, "--html", "{}"), ("replay", CASCADE, "--log", "{}"), ("mcp", "--recordings", "{}")),
        *(("ramp", "http://127.0.0.1:1", "--results", "{}"), ("exporter", "--web-config", "{}"), ("lint", "{}")),
        *(("budget", "{}"), ("doctor", "--prometheus", "{}"), ("doctor", "--k8s", "{}"), ("doctor", "--{}")),
        *(("record", "{}", "out"), ("baseline", "save", CASCADE, "--file", "{}"), ("config", "{}")),
    ],
    ids=" ".join,
)
def test_no_error_shows_user_and_query_of_an_address_in_any_place(words: tuple[str, ...], slashes: str) -> None:
    address = f"https:{slashes}sekretuser:sekretpw@h.invalid/p?sig=sekretsig#sekretfragment"
    done = diag(*(word.format(address) for word in words))
    assert done.returncode not in (0, 70)
    assert re.findall("sekret[a-z]*", done.stderr + done.stdout) == []


@pytest.mark.parametrize("name", ["KUBECONFIG", "DIAG_HEADERS_FILE", "DIAG_CA_FILE", "DIAG_BEARER_TOKEN_FILE"])
def test_no_error_shows_the_user_of_an_address_in_the_environment(name: str) -> None:
    words = ("--k8s", "inference") if name == "KUBECONFIG" else ("https://h.invalid",)
    done = diag("doctor", *words, **{name: "https://u:sekret@h/p?sig=sekret"})
    assert "sekret" not in done.stderr
    assert "https:" in done.stderr


def test_why_names_an_incident_that_does_not_exist() -> None:
    done = diag("doctor", CASCADE, "--why", "kv_cascade")
    assert (done.returncode, done.stdout) == (64, "")
    assert "there is no incident 'kv_cascade'" in done.stderr


def test_json_is_written_only_to_standard_output() -> None:
    done = diag("doctor", CASCADE, "--json")
    assert json.loads(done.stdout)["verdict"] == "critical"
    assert not done.stderr


def test_piped_output_has_no_colour() -> None:
    done = diag("doctor", CASCADE)
    assert "\x1b" not in done.stdout
    assert not done.stderr


def at_a_terminal(*words: str, **environment: str) -> str:
    """Return the output on a terminal: escapes included, line ends as in a file."""
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONUTF8": "1", "PAGER": "cat", **environment}
    script = ["script", "-qec", shlex.join([DIAG, *words]), "/dev/null"]
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    return done.stdout.replace("\r\n", "\n")


def test_terminal_output_has_colour_unless_no_color_is_set() -> None:
    assert "\x1b[1;31mCRITICAL" in at_a_terminal("doctor", CASCADE)
    assert "\x1b[1;31m" not in at_a_terminal("doctor", CASCADE, NO_COLOR="1")


def test_explain_lays_a_page_out_on_a_terminal() -> None:
    page = at_a_terminal("explain", "kv_eviction_cascade")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", page)
    assert plain != page
    assert re.search(r"(?m)^Is it real$", plain)
    assert "```" not in plain and "|---" not in plain
    assert "\n  instance_engine:preemptions_per_finished_request:5m > 0.2\n" in plain
    assert re.search(r"(?m)^  \$ promtool .{150,}'$", plain), "what is copied is not broken into lines"


def test_explain_uses_the_pager_and_respects_no_color() -> None:
    page = at_a_terminal("explain", "kv_eviction_cascade", PAGER="sed s/Meaning/Paged/", NO_COLOR="1")
    assert "Paged" in page and "Meaning" not in page
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", page)


def test_explain_without_its_pager_prints_the_page() -> None:
    assert "Meaning" in at_a_terminal("explain", "kv_eviction_cascade", PAGER="no-such-pager -x")


def test_explain_prints_markdown_on_a_terminal_on_request() -> None:
    runbook = (ROOT / "runbooks" / "kv_eviction_cascade.md").read_text(encoding="utf-8")
    assert at_a_terminal("explain", "kv_eviction_cascade", "--markdown").startswith(runbook)


def test_a_diagnosis_is_one_thread_however_many_cores_there_are() -> None:
    """NumPy would start more for matrices, which nothing here has."""
    counted = "import atexit, os; atexit.register(lambda: print(len(os.listdir('/proc/self/task'))))"
    program = f"{counted}; from diag.__main__ import main; main()"
    command = [sys.executable, "-c", program, "doctor", CASCADE, "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=False)
    assert done.stdout.splitlines()[-1] == "1"


def test_label_cannot_send_escape_sequences_to_the_terminal(tmp_path: Path) -> None:
    evil = "host\x1b[2J\x07:8000"
    page = 'vllm:num_requests_running{engine="\x1b[31m0\\n",model_name="m"} 1\n'
    text = "".join(f"# scrape {1795227337 + at} {evil}\n{page}" for at in range(40))
    (tmp_path / "metrics.prom").write_text(text, encoding="utf-8")
    for form in ([], ["--markdown"], ["--json"]):
        assert not {"\x1b", "\x07"} & set(diag("doctor", str(tmp_path), *form).stdout)


def test_reader_that_closes_the_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{DIAG} doctor {CASCADE} --json | head -c 1; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert not done.stderr


def test_the_slos_and_thresholds_of_a_diag_toml_are_used_and_named(tmp_path: Path) -> None:
    (tmp_path / "diag.toml").write_text("[contract]\nfreeze_seconds = 20.0\n", encoding="utf-8")
    file = str(tmp_path / "diag.toml")
    done = diag("doctor", "tests/recordings/contention_bigbatch", "--contract", file, "--json")
    assert done.returncode == 0
    slos = json.loads(done.stdout)["thresholds"]
    assert {f"stream pause threshold: 20 s ({file})", "TTFT SLO: 40 s (default)"} < {*slos}


def test_a_diag_toml_of_the_working_folder_is_named_in_the_report_that_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = "[limits.kv_eviction_cascade]\n'preemptions / finished request' = 9.0\n"
    (tmp_path / "diag.toml").write_text(limits, encoding="utf-8")
    recording = str(Path("tests/recordings/kv_cascade").resolve())
    monkeypatch.chdir(tmp_path)
    note = "diag.toml of this folder changes the thresholds: kv_eviction_cascade: preemptions / finished request = 9"
    for form in ((), ("--markdown",), ("--json",)):
        assert note in " ".join(diag("doctor", recording, *form).stdout.replace("\\_", "_").split()), form
    assert "of this folder" not in diag("doctor", recording, "--contract", str(tmp_path / "diag.toml")).stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[contract]\nfreze_seconds = 1\n", "has no key 'freze_seconds'"),
        ("[contract]\nfreeze_seconds = 'long'\n", "must be a number above 0"),
        ("[contract]\nfreeze_seconds = -1\n", "must be a number above 0"),
        ("contract = 3\n", "[contract] must be a table"),
        ("[contract\n", "is not valid TOML"),
    ],
)
def test_a_bad_contract_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "diag.toml").write_text(text, encoding="utf-8")
    done = diag("doctor", CASCADE, "--contract", str(tmp_path / "diag.toml"))
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert sentence in done.stderr


def test_a_users_incident_is_judged_too(tmp_path: Path) -> None:
    (tmp_path / "many_clients.py").write_text(
        "from diag.incident import Incident, judged\nfrom diag.signals import requests_waiting_median as waiting\n"
        "incident = Incident(id='many_clients', title='Many clients', severity='warning', per=('instance', 'engine'),\n"
        "    cause='', impact='they wait', symptoms=(waiting.above(5, judged('a test')),), looks_like=(), fixes=())\n",
        encoding="utf-8",
    )
    report = json.loads(diag("doctor", CASCADE, "--json", "--incidents", str(tmp_path)).stdout)
    assert ("many_clients", "present") in [
        (diagnosis["incident"], diagnosis["state"]) for diagnosis in report["diagnoses"]
    ]


COMMANDS = list(typer.main.get_command(app).commands)


def test_program_name_is_diag_for_every_entry_point() -> None:
    done = subprocess.run([sys.executable, "-m", "diag", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: diag [OPTIONS] COMMAND")


@pytest.mark.fast
def test_the_help_of_every_command(golden: Callable[[str, str], None]) -> None:
    golden(
        "options.txt",
        "\n".join(diag(*words, "--help", COLUMNS="80").stdout for words in ([], *([c] for c in COMMANDS))),
    )


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_the_help_fits_an_old_terminal_and_has_two_examples(command: list[str]) -> None:
    done = diag(*command, "--help", COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    examples = done.stdout.partition("\nExamples:\n")[2].splitlines()
    assert [line.split()[:2] for line in examples] == [["diag", *command]] * 2 if command else len(examples) == 4


def test_incidents_are_listed() -> None:
    assert "kv_eviction_cascade" in diag("incidents").stdout


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch.OutOfMemoryError", "- **gpu_out_of_memory"),
        ("kv_cache_usage_perc", "# vllm:kv_cache_usage_perc"),
        ("vllm:e2e_request_latency_seconds", "- incident contract_breached"),
        ("vllm:prompt_tokens_cached_by_source", "No incident of diag reads it."),
        ("VllmEngineStalled", "# VllmEngineStalled: Engine stalled"),
        ("VLLM_USE_DEEP_GEMM", "Set VLLM_USE_DEEP_GEMM=0"),
    ],
)
def test_explain_finds_what_a_person_pastes(text: str, found: str) -> None:
    page = run(text, None)
    assert found in page
    assert not re.search(r"\{\w+\}", page.split("```")[0])


def test_explain_prints_the_runbook() -> None:
    printed = diag("explain", "kv_eviction_cascade").stdout
    runbook, promql = printed.split("\n## Thresholds and PromQL\n\n")
    assert runbook == Path("runbooks/kv_eviction_cascade.md").read_text()
    assert promql in Path("runbooks/promql.md").read_text()


def test_a_shell_can_complete() -> None:
    done = diag(_DIAG_COMPLETE="complete_bash", COMP_WORDS="diag do", COMP_CWORD="1")
    assert done.stdout.split() == ["doctor"]


@pytest.mark.parametrize("words", ["diag explain kv_pool", "diag doctor --why kv_pool"])
def test_a_shell_completes_the_ids_of_incidents(words: str) -> None:
    done = diag(_DIAG_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    assert done.stdout.split() == ["kv_pool_saturated", "kv_pool_undersized"]


def primaries(report: dict[str, Any]) -> list[str]:
    return [diagnosis["incident"] for diagnosis in report["diagnoses"] if diagnosis["primary"]]


def replayed(recording: str) -> Answer:
    """A server whose page is, at each scrape, the recording's next one."""
    return on_metrics(*(Reply(page.encode()) for _, _, page in rewriting.scrapes(recording)))


def test_a_live_server_is_judged_as_its_recording_is() -> None:
    with serving(replayed("kv_cascade")) as server:
        done = diag("doctor", server.url, "--every", "0.1", "--for", "5", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 2
    assert report["observed"]["source"] == "scrape"
    assert primaries(report) == ["kv_eviction_cascade"]


def stopped_by_ctrl_c(server: Server, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command on that server, interrupted once it has scraped it 40 times: however busy this machine is."""
    arguments = [DIAG, command, server.url, *words, "--every", "0.1", "--for", "60"]
    with subprocess.Popen(arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while len(server.asked("/metrics")) < 40 and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, out, error)


def test_recording_has_the_verdict_of_the_live_server(tmp_path: Path) -> None:
    with serving(replayed("queue_saturation")) as server:
        kept = stopped_by_ctrl_c(server, "record", str(tmp_path / "kept"))
    assert kept.returncode == 0
    assert "scrapes, 0 failed; diagnose it with: diag doctor " in kept.stdout
    report = json.loads(diag("doctor", str(tmp_path / "kept"), "--json").stdout)
    assert primaries(report) == ["queue_saturation"]


def test_ctrl_c_judges_the_scrapes_so_far_with_a_note() -> None:
    with serving(replayed("kv_cascade")) as server:
        done = stopped_by_ctrl_c(server, "doctor")
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("CRITICAL  kv_eviction_cascade")
    assert "interrupted: only the scrapes until then were used" in done.stdout


def test_a_server_that_hangs_is_unreachable_in_one_sentence() -> None:
    with talking(hang) as server:
        done = diag("doctor", server.url, "--timeout", "0.5")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (69, "", 1)


def test_one_lone_request_that_does_not_move_is_watched_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "LONGEST_SCRAPING", 4.0)
    with serving(on_metrics(Reply(STILL))) as server:
        report = doctor.run(ObserveOptions([server.url], every=0.2, duration=1.0))
    assert report.observed.end - report.observed.start > 2, "a busy machine scrapes late, but not for 1 s only"
    assert [progress.state for progress in report.progress] == ["slow"]


def test_ctrl_c_before_the_first_scrape_ends_without_output() -> None:
    """A server that accepts and never answers: nothing to judge yet."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        silent.settimeout(60)
        process = subprocess.Popen([DIAG, "doctor", url, "--timeout", "30"], stderr=subprocess.PIPE, text=True)
        connection, _ = silent.accept()  # now it waits for an answer
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        connection.close()
    assert process.returncode == 130
    assert "Traceback" not in error


def test_a_defect_of_diag_is_one_sentence_without_values_and_has_an_exit_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> str:
        raise ValueError("s3cret")

    monkeypatch.setattr("diag.commands.explain.list_incidents", broken)
    monkeypatch.setattr("sys.argv", ["diag", "incidents"])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    assert stopped.value.code == 70
    assert re.fullmatch(r"diag: internal error: ValueError at diag/cli/app\.py:\d+ of diag \S+; [^\n]*\n", printed.err)
    assert "s3cret" not in printed.err
    assert not printed.out


@pytest.mark.parametrize("option", ["--every=nan", "--for=inf", "--timeout=nan", "--timeout=1e308"])
def test_invalid_time_is_refused(option: str) -> None:
    done = diag("doctor", CASCADE, option)
    assert done.returncode == 64
    assert option.partition("=")[0] in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_speed_that_is_no_number_is_refused() -> None:
    assert diag("replay", CASCADE, "--speed=nan").returncode == 64


@pytest.mark.parametrize("name", ["no.such.host.invalid", "no.such.host.invalid/monday", "my recording"])
def test_mistyped_recording_is_reported_as_a_missing_file(name: str) -> None:
    done = diag("doctor", name, "--for", "0")
    assert done.stderr.startswith(f"diag: there is no file or recording {name}; "), done.stderr


def test_mistyped_recording_in_a_folder_is_no_host_name() -> None:
    done = diag("doctor", "tests/recordings/kv_cascde")
    assert (done.returncode, done.stderr) == (
        64,
        "diag: tests/recordings/kv_cascde does not exist: name the folder of a recording, or a URL\n",
    )


@pytest.mark.parametrize("words", ["incidents", f"doctor {CASCADE} --json"])
def test_a_full_disk_is_no_defect(words: str) -> None:
    command = ["sh", "-c", f"{DIAG} {words} >/dev/full"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (64, "diag: standard output cannot be written: No space left on device\n")
