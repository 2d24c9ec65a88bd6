"""A real vLLM on the CPU that logs all that clients send: none of it changes what the doctor says of the server."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC
from pathlib import Path

import pytest
from support import imitations
from support.live import load, memory_runs_out, on_call, server
from support.waiting import until

from diag.log.parse_line import read_timed_lines
from diag.log.server_log import ServerLog

pytestmark = [pytest.mark.live, server.needed]
DIAG = str(Path(sys.executable).parent / "diag")
FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "8", "--enable-log-requests", "--dtype", "float32")
# with bfloat16 vLLM takes its AMX kernels where the CPU has them, which a long prompt ends by an illegal instruction
BAR = "Capturing CUDA graphs: 3%|#| 3/67 [01:00<00:44,  1.48it/s]"


def post(url: str, body: object, **headers: str) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json", **headers})
    with suppress(urllib.error.HTTPError):  # most are refused, and logged all the same
        urllib.request.urlopen(request, timeout=120).close()


def told(log: Path) -> tuple[object, ...]:
    """Return the doctor's reading of a log: version, model, configuration, and the count of each event."""
    state = ServerLog(UTC)
    for entry in read_timed_lines(log, UTC, time.time()):
        state.feed(entry.text, entry.at, live=False)
    events = {labels: n for name, labels, n in state.samples(time.time()) if name == "diag_vllm_log_events_total"}
    return state.config.version, state.config.model, state.config.numbers, events


def texts(log: Path) -> list[str]:
    """Every line that the doctor knows, with the heads of this very server's processes, some behind a bar."""
    text = log.read_text(encoding="utf-8", errors="replace")
    api, engine = (re.search(rf"\({name} pid=\d+\) ", text)[0] for name in ("APIServer", "EngineCore"))  # type: ignore[index]
    now = time.strftime("%m-%d %H:%M:%S")
    heads = imitations.Heads("", f"{api}INFO {now} [request_logger.py:62] ", f"{engine}{{level}} {now} [{{file}}] ")
    return [BAR * (at % 3 == 2) + line for at, line in enumerate(imitations.imitations(heads))]


def sent(lines: list[str], bundles: int) -> Iterator[str]:
    """All of them in so many texts, behind line feeds and carriage returns."""
    for first in range(bundles):
        yield "x" + "".join("\n\r"[at % 2] + line for at, line in enumerate(lines[first::bundles]))


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    with server.running(tmp_path_factory.mktemp("vllm"), "tiny", FLAGS, VLLM_LOGGING_LEVEL="DEBUG") as running:
        yield running


def test_client_input_in_a_log_changes_no_verdict_and_no_configuration(vllm: server.Server) -> None:
    """The inputs are a request id in the body and in the header, a prompt, a model name and a body that is no JSON."""
    before, lines = told(vllm.log), texts(vllm.log)
    assert before[:2] == ("0.32.0", "tiny")
    one = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    for text in sent(lines, 4):
        post(vllm.url, {**one, "request_id": text})
        post(vllm.url, {**one, "prompt": text})
    for text in sent(lines, 30):
        post(vllm.url, one | {"model": text}, **{"X-Request-Id": re.sub(r"[^ -~]", "\x85", text)[:4000]})
        post(vllm.url, f'{{"model": {text}')
    post(vllm.url, one, **{"X-Request-Id": re.sub(r"[^ -~]", "\x85", lines[0])})
    written = vllm.log.read_text(encoding="utf-8", errors="replace")
    assert sum(line in written for line in lines) > len(lines) / 2, "most of it stands in the log"
    command = [DIAG, "doctor", vllm.url, "--for", "30", "--every", "1", "--log", str(vllm.log), "--json"]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    assert (report["verdict"], report["observed"]["progress_unknown"]) == ("healthy", [])
    assert told(vllm.log) == before


def imitated(log: str) -> str:
    """A death for lack of memory, a shutdown and another start, in the words and with the heads of this very server."""
    api, engine = (re.search(rf"\({name} pid=\d+\) ", log)[0] for name in ("APIServer", "EngineCore"))  # type: ignore[index]
    now = time.strftime("%m-%d %H:%M:%S")
    died = f"{engine}ERROR {now} [core.py:1510] "
    return "\n".join(
        [
            f"{died}EngineCore encountered a fatal error.",
            f"{died}Traceback (most recent call last):",
            f'{died}  File "/x/vllm/v1/engine/core.py", line 1, in run_engine_core',
            f"{died}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.77 GiB.",
            "INFO:     Shutting down",
            "INFO:     Application shutdown complete.",
            f"{api}INFO {now} [api_utils.py:347] vLLM server version 9.9.9, serving model forged",
            f"{api}INFO {now} [api_utils.py:286] non-default args: {{'max_num_seqs': 4242}}",
            f"{engine}INFO {now} [core.py:114] Initializing a V1 LLM engine (v9.9.9) with config: model='forged'",
        ]
    )


def imitate(vllm: server.Server, log: str) -> None:
    """Write it into the log by a JSON schema: xgrammar's warning about a reference quotes it with its line feeds."""
    schema = {"type": "object", "properties": {"a": {"$ref": f"x:\n{imitated(log)}"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    post(vllm.url, {"model": "tiny", "prompt": "a", "max_tokens": 1, "response_format": asked})
    assert "serving model forged" in vllm.log.read_text(encoding="utf-8", errors="replace")


def config(*words: str) -> str:
    done = subprocess.run([DIAG, "config", *words, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


BY_LOG = {"crash_loop", "engine_dead", "engine_device_fault", "gpu_out_of_memory", "startup_failed", "startup_slow"}


def assert_nothing_made(said: on_call.Said) -> None:
    """The load of the machine that tests may show in other incidents."""
    present = {found["incident"] for found in said.report["diagnoses"] if found["state"] == "present"}
    assert present.isdisjoint(BY_LOG), present
    assert {engine["state"] for engine in said.report["progress"]} <= {"busy", "idle", "slow"}
    assert "9.9.9" not in json.dumps(said.report["observed"]["servers"])


def test_a_schema_that_imitates_the_log_makes_nothing_and_hides_no_real_death(tmp_path: Path) -> None:
    """In a followed log, in a rotated one, in a recording, through the exporter and through Prometheus."""
    told = server.paced(tmp_path / "plugin", Path(memory_runs_out.__file__))
    full, flags = tmp_path / "memory-is-full", ("--max-model-len", "2048", "--max-num-seqs", "32")
    told |= {memory_runs_out.WHEN: str(full)}
    with (
        server.running(tmp_path, "tiny", flags, **told) as vllm,
        on_call.on_call(tmp_path, vllm, in_haste=True) as who,
        load.running(vllm.port, *load.STEADY) as clients,
    ):
        clients.wait_for(6, *load.STEADY)
        log = vllm.log.read_text(encoding="utf-8", errors="replace")
        before = config(vllm.url, "--log", str(vllm.log))
        for _ in range(3):
            imitate(vllm, log)
            time.sleep(1)
        exporter, live = who.first_look()
        for said in (exporter, live, who.by_prometheus("none")):
            assert_nothing_made(said)
        note = next(note for note in live.report["observed"]["notes"] if "conflicts with its metrics" in note)
        assert "engine_dead" in note
        assert config(vllm.url, "--log", str(vllm.log)) == before

        command = [DIAG, "record", vllm.url, str(tmp_path / "recorded"), "--log", str(vllm.log)]
        recorder = subprocess.Popen([*command, "--for", "16", "--every", "1"])
        until(lambda: any((tmp_path / "recorded").glob("*")))
        imitate(vllm, log)
        assert recorder.wait(90) == 0
        assert_nothing_made(on_call.doctor(str(tmp_path / "recorded")))

        os.truncate(vllm.log, 0)  # as logrotate's copytruncate does
        imitate(vllm, log)
        assert_nothing_made(on_call.doctor(vllm.url, "--log", str(vllm.log)))

        full.touch()
        until(lambda: "Tried to allocate 2.00 GiB" in vllm.log.read_text(encoding="utf-8", errors="replace"))
        exporter, live = who.first_look()
        for said in (exporter, live, who.by_prometheus("gpu_out_of_memory")):
            assert said.short == "critical gpu_out_of_memory", said.report.get("diagnoses")
        quoted = json.dumps(live.primary)
        assert "Tried to allocate 2.00 GiB" in quoted
        assert "7.77" not in quoted
