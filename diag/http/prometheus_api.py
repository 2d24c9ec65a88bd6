"""The HTTP API of a Prometheus, in the shape of the session that prometheus-api-client uses.

By itself that library sends with requests, which puts a query of any length into the URL, reads a response of any
size, lets a .netrc replace the credentials and drops the server's own error sentence. Here it sends with our client.
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from diag.core.errors import Unreachable
from diag.core.formatting import printable
from diag.http import failure
from diag.http.address import Address, without_user
from diag.http.client import Client, Manner, Request, Response
from diag.http.credentials import Credentials
from diag.http.failure import PROMETHEUS, Failure

MOST_BYTES = 32 * 2**20
"""Of one answer, decoded; six targets scraped every 5 s for a week take 20 MiB, and 32 MiB take 500 MiB of memory."""
NO_API = "answered JSON that is not from the Prometheus API"
_PAUSES = (0.3, 1.0)
_BUSY = 429
_RETRIED = (_BUSY, 502, 503, 504)
_NO_POST = (405, 501)
_STARTING = "is it starting, or overloaded?"
_TIMEOUT = re.compile(r"time-?out|timed out|deadline", re.IGNORECASE)
_QUERY, _QUERIED = "error when executing query=", re.compile(r"\((?:time|start)=[^()]*\): ")
"""VictoriaMetrics' sentences begin with the whole query: what stands before and behind it."""
_ADVICE = "PromQL info:"


class Unusable(Unreachable):
    """The server answered this query with something that is no answer; it may answer the next one."""


class Refused(Exception):
    """The server refused this query; the message is its own sentence.

    `timed_out`: it gave up or is overloaded. `unparsable`: it could not parse the query.
    """

    def __init__(self, status: int, document: Mapping[str, Any]) -> None:
        sentence = _without_query(str(document["error"]))
        super().__init__(f"{printable(sentence, 300)} (HTTP {status})")
        self.timed_out = status in _RETRIED or document.get("errorType") == "timeout" or bool(_TIMEOUT.search(sentence))
        self.unparsable = status in (400, 422) and not self.timed_out


def _without_query(sentence: str) -> str:
    begin, quoted, rest = sentence.partition(_QUERY)
    behind = _QUERIED.search(rest) if quoted else None
    return f"{begin}{rest[behind.end() :]}" if behind else sentence


@dataclass(frozen=True)
class ApiReply:
    """What the library reads of a response, its document decoded; `problem` is why there is none."""

    status_code: int
    document: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    content: bytes = b""

    def json(self) -> Mapping[str, Any]:
        """The document."""
        return self.document


class Session:
    """Queries as forms, without following redirects: credentials must not go elsewhere.

    `seconds`: how long the server may stay silent; a whole response may take twice as long.
    """

    verify = True
    cert = None

    def __init__(self, shown: str, address: Address, credentials: Credentials, seconds: float) -> None:
        self.warnings: dict[str, None] = {}
        self._shown, self._takes_forms = shown, True
        self._client = Client(address, credentials, Manner(seconds, PROMETHEUS, keep=True))

    def mount(self, *_: object) -> None:
        """Nothing: the library's adapter would send and retry in its own way."""

    def get(self, url: str, params: Any = None, **_: Any) -> ApiReply:
        """Query by GET."""
        return self.request("GET", url, params)

    def request(self, method: str, url: str, params: Any = None, **_: Any) -> ApiReply:
        """Query, and again where a proxy or the server is overloaded for a moment; Refused or Unreachable."""
        for pause in (*_PAUSES, None):
            reply = self._sent(method, urlsplit(url).path, urlencode(params or {}, doseq=True))
            final = reply.status_code not in _RETRIED or (reply.document.get("error") and reply.status_code != _BUSY)
            if final or pause is None:
                return self._good(reply)
            time.sleep(pause)
        raise AssertionError("the last round returns")

    def _sent(self, method: str, path: str, form: str) -> ApiReply:
        post = method == "POST" and self._takes_forms
        try:
            response = self._client.send(_form(path, form) if post else _query(path, form))
        except Failure as error:
            raise self._unreachable(error) from error
        if post and response.status in _NO_POST:
            self._takes_forms = False
            return self._sent(method, path, form)
        return decoded(response)

    def _good(self, reply: ApiReply) -> ApiReply:
        """The reply of a query that succeeded; Refused with the server's sentence where it did not."""
        status, document = reply.status_code, reply.document
        if status in (401, 403):
            raise self._unreachable(self._client.refusal(status))
        if document.get("error"):
            raise Refused(status, document)
        if reply.problem or status != 200:
            hint = PROMETHEUS.address if status < 500 and status != _BUSY else _STARTING
            problem = Failure(reply.problem or f"answered HTTP {status}", hint)
            raise Unusable(failure.sentence(self._shown, problem))
        warnings = map(str, document.get("warnings") or ())
        self.warnings |= dict.fromkeys(warning for warning in warnings if not warning.startswith(_ADVICE))
        return reply

    def _unreachable(self, error: Failure) -> Unreachable:
        return Unreachable(failure.sentence(self._shown, error))


def _form(path: str, form: str) -> Request:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    return Request(path, "POST", kind, form.encode(), MOST_BYTES, follow=False)


def _query(path: str, form: str) -> Request:
    return Request(f"{path}?{form}" if form else path, most_bytes=MOST_BYTES, follow=False)


def decoded(response: Response) -> ApiReply:
    """The JSON object of a response, or what it was instead."""
    status = response.status
    if response.location:
        target = without_user(response.location).partition("/api/v1/")[0] or "/"
        return ApiReply(status, problem=f"redirects to {target}, which is not followed")
    try:
        document = json.loads(response.body)
    except (ValueError, RecursionError):
        return ApiReply(status, problem=f"answered {_kind(response.body)} instead of JSON (HTTP {status})")
    if not isinstance(document, dict) or not {"data", "error"} & document.keys():
        return ApiReply(status, problem=NO_API)
    return ApiReply(status, document)


def _kind(body: bytes) -> str:
    if body.lstrip()[:1] == b"<":
        return "an HTML page"
    return f'"{printable(body[:60].decode("utf-8", "replace").strip(), 60)}"' if body.strip() else "nothing"
