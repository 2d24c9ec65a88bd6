"""A Prometheus, or whatever speaks its HTTP API (Thanos, Mimir, VictoriaMetrics): the only importer of
prometheus-api-client and its requests.

The library asks through a session of ours. By itself it puts a query of any length into the URL, waits for a silent
server for ever and for a refused connection six seconds, reads an answer of any size, drops the server's warnings and
its error sentence, and lets a .netrc take the place of the credentials.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import requests
from prometheus_api_client import PrometheusConnect
from requests.adapters import HTTPAdapter

from diag import __version__
from diag.errors import Unreachable
from diag.promql import pretty
from diag.sources import failure
from diag.sources.access import Access
from diag.sources.address import Address
from diag.sources.failure import Failure
from diag.sources.text import printable

Series = Mapping[str, Any]
"""A series of an answer as the API has it: `metric`, and `value` or `values` of (unix seconds, text)."""
CONNECT = 5.0
"""Seconds for a connection; an answer may take what the caller allows."""
MOST_BYTES = 512 * 2**20
_PAUSES = (0.3, 1.0)
_AGAIN = (429, 502, 503, 504)
_NO_POST = (405, 501)
_HINT = "is this the address of a Prometheus, with its path, https://host/prometheus for one?"


class Refused(Exception):
    """The server did not answer this query; the message is its own sentence."""


@dataclass(frozen=True)
class _Reply:
    """What the library looks at of an answer; the document was read once already."""

    status_code: int
    document: Mapping[str, Any]
    content: bytes = b""

    def json(self) -> Mapping[str, Any]:
        return self.document


class Prometheus:
    """One server; raises Unreachable where it gives no usable answer, and Refused where it answers not this query.

    `seconds` is what an answer may take. Times are unix milliseconds.
    """

    def __init__(self, address: Address, access: Access, seconds: float = 30.0) -> None:
        self.shown = printable(address.shown.rstrip("/").removesuffix("/api/v1"))
        self._session = _Session(self.shown, address, access, seconds)
        self._library = PrometheusConnect(self.shown, session=self._session, method="POST")
        self._session.mount(self.shown, HTTPAdapter())  # the library's own would ask again where it is of no use
        self._limit = {"timeout": f"{seconds:g}s"}

    @property
    def warnings(self) -> list[str]:
        """What the server warned of, partial answers for one; each once."""
        return [printable(each) for each in self._session.warnings]

    def now(self) -> int:
        """The server's own clock: the samples are stamped by it, or by one that it trusts."""
        return round(float(self._library.custom_query("vector(time())")[0]["value"][1]) * 1000)

    def instant(self, promql: str, at: int) -> list[Series]:
        """Evaluate at one instant; a range selector gives the raw samples."""
        return cast(list[Series], self._library.custom_query(promql, {"time": _seconds(at), **self._limit}))

    def range(self, promql: str, start: int, end: int, step: int) -> list[Series]:
        """Evaluate from `start` to `end`; VictoriaMetrics would move both to multiples of the step for its cache."""
        exact = {"start": _seconds(start), "end": _seconds(end), "nocache": "1", **self._limit}
        begin, finish = _moment(start), _moment(end)
        return cast(list[Series], self._library.custom_query_range(promql, begin, finish, _seconds(step), params=exact))

    def series(self, matches: Sequence[str], start: int, end: int) -> list[Mapping[str, str]]:
        """The labels of the series that a time may have; whole blocks count, so some may have ended before."""
        return cast(
            list[Mapping[str, str]],
            self._library.get_series(_moment(start), _moment(end), {"match[]": list(matches)}),
        )

    def recorded(self) -> dict[str, str]:
        """What rules record here: the name by the expression, printed prettily. Empty where there are no rules."""
        try:
            reply = self._session.get(f"{self.shown}/api/v1/rules", params={"type": "record"}).json()
            rules = [rule for group in reply["data"]["groups"] for rule in group["rules"]]
            return {pretty(each["query"]): each["name"] for each in rules if each.get("health") == "ok"}
        except (Unreachable, Refused, KeyError, TypeError, ValueError):
            return {}


class _Session(requests.Session):
    """Asks with forms, bounded in time and size, and follows no redirect: credentials must not go elsewhere."""

    def __init__(self, shown: str, address: Address, access: Access, seconds: float) -> None:
        super().__init__()
        self.warnings: dict[str, None] = {}
        self._shown, self._time, self._takes_forms = shown, seconds, True
        self.trust_env = not address.is_loopback  # proxies
        self.auth = lambda request: request  # no .netrc
        own = {"Authorization": address.authorization} if address.authorization else {}
        self._has_credentials = bool(access.headers or own)
        self.headers.update({"User-Agent": f"diag/{__version__}", **access.headers, **own})
        self.verify = access.ca_file or True
        self.cert = (access.client_cert, access.client_key) if access.client_key else access.client_cert or None

    def request(self, method: str, url: str, params: Any = None, **_: Any) -> Any:  # type: ignore[override]
        """Ask, and ask again where a proxy in between was short of breath. Called by the library alone."""
        for pause in (*_PAUSES, None):
            try:
                reply = self._once(method, url, params)
            except Failure as error:
                raise Unreachable(failure.sentence(self._shown, error)) from error
            if reply.status_code not in _AGAIN or "error" in reply.document or pause is None:
                return self._good(reply)
            time.sleep(pause)
        raise AssertionError("the last round returns")

    def _once(self, method: str, url: str, params: Any) -> _Reply:
        post = method == "POST" and self._takes_forms
        how = {"data" if post else "params": params}
        limits = (min(CONNECT, self._time), self._time)
        try:
            with super().request(
                "POST" if post else "GET", url, stream=True, allow_redirects=False, timeout=limits, **how
            ) as response:
                body = self._body(response)
        except (requests.RequestException, OSError) as error:
            raise self._failure(error) from error
        if post and response.status_code in _NO_POST:
            self._takes_forms = False
            return self._once(method, url, params)
        return _Reply(response.status_code, _document(response, body))

    def _body(self, response: requests.Response) -> bytes:
        end, body = time.monotonic() + self._time, bytearray()
        for chunk in response.iter_content(1 << 16):
            body += chunk
            if len(body) > MOST_BYTES:
                raise Failure(f"answered more than {MOST_BYTES >> 20} MiB", "ask for fewer servers or a shorter span")
            if time.monotonic() > end:
                raise Failure(f"was still answering after {self._time:g} s", "ask for fewer servers or a shorter span")
        return bytes(body)

    def _good(self, reply: _Reply) -> _Reply:
        """The reply of a query that was answered; Refused with the server's sentence where it was not."""
        status, document = reply.status_code, reply.document
        if status in (401, 403):
            raise Unreachable(failure.sentence(self._shown, failure.of_credentials(status, self._has_credentials)))
        if "error" in document:
            raise Refused(f"{printable(str(document['error']), 300)} (HTTP {status})")
        if status != 200 or "data" not in document:
            why = document.get("_why") or f"answered HTTP {status}"
            raise Unreachable(failure.sentence(self._shown, Failure(why, _HINT)))
        self.warnings |= dict.fromkeys(map(str, document.get("warnings") or ()))
        return reply

    def _failure(self, error: Exception) -> Failure:
        causes = list(failure.causes(error))
        known = failure.of_tls(causes) or failure.of_network(causes, "")
        if isinstance(error, requests.ConnectTimeout):
            return Failure(f"no connection within {min(CONNECT, self._time):g} s", "is the host up?", answered=False)
        if isinstance(error, requests.ReadTimeout) or "Read timed out" in str(error):
            return Failure(f"took the connection and sent nothing for {self._time:g} s", "is the server overloaded?")
        if known:
            return known
        if "IncompleteRead" in str(error):
            return Failure("broke off in the middle of its answer")
        return Failure("closed the connection without a usable answer", _HINT)


def _document(response: requests.Response, body: bytes) -> Mapping[str, Any]:
    """The JSON object of an answer, or one that says in `_why` what it was instead."""
    where = response.headers.get("Location")
    if where and response.is_redirect:
        return {"_why": f"redirects to {printable(where.partition('?')[0], 100)}, which is not followed: ask that one"}
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {"_why": f"answered {_kind(body)} instead of JSON (HTTP {response.status_code})"}
    if not isinstance(document, dict) or not {"data", "error"} & document.keys():
        return {"_why": "answered JSON that is no answer of the Prometheus API"}
    return document


def _kind(body: bytes) -> str:
    if body.lstrip()[:1] == b"<":
        return "an HTML page"
    return f'"{printable(body[:60].decode("utf-8", "replace").strip(), 60)}"' if body.strip() else "nothing"


def _seconds(millis: int) -> str:
    return f"{millis / 1000:.3f}"


def _moment(millis: int) -> datetime:
    return datetime.fromtimestamp(millis / 1000, UTC)
