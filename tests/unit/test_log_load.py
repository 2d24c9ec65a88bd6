"""A log's stats lines and access log are samples: the incidents of load, of silence and of failing answers."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.cli import diag
from support.reports import judged_logs as judged

from diag.core.errors import Unreachable
from diag.diagnosis.report import Report
from diag.knowledge.other_engines import program_of_log, program_of_models, program_of_page
from diag.log.load import AnswerCounts, counted
from diag.log.parse_line import AnsweredRequest, Line
from diag.report import terminal
from diag.sources.logs import fitting_zone

BEGAN = datetime(2026, 11, 20, 3, tzinfo=UTC)
READY = ["INFO:     Started server process [1]", "INFO:     Application startup complete."]
HEALTH = 'INFO:     10.0.0.9:51230 - "GET /health HTTP/1.1" 200 OK'
STATS = {
    "0.8.5": "Engine 000: Avg prompt throughput: {p:.1f} tokens/s, Avg generation throughput: {g:.1f} tokens/s, "
    "Running: {r} reqs, Waiting: {w} reqs, GPU KV cache usage: {k:.1f}%, Prefix cache hit rate: 0.0%",
    "0.33.0": "Engine 000: Avg prompt throughput: {p:.1f} tokens/s, Avg generation throughput: {g:.1f} tokens/s, "
    "Running: {r} reqs, Waiting: {w} reqs, Deferred: 0 reqs, GPU KV cache usage: {k:.1f}%",
}
FORMS = pytest.mark.parametrize("form", STATS)


def at(second: float) -> str:
    return f"{BEGAN + timedelta(seconds=second):%m-%d %H:%M:%S}"


def post(status: int = 200) -> str:
    return f'INFO:     10.0.0.7:41230 - "POST /v1/chat/completions HTTP/1.1" {status} OK'


def stats(second: float, p: float, g: float, r: int, w: int, form: str = "0.33.0", k: float = 3.2) -> str:
    return f"INFO {at(second)} [loggers.py:271] {STATS[form].format(p=p, g=g, r=r, w=w, k=k)}"


def busy(start: int, end: int, form: str = "0.33.0") -> Iterator[str]:
    """Yield the lines of a server at work, with a probe every ten seconds."""
    for second in range(start, end, 10):
        yield from (post(), HEALTH, stats(second, 30.5, 345.2, 2, 0, form))


def report_on(folder: Path, lines: list[str]) -> Report:
    file = folder / "server.log"
    head = [
        f"INFO {at(0)} [api_server.py:1272] vLLM API server version 0.33.0",
        f"(EngineCore pid=88) INFO {at(1)} [core.py:114] Initializing a V1 LLM engine (v0.33.0) with config: model='m'",
        *READY,
    ]
    file.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return judged(file)


def incidents(report: Report) -> list[str]:
    return [finding.diagnosis.incident.id for finding in report.present]


@FORMS
def test_zero_tokens_with_requests_running_are_a_stall(tmp_path: Path, form: str) -> None:
    lines = [*busy(30, 110, form), *(stats(second, 0, 0, 2, 0, form) for second in range(110, 330, 10))]
    report = report_on(tmp_path, lines)
    assert incidents(report)[0] == "engine_stalled"
    assert report.verdict == "critical"


@FORMS
def test_silence_behind_a_line_of_zero_tokens_is_a_stall_while_probes_are_answered(tmp_path: Path, form: str) -> None:
    report = report_on(tmp_path, [*busy(30, 110, form), stats(110, 0, 0, 2, 0, form), *[HEALTH] * 40])
    assert incidents(report)[0] == "engine_stalled"


def test_waits_for_a_rank_fill_the_silence(tmp_path: Path) -> None:
    waits = [
        f"INFO {at(110 + 60 * minute)} [shm_broadcast.py:681] No available shared memory broadcast block found in 60"
        " seconds."
        for minute in range(1, 8)
    ]
    report = report_on(tmp_path, [*busy(30, 110), stats(110, 0, 0, 1, 0), *waits])
    assert report.verdict == "critical"


def test_ranks_that_compile_at_a_start_do_not_stall_once_it_serves(tmp_path: Path) -> None:
    config = "config: model='m', tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1"
    wait = "[shm_broadcast.py:705] No available shared memory broadcast block found in 60 seconds."
    lines = [
        f"(EngineCore pid=88) INFO {at(1)} [core.py:114] Initializing a V1 LLM engine (v0.33.0) with {config}",
        *(f"(EngineCore pid=88) INFO {at(second)} {wait}" for second in (70, 130)),
        f"(APIServer pid=1) INFO {at(160)} [launcher.py:46] Route: /health, Methods: GET",
        *READY,
        stats(170, 0, 0.1, 1, 0),
        stats(180, 0, 0, 1, 0),
        *busy(240, 300),
    ]
    (tmp_path / "server.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert judged(tmp_path / "server.log").verdict == "no_incident"


def test_silence_behind_a_prefill_is_neither_a_stall_nor_a_pass(tmp_path: Path) -> None:
    """The usage of the KV cache has risen since the line before: the engine worked until then; after it is unknown."""
    report = report_on(tmp_path, [*busy(30, 110), stats(110, 0, 0, 1, 0, k=4.1), *[HEALTH] * 40])
    assert (report.verdict, incidents(report)) == ("unknown", [])


@FORMS
def test_idle_silence_is_no_stall(tmp_path: Path, form: str) -> None:
    report = report_on(tmp_path, [*busy(30, 110, form), stats(110, 0, 0, 0, 0, form), *[HEALTH] * 60])
    assert report.verdict == "no_incident"


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        [stats(110, 0, 0, 1, 0), *busy(120, 200)],  # a long prefill
        [stats(110, 0, 0, 1, 0, k=4.1), *busy(300, 400)],  # one of three minutes, whose chunks fill the KV cache
        [stats(110, 300, 900, 16, 40), stats(120, 300, 900, 16, 20), *busy(130, 400)],  # a burst
        [f"INFO {at(4000)} [launcher.py:46] Route: /health, Methods: GET"],  # a line was due and did not come
        [stats(110, 0, 0, 0, 0), *busy(8000, 8100)],  # two hours without a request
    ],
)
def test_a_healthy_end_is_not_called_ill(tmp_path: Path, end: list[str]) -> None:
    assert report_on(tmp_path, [*busy(30, 110), *end]).verdict == "no_incident"


@pytest.mark.slow
@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (8, 8), (0, 3)])
def test_a_log_that_ends_with_requests_and_no_token_does_not_tell(tmp_path: Path, running: int, waiting: int) -> None:
    """Ten seconds without a token are a hang or a long prefill, and no line would come in either case."""
    queue = [stats(second, 300, 900, 8, 8) for second in range(30, 330, 10)]
    report = report_on(tmp_path, [*queue, stats(330, 0, 0, running, waiting)])
    assert report.verdict == "unknown"
    assert f"{running} running, {waiting} waiting, 0 tokens/s" in report.not_judged[0].why
    later = [f"INFO {at(second)} [x.py:1] -" for second in range(340, 460, 10)]  # the two minutes that the reason names
    assert incidents(report_on(tmp_path, [*queue, stats(330, 0, 0, running, waiting), *later]))


SPECULATED = (  # as vLLM 0.32 and 0.33 print them
    "SpecDecoding metrics: Mean acceptance length: {mean}, Accepted throughput: 6.00 tokens/s, Drafted throughput: "
    "120.00 tokens/s, Accepted: {accepted} tokens, Drafted: 1200 tokens, Per-position acceptance rate: {rates}, Avg "
    "Draft acceptance rate: 5.0%"
)
NIXL = (
    "KV Transfer metrics: Num successful transfers=0, Avg xfer time (ms)=0, P90 xfer time (ms)=0, Avg post time (ms)=0,"
    " P90 post time (ms)=0, Avg MB per transfer=0, Throughput (MB/s)=0, Avg number of descriptors=0, "
    "Num failed transfers={failed}, Num KV expired reqs=0, Num notifs after expiry=0"
)
TIERS = "KV Transfer metrics: vllm:kv_offload_store_bytes=65536"
CASCADES = TIERS + ", vllm:kv_offload_tiering_cascade_job_failures:('fs',)=9"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "hours", "expected"),
    [
        (SPECULATED.format(mean="1.15", accepted=60, rates="0.100, 0.040, 0.010"), 7, ["speculation_ineffective"]),
        (SPECULATED.format(mean="3.25", accepted=900, rates="0.900, 0.750, 0.600"), 7, []),
        (NIXL.format(failed=7), 0.1, ["kv_transfer_failing"]),
        (NIXL.format(failed=0), 0.1, []),
        (CASCADES, 0.2, ["kv_offload_failing"]),
        (TIERS, 0.2, []),
    ],
)
def test_lines_behind_the_stats_line_are_counters(tmp_path: Path, text: str, hours: float, expected: list[str]) -> None:
    lines = [
        line
        for second in range(30, int(3600 * hours), 10)
        for line in (post(), stats(second, 30.5, 345.2, 2, 0), f"INFO {at(second)} [metrics.py:103] {text}")
    ]
    assert incidents(report_on(tmp_path, lines)) == expected


def test_what_a_line_counts_is_named_as_on_the_page() -> None:
    """Lines of a MultiConnector print dictionaries, those of Mooncake's store operations, of drafts positions."""
    lines = (
        "KV Transfer metrics: NixlConnector={'Num successful transfers': 5, 'Num failed transfers': 2, 'Num KV expired "
        "reqs': 0, 'Num notifs after expiry': 1}, MooncakeStoreConnector={'get_total_keys': 8, 'get_failed_keys': 3, "
        "'save_put_total_keys': 2, 'save_put_failed_keys': 0}",
        SPECULATED.format(mean="1.15", accepted=60, rates="0.100, 0.040, 0.010"),
    )
    found: dict[tuple[str, str], float] = {}
    for name, position, count in (each for line in lines for each in counted(line)):
        found[name, position] = found.get((name, position), 0) + round(count, 1)
    assert found == {
        ("vllm:nixl_xfer_time_seconds_count", ""): 5,
        ("vllm:nixl_num_failed_transfers_total", ""): 2,
        ("vllm:nixl_num_kv_expired_reqs_total", ""): 0,
        ("vllm:nixl_num_notifications_after_expiry_total", ""): 1,
        ("vllm:mooncake_store_operation_keys_total", ""): 10,
        ("vllm:mooncake_store_operation_failed_keys_total", ""): 3,
        ("vllm:spec_decode_num_accepted_tokens_total", ""): 60,
        ("vllm:spec_decode_num_draft_tokens_total", ""): 1200,
        ("vllm:spec_decode_num_drafts_total", ""): 400,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): 40,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 16,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"): 4,
    }


def test_load_is_not_claimed_where_nothing_moves(tmp_path: Path) -> None:
    full = [stats(second, 12, 80, 8, 20, k=97.0) for second in range(30, 630, 10)]
    assert report_on(tmp_path, [*full, stats(630, 0, 0, 8, 20, k=97.0)]).verdict == "unknown"


def test_a_crash_before_hours_of_idleness_is_over(tmp_path: Path) -> None:
    died = f"ERROR {at(120)} [async_llm.py:708] vllm.v1.engine.exceptions.EngineDeadError: EngineCore died."
    again = [f"INFO {at(180)} [api_server.py:1272] vLLM API server version 0.33.0", *READY]
    idle = [*busy(200, 300), stats(300, 0, 0, 0, 0)]
    assert report_on(tmp_path, [*busy(30, 110), died, *again, *idle, *busy(8000, 8100)]).verdict == "no_incident"


@pytest.mark.slow
@FORMS
def test_a_queue_for_an_hour_is_one(tmp_path: Path, form: str) -> None:
    report = report_on(tmp_path, [stats(second, 12, 5.4, 1, 14, form) for second in range(30, 3630, 10)])
    assert incidents(report)[0] == "queue_saturation"


def test_a_full_kv_cache_is_one_of_two_incidents_because_no_release_logs_preemptions(tmp_path: Path) -> None:
    report = report_on(tmp_path, [stats(second, 12, 80, 8, 20, k=97.0) for second in range(30, 630, 10)])
    assert report.verdict == "warning"
    assert {each.diagnosis.incident.id for each in report.health.suspects} == {
        "kv_pool_saturated",
        "kv_eviction_cascade",
    }


def test_load_is_over_when_the_server_was_stopped(tmp_path: Path) -> None:
    queue = [stats(second, 12, 5.4, 1, 14) for second in range(30, 630, 10)]
    stop = ["INFO:     Shutting down", "INFO:     Application shutdown complete."]
    assert report_on(tmp_path, [*queue, *stop]).verdict == "no_incident"


def test_load_is_over_while_the_server_is_off(tmp_path: Path) -> None:
    """The next server starts ten minutes after an orderly shutdown."""
    still = [*busy(10, 120), stats(120, 0.0, 0.0, 1, 0)]
    off = [
        "INFO:     Shutting down",
        "INFO:     Application shutdown complete.",
        "INFO:     Finished server process [1]",
    ]
    again = [f"INFO {at(720)} [api_server.py:1272] vLLM API server version 0.33.0"]
    report = report_on(tmp_path, [*still, *off, *again, *READY, *busy(750, 900)])
    assert "engine_stalled" not in incidents(report)


@pytest.mark.parametrize(("running", "is_stalled"), [(1, False), (2, True)])
def test_a_request_whose_client_gave_up_does_not_run(tmp_path: Path, running: int, is_stalled: bool) -> None:
    aborted = f"INFO {at(125)} [async_llm.py:431] Request chatcmpl-9 aborted."
    probes = [line for second in range(130, 330, 10) for line in (HEALTH, f"INFO {at(second)} [x.py:1] -")]
    report = report_on(tmp_path, [*busy(10, 120), stats(120, 0.0, 0.0, running, 0), aborted, *probes])
    assert ("engine_stalled" in incidents(report)) == is_stalled


RANKS_WAIT = "shm_broadcast.py:681] No available shared memory broadcast block found in 60 seconds. This typically"


def waits(second: int, process: str = "EngineCore pid=88") -> str:
    return f"({process}) INFO {at(second)} [{RANKS_WAIT}"


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ([*busy(10, 60), waits(120), waits(180)], "unknown"),
        ([post(), waits(120), HEALTH], "unknown"),
        ([*busy(10, 60), waits(120, "EngineCore_DP0 pid=9")], "unknown"),
        ([*busy(10, 60), waits(120), *busy(130, 160)], "no_incident"),
        ([*busy(10, 60), stats(60, 0.0, 0.0, 0, 0), waits(120, "Worker_TP1 pid=90")], "no_incident"),
    ],
    ids=[
        "no token after it",
        "no stats line",
        "a process that had logged nothing",
        "tokens after it",
        "an idle worker",
    ],
)
def test_ranks_that_wait_for_each_other_are_no_pass(tmp_path: Path, lines: list[str], verdict: str) -> None:
    report = report_on(tmp_path, lines)
    assert report.verdict == verdict
    assert any("ranks of its engine wait" in each.why for each in report.not_judged) == (verdict == "unknown")


@pytest.mark.parametrize(
    ("process", "minutes", "verdict"),
    [("EngineCore pid=88", 7, "critical"), ("EngineCore pid=88", 5, "unknown"), ("EngineCore pid=9", 7, "unknown")],
    ids=["longer than vLLM gives a step", "as long", "a process that had logged nothing"],
)
def test_ranks_that_wait_behind_a_chunk_of_a_prompt(tmp_path: Path, process: str, minutes: int, verdict: str) -> None:
    lines = [waits(110 + 60 * minute, process) for minute in range(1, minutes + 1)]
    report = report_on(tmp_path, [*busy(30, 110), stats(110, 0, 0, 1, 0, k=4.1), *lines])
    assert (report.verdict, "engine_stalled" in incidents(report)) == (verdict, verdict == "critical")


def test_a_torn_stats_line_is_no_crash(tmp_path: Path) -> None:
    torn = stats(120, 30.5, 345.2, 2, 0).replace("30.5 tokens", "30.5.1 tokens")
    assert incidents(report_on(tmp_path, [*busy(10, 120), torn])) == []


def test_refused_grammars_are_their_own_incident(tmp_path: Path) -> None:
    lines = []
    for request in range(6):
        head = f"(EngineCore pid=88) ERROR {at(60 + 5 * request)} [scheduler.py:1505] "
        lines += [f"{head}Unexpected: grammar rejected tokens [198] for request chatcmpl-{request}.", post(500)]
    assert incidents(report_on(tmp_path, lines))[0] == "structured_output_failing"


def test_failing_answers_at_the_end_are_an_incident_with_their_exception(tmp_path: Path) -> None:
    failure = ["ERROR:    Exception in ASGI application", "Traceback (most recent call last):"]
    failure += ['  File "/x/site-packages/vllm/entrypoints/openai/serving.py", line 61, in create_chat_completion']
    failure += ["TypeError: glm is not a multimodal model", post(500)]
    report = report_on(tmp_path, [*busy(30, 60), *failure * 3])
    assert incidents(report) == ["requests_failing"]
    assert report.present[0].failure is not None
    assert "Have the clients" in report.present[0].failure.do
    assert "failed share of answers" in terminal.render(report, verbose=True)


def test_answers_behind_a_text_without_an_end_clear_nobody() -> None:
    """Imitated refusals accuse no more than true ones; a success that may be imitated decides nothing."""
    counts = AnswerCounts()

    def row(status: str, times: int, is_doubted: bool) -> float:
        for _ in range(times):
            counts.count(AnsweredRequest("POST", "/v1/completions", status, True), 0.0, is_doubted)
        rows = {labels: value for name, labels, value in counts.samples() if name.endswith("in_a_row")}
        return rows["current",]

    assert row("401", 12, False) == 12
    assert row("401", 2, True) == 14
    assert row("200", 1, True) == 14
    assert row("401", 5, True) == 14
    assert row("401", 1, False) == 15
    assert row("200", 1, False) == 0


def test_a_few_failed_answers_among_many_are_none(tmp_path: Path) -> None:
    assert report_on(tmp_path, [*busy(30, 60), *[post(500)] * 3, *[post()] * 30]).verdict == "no_incident"


def test_a_kernel_line_names_the_process_that_vanished(tmp_path: Path) -> None:
    killed = "Out of memory: Killed process 702 (VLLM::Worker_TP) total-vm:923423kB, anon-rss:412332kB"
    died = (
        f"(EngineCore pid=88) ERROR {at(125)} [multiproc_executor.py:284] Worker proc VllmWorker-0 died unexpectedly,"
    )
    report = report_on(tmp_path, [*busy(30, 120), killed, f"{died} shutting down executor."])
    assert report.present[0].failure is not None
    assert report.present[0].failure.id == "kernel_killed_for_memory"
    assert report.present[0].basis == "named by the error"


def test_a_kernel_line_of_another_day_ends_no_server(tmp_path: Path) -> None:
    killed = "Nov 18 03:12:44 node kernel: Out of memory: Killed process 702 (python3) total-vm:923423kB"
    died = (
        f"(EngineCore pid=88) ERROR {at(125)} [multiproc_executor.py:284] Worker proc VllmWorker-0 died unexpectedly,"
    )
    report = report_on(tmp_path, [killed, *busy(30, 120), f"{died} shutting down executor."])
    failure = report.present[0].failure
    assert failure is None or "killed_for_memory" not in failure.id


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("2026-01-20T10:11:02.112233Z  INFO text_generation_launcher: Sharding model on 2 processes", "TGI"),
        ("[2026-09-01 10:00:00] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', tp_size=1)", "SGLang"),
        ("llama_model_loader: loaded meta data with 26 key-value pairs", "llama.cpp"),
        ('time=2026-09-01T10:00:00Z level=INFO source=routes.go:1205 msg="Listening on [::]:11434"', "Ollama"),
    ],
)
def test_a_log_of_another_engine_is_named_and_not_judged(tmp_path: Path, line: str, name: str) -> None:
    file = tmp_path / "server.log"
    file.write_text(f"{line}\ntorch.OutOfMemoryError: CUDA out of memory.\n", encoding="utf-8")
    with pytest.raises(Unreachable, match=name):
        judged(file)


FRAME = '  File "/usr/lib/python3.12/site-packages/{}", line 7, in forward'
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ([FRAME.format("sglang/srt/models/qwen3.py"), FRAME.format("sglang/srt/layers/x.py")], "SGLang"),
        (
            ["server_args=ServerArgs(model_path='m')", FRAME.format("sglang/srt/x.py"), FRAME.format("vllm/_ops.py")],
            "SGLang",
        ),
        (["it served for weeks on sglang.srt, node_exporter said", FRAME.format("vllm/v1/core.py")], ""),
        (["[TensorRT-LLM][ERROR] CUDA runtime error in x"], ""),
        (["python -m sglang.launch_server", "vllm: error: unrecognized arguments: --x"], ""),
        (["ollama serve was stopped, text-generation-launcher too"], ""),
    ],
)
def test_the_name_of_another_program_refuses_no_log(lines: list[str], name: str) -> None:
    assert program_of_log([*lines, OUT_OF_MEMORY]) == name


def test_a_page_of_models_names_its_program() -> None:
    owners = {owner: program_of_models(f'{{"id":"m","owned_by":"{owner}"}}'.encode()) for owner in ("vllm", "library")}
    assert owners == {"vllm": "", "library": "Ollama"}
    assert program_of_page(b"# TYPE go_info gauge\ngo_info 1\ngrafana_build_info 1\n")
    assert not program_of_page(b"# TYPE python_info gauge\npython_info 1\nhttp_requests_total 1\n")


def test_times_that_would_be_later_than_the_log_are_of_another_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.now(UTC)
    lines = [Line(1, f"INFO {now:%m-%d %H:%M:%S} [core.py:1] x")]
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        zone, notes = fitting_zone(lines, None, now.timestamp())
        old, none = fitting_zone(lines, None, now.timestamp() + 86_400)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert zone == UTC
    assert "read as UTC" in notes[0]
    assert (old, none) == (None, ())


def dump(second: float, reason: str = "feed timeout") -> str:
    file = "/d/VLLM_STACK_DUMP_for_engine_0_88.log"
    return f"(EngineCore pid=88) INFO {at(second)} [watch_dog.py:101] [Watchdog]Dumped stack to {file} due to {reason}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "verdict", "found"),
    [
        ((*busy(30, 110), dump(410)), "critical", ["engine_stalled"]),
        ((*busy(30, 110), dump(410), *busy(420, 1_500)), "no_incident", ["engine_stalled"]),
        ((*busy(30, 110), dump(410, "shutdown")), "no_incident", []),
        ((*busy(30, 110), stats(110, 1.0, 1.0, 0, 0), dump(410)), "no_incident", []),
    ],
    ids=["stalled", "over", "on request", "idle"],
)
def test_a_dump_of_the_watchdog_tells_that_the_silence_before_it_was_a_stall(
    tmp_path: Path, lines: tuple[str, ...], verdict: str, found: list[str]
) -> None:
    report = report_on(tmp_path, list(lines))
    assert (report.verdict, incidents(report)) == (verdict, found)


def fault(second: float, text: str, level: str = "WARNING") -> str:
    return f"(EngineCore pid=88) {level} {at(second)} [engine_core_sentinel.py:86] [FT] {text}"


def test_an_engine_that_waits_for_recovery_is_told_until_it_goes_on(tmp_path: Path) -> None:
    held = [*busy(30, 110), fault(112, "Busy loop raised RuntimeError. Waiting for recovery.")]
    report = report_on(tmp_path, held)
    assert (report.verdict, incidents(report)) == ("critical", ["engine_awaits_recovery"])
    recovered = report_on(tmp_path, [*held, fault(140, "Engine 0 status -> HEALTHY", "INFO"), *busy(150, 400)])
    assert incidents(recovered) == []


def test_the_traceback_of_a_request_alone_is_no_failed_start(tmp_path: Path) -> None:
    package, chain = "/x/site-packages/vllm", "The above exception was the direct cause of the following exception:"
    lines = ["Traceback (most recent call last):", '  File "/x/images.py", line 330, in infer_channel_dimension_format']
    lines += [
        "ValueError: Unable to infer channel dimension format",
        "",
        chain,
        "",
        "Traceback (most recent call last):",
    ]
    lines += [f'  File "{package}/v1/engine/async_llm.py", line 237, in add_request']
    lines += [f'  File "{package}/multimodal/processing.py", line 1808, in call_hf_processor']
    lines += ["ValueError: Failed to apply Llama4Processor on data={'text': '<|image|>'}"]
    path = tmp_path / "request.log"
    path.write_text("\n".join(lines) + "\n")
    ran = diag("doctor", str(path))
    assert ran.stdout.startswith("CANNOT TELL")
    assert "a request failed (line 10)" in ran.stdout
