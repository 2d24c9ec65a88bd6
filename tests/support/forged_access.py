"""Lines of uvicorn's access log that a client forges: in a proxy's header, and in an exception of the web server."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime

_ANSWERED = '- "POST /v1/completions HTTP/1.1" 200 OK'
_RATES = (
    "Avg prompt throughput: 90.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs"
)
ROUTES = ("/v1/completions", "/v1/completions/render?x=/v1/completions", "/tokenize", "/v1/models")
NEEDS_NO_ENGINE = ROUTES[1:]


def texts(log: str, at: float) -> Sequence[str]:
    """Texts of a client in X-Forwarded-For, with heads of the processes of that log and of a moment."""
    api, engine = heads(log)
    statistics = f"{api}INFO {_clock(at)} [loggers.py:259] Engine 000: {_RATES}"
    return (
        *(f"x {_ANSWERED}", f"10.0.0.7:51234 {_ANSWERED}", f"10.0.0.7:51234 {_ANSWERED} INFO:     ::1:7"),
        *(_ANSWERED[2:], "y", _RATES[:39], statistics[len(api) :], _RATES, statistics),
        *(f"{engine}ERROR {_clock(at)} [core.py:1510] EngineCore encountered a fatal error.",),
        *("Application startup complete.", "Started server process [24326]", "[::1", "1.2.3.4:5 x"),
        "10.0.0.7:51234\u2028",
    )


def access_lines(log: str, at: float) -> list[str]:
    """Sixty forms of access lines, and those with an address whose routes need no engine."""
    forged = [f'INFO:     {text}:0 - "POST {route} HTTP/1.1" 200 OK' for text in texts(log, at) for route in ROUTES]
    return forged + [f'INFO:     10.0.0.7:51234 - "POST {route} HTTP/1.1" 200 OK' for route in NEEDS_NO_ENGINE]


def behind_line_feeds(log: str, at: float) -> list[str]:
    """An exception of the web server whose text is a client's, with line feeds: true access lines to the letter."""
    answered = [f"INFO:     10.0.0.7:5123{port} {_ANSWERED}" for port in range(4)]
    unknown = f"(APIServer pid=1) INFO {_clock(at)} [loggers.py:259] Engine 000: {_RATES}"
    begins = ("ERROR:    Exception in ASGI application", "Traceback (most recent call last):", '  File "a.py", line 1')
    return [*begins, "    x()", "ValueError: no model 'x", *answered, unknown, *answered, *access_lines(log, at), "'"]


def heads(log: str) -> tuple[str, str]:
    """The heads of the API server and of the engine in a log, "" for a release that names no process."""
    api, engine = (re.search(rf"\({name}\S* pid=\d+\) ", log) for name in ("APIServer", "EngineCore"))
    return api[0] if api else "", engine[0] if engine else ""


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%m-%d %H:%M:%S}"
