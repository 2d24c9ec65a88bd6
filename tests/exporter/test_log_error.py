"""The quoted line of a log is the one with the reason of a failed start or a death, and no other."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.paths import LOGS, RECORDINGS
from support.secrets import corpus, is_shown

from diag.log.parse_line import read_timed_lines
from diag.log.server_log import ServerLog
from diag.log.tail import FIRST, LAST, LogTail
from diag.log.trackers import MOST_TEXT

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
NAMES = ("event", "process", "file", "line", "text", "cause", "frames")
CORE = "(EngineCore_DP0 pid=68) ERROR 11-21 02:00:00 [core.py:936] "
API = "(APIServer pid=1) ERROR 11-21 02:00:01 [serving.py:500] "
DIES = "(APIServer pid=1) ERROR 11-21 02:00:01 [async_llm.py:906] "
BANNER = "(APIServer pid=1) INFO 11-21 01:59:00 [api_server.py:1] vLLM API server version 0.12.0"
READY = "INFO:     Application startup complete."
FAILED = [
    CORE + "EngineCore failed to start.",
    CORE + "Traceback (most recent call last):",
    CORE + '  File "a.py", line 1',
]
FATAL = [CORE + "EngineCore encountered a fatal error.", *FAILED[1:]]
DEAD = DIES + "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)"
ENTRY = '  File "/usr/bin/vllm", line 8, in <module>'
LAST_WORDS = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


def quote(state: ServerLog) -> dict[str, str] | None:
    found = [labels for name, labels, _ in state.samples(NOW) if name == "diag_vllm_log_error_timestamp_seconds"]
    assert len(found) <= 1
    return dict(zip(NAMES, found[0], strict=True)) if found else None


def fed(*lines: str) -> ServerLog:
    state = ServerLog(UTC, "server.log")
    for number, line in enumerate(lines, 1):
        state.feed(line, NOW, live=False, number=number)
    return state


def quoted(*lines: str) -> tuple[str, str] | None:
    """Text and cause."""
    found = quote(fed(*lines))
    return (found["text"], found["cause"]) if found else None


def text(*lines: str) -> str | None:
    found = quoted(*lines)
    return found[0] if found else None


# -- real logs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "line", "process", "event", "begins"),
    [
        (
            RECORDINGS / "startup_crash_blocksize16/server.log",
            "71",
            "Worker",
            "",
            "ValueError: No common block size for",
        ),
        (
            RECORDINGS / "fail_max_model_len/server.log",
            "62",
            "EngineCore",
            "max_model_len_exceeds_kv_cache",
            "ValueError: To serve at least one request",
        ),
        (RECORDINGS / "engine_dead/server.log", "250", "APIServer", "engine_dead", "[shutdown] MPClient: engine core"),
        (LOGS / "v1_0.8.5_no_kv_memory.log", "19", "", "no_kv_cache_memory", "ValueError: No available memory"),
        (
            LOGS / "v1_0.32.0_gpu_oom_under_load.log",
            "24",
            "EngineCore",
            "cuda_out_of_memory",
            "torch.OutOfMemoryError:",
        ),
    ],
    ids=lambda value: value.parent.name if isinstance(value, Path) else "",
)
def test_log_line_with_the_root_cause_is_quoted(path: Path, line: str, process: str, event: str, begins: str) -> None:
    state = ServerLog(UTC, str(path))
    for entry in read_timed_lines(path, UTC, NOW):
        state.feed(entry.text, entry.at, live=False, number=entry.number)
    found = quote(state)
    assert found is not None
    assert (found["line"], found["process"], found["event"], found["file"]) == (line, process, event, str(path))
    assert found["text"].startswith(begins)
    assert begins in path.read_text(encoding="utf-8").splitlines()[int(line) - 1] or event == "cuda_out_of_memory"


# -- how releases write it --------------------------------------------------------------------------------------------


def test_an_engine_of_0_6_logs_the_exception_as_the_headline_of_its_traceback() -> None:
    head = "ERROR 11-21 02:00:00 engine.py:389] "
    lines = [head + "Unexpected error", head + "Traceback (most recent call last):", head + '  File "a.py", line 1']
    assert text(
        *lines, head + "RuntimeError: no such device", "Traceback (most recent call last):", ENTRY, LAST_WORDS
    ) == ("RuntimeError: no such device")


def test_an_engine_of_0_7_logs_the_traceback_behind_its_headline() -> None:
    head = "ERROR 11-21 02:00:00 core.py:210] "
    lines = [head + "EngineCore hit an exception: Traceback (most recent call last):", head + '  File "a.py", line 1']
    assert text(*lines, head + "KeyError: 'rope_scaling'") == "KeyError: 'rope_scaling'"


def test_a_worker_process_of_the_v0_engine_is_believed() -> None:
    head = "(VllmWorkerProcess pid=7) ERROR 11-21 02:00:00 [multiproc_worker_utils.py:242] "
    lines = [head + "Exception in worker VllmWorkerProcess while processing method init_device.", head + TRACE]
    assert text(*lines, head + '  File "a.py", line 1', head + "ValueError: bfloat16 needs 8.0", *uncaught()) == (
        "ValueError: bfloat16 needs 8.0"
    )


TRACE = "Traceback (most recent call last):"


def uncaught(last: str = LAST_WORDS) -> list[str]:
    return [TRACE, ENTRY, last]


def test_an_engine_whose_lines_the_api_server_passes_on_has_two_heads() -> None:
    lines = [
        f"(APIServer pid=1) {line}" for line in [*FAILED, CORE + "RuntimeError: Error 803: system has unsupported"]
    ]
    lines.insert(2, "(APIServer pid=1) (EngineCore_DP0 pid=68) Process EngineCore_DP0:")
    found = quote(fed(*lines))
    assert found is not None
    assert (found["process"], found["text"]) == ("EngineCore_DP0", "RuntimeError: Error 803: system has unsupported")


def test_the_last_exception_of_a_chain_is_quoted_with_the_first_as_its_cause() -> None:
    links = [
        TRACE,
        '  File "hub.py", line 1',
        "requests.exceptions.HTTPError: 401 Client Error",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        TRACE,
        ENTRY,
        "OSError: You are trying to access a gated repo.",
    ]
    assert quoted(*links) == (
        "OSError: You are trying to access a gated repo.",
        "requests.exceptions.HTTPError: 401 Client Error",
    )


def test_pydantic_error_is_quoted_without_its_input() -> None:
    refused = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig",
        "max_num_seqs",
        "  Input should be greater than or equal to 1 [type=greater_than_equal, input_value='hush', input_type=int]",
        "    For further information visit https://errors.pydantic.dev/2.12/v/greater_than_equal",
    ]
    assert text(TRACE, ENTRY, *refused) == (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig max_num_seqs: Input "
        "should be greater than or equal to 1"
    )


def test_an_assertion_without_words_is_quoted_with_its_code() -> None:
    assert text(TRACE, ENTRY, "    assert size % 16 == 0", "           ^^^^^^^^", "AssertionError") == (
        "AssertionError (assert size % 16 == 0)"
    )


def test_values_of_unknown_arguments_are_hidden() -> None:
    refused = "vllm serve: error: unrecognized arguments: --api-kye hush-1 --num-scheduler-steps 8 --tokn=hush-2"
    assert text(refused) == (
        "vllm serve: error: unrecognized arguments: --api-kye REDACTED --num-scheduler-steps 8 --tokn=REDACTED"
    )
    refused = "vllm: error: unrecognized arguments: --max-num-sequences 32 --api-keyabc --max-num-seqsABCDE"
    assert text(refused) == "vllm: error: unrecognized arguments: --max-num-sequences 32 --REDACTED --REDACTED"


# -- which of several -------------------------------------------------------------------------------------------------


def test_follow_up_error_does_not_replace_the_quoted_cause() -> None:
    lines = [*FATAL, CORE + "RuntimeError: CUDA error: device-side assert triggered", DEAD, *uncaught()]
    assert text(*lines) == "RuntimeError: CUDA error: device-side assert triggered"


def test_silent_death_of_an_engine_is_quoted_from_the_api_server() -> None:
    said = "[shutdown] MPClient: engine core exited unexpectedly"
    assert text(READY, f"(APIServer pid=1) WARNING 11-21 02:00:00 [core_client.py:817] {said}", DEAD) == said


def test_an_engine_that_is_stopped_because_another_died_is_not_quoted() -> None:
    told = (
        "(EngineCore_DP1 pid=69) INFO 11-21 02:00:00 [core.py:1454] [shutdown] EngineCore: trigger received signal=15"
    )
    said = "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."
    assert text(READY, told, f"(APIServer pid=1) ERROR 11-21 02:00:00 [core_client.py:1] {said}", DEAD) == said


def test_a_start_that_a_signal_ended_is_quoted_by_the_signal() -> None:
    told = "[shutdown] EngineCore: trigger received signal=SIGTERM"
    ended = CORE + "Exception: WorkerProc initialization failed due to an exception. See stack trace for root cause."
    assert text(BANNER, CORE.replace("ERROR", "INFO") + told, *FAILED, ended, *uncaught()) == told


def test_tracebacks_of_two_ranks_are_separated() -> None:
    ranks = [f"(Worker_TP{rank} pid={rank}) ERROR 11-21 02:00:00 [multiproc_executor.py:700] " for rank in (0, 1)]
    columns = ["WorkerProc failed to start.", TRACE, '  File "a.py", line 1']
    lines = [rank + column for column in columns for rank in ranks]
    found = quote(fed(*lines, ranks[1] + "ValueError: of rank 1", ranks[0] + "ValueError: of rank 0", *uncaught()))
    assert found is not None
    assert (found["process"], found["text"]) == ("Worker_TP1", "ValueError: of rank 1")


def test_survived_exception_is_not_the_cause_of_death() -> None:
    worker = "(Worker pid=9) ERROR 11-21 01:00:00 [multiproc_executor.py:700] "
    lora = [worker + "WorkerProc hit an exception.", worker + TRACE, worker + '  File "a.py", line 1']
    assert quoted(READY, *lora, worker + "ValueError: no such LoRA") is None
    assert text(READY, *lora, worker + "ValueError: no such LoRA", DEAD) == DEAD.removeprefix(DIES)


def test_a_new_start_forgets_the_last_one() -> None:
    assert text(BANNER, *FAILED, CORE + "ValueError: bad", *uncaught()) == "ValueError: bad"
    again = BANNER.replace("01:59:00", "02:01:00").replace("pid=1)", "pid=2)")
    assert quoted(BANNER, *FAILED, CORE + "ValueError: bad", *uncaught(), again) is None


def test_server_after_sigterm_has_no_quoted_error() -> None:
    stopped = [
        "INFO:     Shutting down",
        "INFO:     Finished server process [1]",
        *FATAL,
        CORE + "RuntimeError: cancelled",
    ]
    assert quoted(BANNER, READY, *stopped) is None
    assert quoted(BANNER, READY, TRACE, ENTRY, "KeyboardInterrupt: terminated") is None


# -- what clients send ------------------------------------------------------------------------------------------------


def forged(head: str) -> list[str]:
    return [head + line.removeprefix(CORE) for line in FAILED] + [head + "ValueError: quoted by a client"]


@pytest.mark.parametrize(
    "head",
    [
        API,
        "ERROR 11-21 02:00:01 [serving.py:500] ",
        "INFO 11-21 02:00:01 [logger.py:37] Received request: ",
        "INFO 11-21 02:00:01 [core.py:936] ",
    ],
)
def test_a_clients_lines_are_not_quoted_as_an_exception(head: str) -> None:
    assert text(BANNER, READY, *forged(head), DEAD) != "ValueError: quoted by a client"


def test_a_traceback_of_a_request_is_not_quoted() -> None:
    request = ["ERROR:    Exception in ASGI application", "Process EngineCore:", TRACE, ENTRY, "ValueError: a client's"]
    assert quoted(BANNER, READY, *request) is None


def test_a_traceback_that_ends_no_process_is_not_quoted() -> None:
    assert (
        quoted(BANNER, TRACE, '  File "a.py", line 1', "ValueError: caught and printed", *uncaught("SystemExit"))
        is None
    )


def test_the_exception_of_a_worker_whose_traceback_begins_before_the_log_is_the_reason() -> None:
    worker = "(Worker pid=7) ERROR 11-21 01:59:58 [multiproc_executor.py:901] "
    torn = ['  File "/x/site-packages/vllm/v1/worker/utils.py", line 435, in request_memory', "ValueError: Free memory"]
    shutdown = "(EngineCore_DP0 pid=68) INFO 11-21 01:59:59 [multiproc_executor.py:436] all workers exited"
    assert text(*(worker + line for line in torn), shutdown, *FAILED) == "ValueError: Free memory"


# -- as a label -------------------------------------------------------------------------------------------------------


def test_a_quote_is_bounded_and_printable() -> None:
    found = text(*FAILED, CORE + "ValueError: \x1b[31m" + "x" * 100_000, *uncaught())
    assert found is not None
    assert found.isprintable() and len(found) <= MOST_TEXT and found.startswith("ValueError: ")


def test_secrets_are_hidden() -> None:
    said = "ValueError: api_key=hush-1 {'hf_token': 'hush-2'} https://me:hush-3@host/ Bearer hush-hush-4 /home/hush-5/m"
    found = text(*FAILED, CORE + said)
    assert found is not None
    assert "hush" not in found


# -- where it stands in its file --------------------------------------------------------------------------------------


def followed(path: Path) -> dict[str, str]:
    tail = LogTail(str(path), UTC, clock=lambda: NOW)
    tail.catch_up()
    found = quote(tail.state)
    assert found is not None
    return found


def test_redrawn_bars_and_empty_lines_do_not_move_the_number(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(
        "\n".join(["", "Loading: 0%\rLoading: 50%\rLoading: 100%", "", *FAILED, CORE + "ValueError: x", ""]).encode()
    )
    assert (followed(path)["line"], followed(path)["file"]) == ("7", str(path))
    assert path.read_bytes().split(b"\n")[6].endswith(b"ValueError: x")


def test_behind_what_was_skipped_of_a_long_file_the_number_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.truncate(FIRST + LAST + 2**20)
        file.seek(0, 2)
        file.write("\n".join(["", *FAILED, CORE + "ValueError: x", ""]).encode())
    assert (followed(path)["line"], followed(path)["text"]) == ("", "ValueError: x")


def test_no_secret_of_the_corpus_is_in_the_quoted_line() -> None:
    for secret in corpus(300):
        found = text(*FAILED, f"{CORE}ValueError: {secret.text}")
        assert found is not None
        assert found.startswith("ValueError: ")
        assert not is_shown(secret.secret, found)


# -- a device's runtime, which aborts the process ---------------------------------------------------------------------

FAULT = "Memory access fault by GPU node-9 (Agent handle: 0x3a2b1c0) on address 0x7f1e4a600000. Reason: Unknown."
HUNG = "HW Exception by GPU node-9 (Agent handle: 0x2f0fbb70) reason :GPU Hang"
WORKING = "(APIServer pid=1) INFO 11-21 02:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 1.0 tokens/s"
DIED = "(EngineCore_DP0 pid=68) ERROR 11-21 {} [multiproc_executor.py:246] Worker proc VllmWorker-7 died unexpectedly,"


@pytest.mark.parametrize("fault", [FAULT, HUNG, f"(Worker_TP7 pid=207) {FAULT}"])
def test_a_fault_of_rocms_runtime_is_proven_by_the_death_behind_it(fault: str) -> None:
    """The runtime writes its lines itself, without a head, and so might a client."""
    lines = (BANNER, READY, WORKING, fault)
    assert quoted(*lines) is None
    assert quoted(*lines, DIED.format("02:01:00")) == (fault.removeprefix("(Worker_TP7 pid=207) "), "")
    assert quoted(*lines, DIED.format("02:06:00")) == ("Worker proc VllmWorker-7 died unexpectedly,", "")


def test_a_fault_of_rocms_runtime_behind_a_bar_is_read() -> None:
    bar = "Capturing CUDA graphs (decode, FULL):  88%|███████▋ | 45/51 [00:05<00:00,  9.32it/s]"
    state = fed(BANNER, f"{bar}{FAULT}")
    assert ("diag_vllm_log_events_total", ("cuda_error",), 1) in state.samples(NOW)


def test_a_start_that_waits_for_a_lock_ends_with_it_until_it_moves() -> None:
    waits = "[aiter] waiting for baton release at /tmp/aiter_configs/tuned_fmoe.csv.lock"
    blocked = (
        "(EngineCore pid=180) INFO 11-21 02:00:00 [shm_broadcast.py:681] No available shared memory broadcast block"
        " found in 60 seconds."
    )
    loaded = "(Worker_TP2 pid=202) INFO 11-21 02:00:01 [gpu_model_runner.py:3659] Model loading took 7.1 GiB memory"
    lines = (BANNER, f"(Worker_TP2 pid=202) {waits}", blocked)
    assert fed(*lines).ending.last == waits
    assert fed(*lines, loaded).ending.last != waits


# -- logs that are cut, and the place in the code ---------------------------------------------------------------------

RAN = "(Worker_TP0 pid=81) ERROR 11-21 02:00:00 [multiproc_executor.py:880] "
LAYER = '  File "/usr/lib/python3.12/site-packages/vllm/model_executor/layers/linear.py", line 7, in weight_loader'
TORCH = '  File "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", line 9, in _call_impl'


def finished(*lines: str) -> ServerLog:
    """A log that is read alone, to its end."""
    state = fed(*lines)
    state.current.finish()
    return state


def test_the_innermost_frames_are_told_with_the_exception() -> None:
    found = quote(finished(TRACE, ENTRY, LAYER, "    a()", TORCH, "    b()", "RuntimeError: shapes differ"))
    assert found is not None
    assert found["frames"] == (
        "torch/nn/modules/module.py:_call_impl < vllm/model_executor/layers/linear.py:weight_loader"
    )


def test_an_announced_exception_ends_a_log_that_is_cut_behind_it() -> None:
    state = finished(
        RAN + "WorkerProc failed to start.", RAN + TRACE, RAN + LAYER, RAN + "    a()", RAN + "KeyError: 'w2'"
    )
    assert state.ending.state == "failed"
    assert quote(state)["text"] == "KeyError: 'w2'"  # type: ignore[index]


def test_a_traceback_that_begins_and_ends_midway_is_told_by_its_last_code() -> None:
    load = '  File "/site-packages/vllm/v1/worker/gpu_worker.py", line 3, in load_model'
    lines = (load, "    self.model_runner.load_model()", LAYER, "    assert param.size() == weight.size()")
    state = finished(*(RAN + line for line in lines))
    assert state.ending.state == "failed"
    assert quote(state)["text"] == "AssertionError (assert param.size() == weight.size())"  # type: ignore[index]


def test_a_step_that_measures_memory_is_one_of_a_start() -> None:
    step, profile = (
        f'  File "/site-packages/vllm/v1/worker.py", line 1, in {name}' for name in ("execute_model", "profile_run")
    )
    headline = RAN + "WorkerProc hit an exception."
    for frames, state in (((profile, step), "failed"), ((step,), "dead")):
        lines = [RAN + line for frame in frames for line in (frame, "    x()")]
        assert finished(headline, RAN + TRACE, *lines, RAN + "ValueError: y").ending.state == state


def test_a_restarted_process_with_the_same_pid_has_its_own_reason() -> None:
    head = "(EngineCore pid=81) ERROR 11-21 02:0{minute}:00 [core.py:1006] "
    runs = [
        head.format(minute=minute) + line
        for minute, why in ((0, "KeyError: 'a'"), (2, "ValueError: b"))
        for line in ("EngineCore failed to start.", TRACE, LAYER, "    a()", why)
    ]
    banner = "(APIServer pid=1) INFO 11-21 02:01:00 [utils.py:287]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.16.0"
    state = finished(*runs[:5], banner, *runs[5:])
    assert quote(state)["text"] == "ValueError: b"  # type: ignore[index]


def test_the_last_failed_start_explains_a_log_that_ends_in_the_next_one() -> None:
    head = "(EngineCore pid=81) ERROR 11-21 02:00:00 [core.py:1006] "
    failed = [head + line for line in ("EngineCore failed to start.", TRACE, LAYER, "    a()", "KeyError: 'a'")]
    started = "(APIServer pid=1) INFO 11-21 02:01:00 [api_server.py:1] vLLM API server version 0.16.0"
    assert quote(finished(*failed, started))["text"] == "KeyError: 'a'"  # type: ignore[index]


def test_a_serving_log_does_not_end_with_an_exception_of_one_call() -> None:
    """A method that failed in a worker, outside of a step, ends nothing: the server goes on."""
    ready = "(APIServer pid=1) INFO:     Application startup complete."
    call = '  File "/site-packages/vllm/v1/worker.py", line 1, in add_lora'
    served = '(APIServer pid=1) INFO:     10.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK'
    failed = [RAN + line for line in ("WorkerProc hit an exception.", TRACE, call, "    x()", "ValueError: rank 512")]
    assert finished(ready, served, *failed).ending.state == "serving"


def test_a_traceback_that_a_terminal_padded_with_blanks_is_read() -> None:
    head = "ERROR 11-21 02:00:00 [core.py:387] "
    lines = (f"EngineCore hit an exception: {TRACE}", LAYER, "    a()", "RuntimeError: Expect rule name")
    assert quote(finished(*(f"{head}{line}        " for line in lines)))["text"] == "RuntimeError: Expect rule name"  # type: ignore[index]
