"""The HTTP APIs of Prometheus (queries) and of Alertmanager (posting alerts)."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from diag.core.errors import BadUsage, Unreachable
from diag.core.files import parse_json
from diag.core.formatting import printable
from diag.http import failure
from diag.http.address import Address, Credentials, from_environment, parse, without_user
from diag.http.client import Client, Request, Response
from diag.http.failure import PROMETHEUS, Failure, Hints

MOST_BYTES = 32 * 2**20
"""Size limit of a decoded response: a week of six targets, scraped every 5 s, is 20 MiB; 32 MiB use 500 MiB of RAM."""
NO_API = "answered JSON that is not from the Prometheus API"
_PAUSES = (0.3, 1.0)
_BUSY = 429
_RETRIED = (_BUSY, 502, 503, 504)
_NO_POST = (405, 501)
_STARTING = "is it starting, or overloaded?"
_TIMEOUT = re.compile(r"time-?out|timed out|deadline", re.IGNORECASE)
_QUERY, _QUERIED = "error when executing query=", re.compile(r"\((?:time|start)=[^()]*\): ")
"""VictoriaMetrics' error messages begin with the whole query, between these two."""
_ADVICE = "PromQL info:"
ALERTS_PATH, ALERTMANAGER_SECONDS = "/api/v2/alerts", 10.0
ALERTMANAGER_PREFIX = "DIAG_ALERTMANAGER_"
"""Prefix of the variables with the Alertmanager's credentials: it does not receive the servers' credentials."""
_ALERTMANAGER = Hints(
    "is this the address of an Alertmanager, including its path (for example https://host/alertmanager)?"
)


class Unusable(Unreachable):
    """The response to this query is not usable; the next query may succeed."""


class Refused(Exception):
    """The server refused this query; the message is the server's own.

    `timed_out`: the query timed out or the server is overloaded. `unparsable`: the server could not parse the query.
    """

    def __init__(self, status: int, document: Mapping[str, Any]) -> None:
        sentence = str(document["error"])
        begin, quoted, rest = sentence.partition(_QUERY)
        behind = _QUERIED.search(rest) if quoted else None
        if behind:
            sentence = f"{begin}{rest[behind.end() :]}"
        super().__init__(f"{printable(sentence, 300)} (HTTP {status})")
        self.timed_out = status in _RETRIED or document.get("errorType") == "timeout" or bool(_TIMEOUT.search(sentence))
        self.unparsable = status in (400, 422) and not self.timed_out


@dataclass(frozen=True)
class ApiReply:
    """A response; without a document, `problem` is the reason."""

    status: int
    document: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


class PrometheusApi:
    """Sends queries as forms and follows no redirect, which would send the credentials to another server.

    `seconds`: limit for each wait; a whole response may take twice as long.
    """

    def __init__(self, shown: str, address: Address, credentials: Credentials, seconds: float) -> None:
        self.warnings: dict[str, None] = {}
        self._shown, self._takes_forms = shown, True
        self._client = Client(address, credentials, seconds, PROMETHEUS, keep=True)

    def query(self, method: str, path: str, form: str) -> Mapping[str, Any]:
        """Return the document of a response; retry if the server or a proxy is briefly overloaded.

        Raises Refused or Unreachable.
        """
        for pause in (*_PAUSES, None):
            reply = self._send(method, path, form)
            status, document = reply.status, reply.document
            if pause is None or status not in _RETRIED or (document.get("error") and status != _BUSY):
                break
            time.sleep(pause)

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
        return document

    def _send(self, method: str, path: str, form: str) -> ApiReply:
        post = method == "POST" and self._takes_forms
        if post:
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            request = Request(path, "POST", kind, form.encode(), MOST_BYTES, follow=False)
        else:
            request = Request(f"{path}?{form}" if form else path, most_bytes=MOST_BYTES, follow=False)
        try:
            response = self._client.send(request)
        except Failure as error:
            raise self._unreachable(error) from error
        if post and response.status in _NO_POST:
            self._takes_forms = False
            return self._send(method, path, form)
        return decoded(response)

    def _unreachable(self, error: Failure) -> Unreachable:
        return Unreachable(failure.sentence(self._shown, error))


def decoded(response: Response) -> ApiReply:
    """Decode the JSON object of a response; for any other response, describe it as the problem."""
    status, body = response.status, response.body
    if response.location:
        target = without_user(response.location).partition("/api/v1/")[0] or "/"
        return ApiReply(status, problem=f"redirects to {target}, which is not followed")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        kind = f'"{printable(body[:60].decode("utf-8", "replace").strip(), 60)}"' if body.strip() else "nothing"
        kind = "an HTML page" if body.lstrip()[:1] == b"<" else kind
        return ApiReply(status, problem=f"answered {kind} instead of JSON (HTTP {status})")
    if not isinstance(document, dict) or not {"data", "error"} & document.keys():
        return ApiReply(status, problem=NO_API)
    return ApiReply(status, document)


class Alertmanager:
    """One Alertmanager; BadUsage if its address or a credential is invalid."""

    def __init__(self, url: str, environment: Mapping[str, str]) -> None:
        address = parse(url)
        if address.query:
            raise BadUsage(
                f"{address.shown} has a query: leave out the question mark and what follows of an Alertmanager's URL"
            )
        variables = {
            f"DIAG_{name.removeprefix(ALERTMANAGER_PREFIX)}": text
            for name, text in environment.items()
            if name.startswith(ALERTMANAGER_PREFIX)
        }
        try:
            self._client = Client(address, from_environment(variables), ALERTMANAGER_SECONDS, _ALERTMANAGER)
        except BadUsage as error:
            raise BadUsage(_with_prefix(str(error))) from error
        self._path = address.path.rstrip("/").removesuffix(ALERTS_PATH) + ALERTS_PATH
        self.shown = address.shown

    def get(self, path: str, seconds: float) -> Any:
        """Return the decoded answer of a path of the API, such as /api/v2/status; Unreachable if there is none."""
        whole = f"{self._path.removesuffix(ALERTS_PATH)}{path}"
        try:
            response = self._client.send(Request(whole, most_bytes=MOST_BYTES, seconds=seconds))
            if response.status != 200:
                raise self._client.refusal(response.status)
            return parse_json(response.body)
        except Failure as error:
            raise Unreachable(_with_prefix(failure.sentence(self.shown, error))) from error
        except ValueError as error:
            problem = Failure("answered no JSON", _ALERTMANAGER.address)
            raise Unreachable(failure.sentence(self.shown, problem)) from error

    def post(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Post alerts in the format of the API; Unreachable, with one sentence, if they are not accepted."""
        try:
            response = self._client.post(self._path, alerts, ALERTMANAGER_SECONDS)
            if response.status not in (200, 401, 403):
                with suppress(ValueError):
                    document = parse_json(response.body)
                    if isinstance(document, str) and document:  # an Alertmanager sends a string
                        raise Failure(f"answered HTTP {response.status}: {printable(document, 200)}")
            if response.status != 200:
                raise self._client.refusal(response.status)
        except Failure as error:
            raise Unreachable(_with_prefix(failure.sentence(self.shown, error))) from error


def _with_prefix(sentence: str) -> str:
    """Name the variables of the Alertmanager instead of those of the servers."""
    return sentence.replace("DIAG_", ALERTMANAGER_PREFIX)
