"""Clients that write what vLLM logs into every place of a request that it logs."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from support import imitations

LOGGED = ("--enable-log-requests",)
"""The flag with which a server logs what it is asked; VLLM_LOGGING_LEVEL is DEBUG for the prompts."""
BAR = "Capturing CUDA graphs: 3%|#| 3/67 [01:00<00:44,  1.48it/s]"


def write(url: str, log: Path) -> list[str]:
    """Send every line that the doctor knows: as id of a request, in its body and in its header, as prompt, as name of
    a model, as a body that is no JSON. Returns the lines.
    """
    lines, one = _texts(log), {"model": "tiny", "prompt": "a", "max_tokens": 1}
    for text in _sent(lines, 4):
        _post(url, {**one, "request_id": text})
        _post(url, {**one, "prompt": text})
    for text in _sent(lines, 30):
        _post(url, one | {"model": text}, **{"X-Request-Id": re.sub(r"[^ -~]", "\x85", text)[:4000]})
        _post(url, f'{{"model": {text}')
    _post(url, one, **{"X-Request-Id": re.sub(r"[^ -~]", "\x85", lines[0])})
    return lines


def _post(url: str, body: object, **headers: str) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json", **headers})
    with suppress(urllib.error.HTTPError):  # most are refused, and logged all the same
        urllib.request.urlopen(request, timeout=120).close()


def _texts(log: Path) -> list[str]:
    """Every line that the doctor knows, with the heads of this very server's processes, some behind a bar."""
    text = log.read_text(encoding="utf-8", errors="replace")
    api, engine = (re.search(rf"\({name} pid=\d+\) ", text)[0] for name in ("APIServer", "EngineCore"))  # type: ignore[index]
    now = time.strftime("%m-%d %H:%M:%S")
    heads = imitations.Heads("", f"{api}INFO {now} [request_logger.py:62] ", f"{engine}{{level}} {now} [{{file}}] ")
    return [BAR * (at % 3 == 2) + line for at, line in enumerate(imitations.imitations(heads))]


def _sent(lines: list[str], bundles: int) -> Iterator[str]:
    """All of them in so many texts, behind line feeds and carriage returns."""
    for first in range(bundles):
        yield "x" + "".join("\n\r"[at % 2] + line for at, line in enumerate(lines[first::bundles]))
