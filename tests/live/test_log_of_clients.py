"""A real vLLM on the CPU that logs all that clients send: none of it changes what the doctor says of the server."""

import json
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
from support.live import server

from diag.exporter.log.parse_line import read_timed_lines
from diag.exporter.log.server_log import ServerLog

pytestmark = [pytest.mark.live, server.needed]
DIAG = str(Path(sys.executable).parent / "diag")
FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "8", "--enable-log-requests")
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
    return state.version, state.model, state.config, events


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
