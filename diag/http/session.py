"""Requests to a Prometheus, bounded in time and size (the only importer of requests, which prometheus-api-client uses).

By itself the library puts a query of any length into the URL, waits for a silent server for ever and for a refused
connection six seconds, reads an answer of any size, drops the server's warnings and its error sentence, and lets a
.netrc take the place of the credentials.
"""

import http.client
import json
import re
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from diag import __version__
from diag.core.errors import Unreachable
from diag.core.formatting import printable
from diag.http import failure
from diag.http.address import Address
from diag.http.credentials import Credentials, context
from diag.http.failure import Failure

CONNECT = 5.0
"""Seconds for a connection; an answer may take what the caller allows."""
MOST_BYTES = 512 * 2**20
NO_API = "answered JSON that is no answer of the Prometheus API"
WHICH = "is this the address of a Prometheus, with its path, https://host/prometheus for one?"
_SMALLER = "ask for fewer servers or a shorter span"
_OVERLOADED = "is the server overloaded?"
_CHUNK = 1 << 13
_PAUSES = (0.3, 1.0)
_BUSY = 429
_AGAIN = (_BUSY, 502, 503, 504)
_NO_POST = (405, 501)
_LATE = re.compile(r"time-?out|timed out|deadline", re.IGNORECASE)
_QUOTED = re.compile(r"error when executing query=.*? \((?:time|start)=[^()]*\): ", re.DOTALL)
"""VictoriaMetrics' sentences begin with the whole query."""
_API = re.compile(r"[?#]|/api/v1/")
_USER = re.compile(r"//[^/@]*@")
_ADVICE = "PromQL info:"
_OF_PROXIES = (
    requests.exceptions.ProxyError,
    requests.exceptions.InvalidProxyURL,
    requests.exceptions.InvalidSchema,
)
_BROKEN = (
    (http.client.RemoteDisconnected, Failure("closed the connection without an answer", "is it https?")),
    (requests.exceptions.ChunkedEncodingError, Failure("broke off in the middle of its answer")),
    (http.client.HTTPException, Failure("answered something that is not HTTP", WHICH)),
    (requests.exceptions.ContentDecodingError, Failure("answered in an encoding that is damaged")),
    (ValueError, Failure("no host can have that name", "is the name right?", answered=False)),
)
"""What the libraries' errors mean, the special ones first."""


class Refused(Exception):
    """The server did not answer this query; the message is its own sentence.

    `late`: it gave up or has too much to do. `unread`: it could make no sense of the query.
    """

    def __init__(self, status: int, document: Mapping[str, Any]) -> None:
        sentence = _QUOTED.sub("", str(document["error"]))
        super().__init__(f"{printable(sentence, 300)} (HTTP {status})")
        self.late = status in _AGAIN or document.get("errorType") == "timeout" or bool(_LATE.search(sentence))
        self.unread = status in (400, 422) and not self.late


@dataclass(frozen=True)
class _Reply:
    """What the library looks at of an answer, the document being read once already; `wrong` is why there is none."""

    status_code: int
    document: Mapping[str, Any] = field(default_factory=dict)
    wrong: str = ""
    content: bytes = b""

    def json(self) -> Mapping[str, Any]:
        return self.document


class Adapter(HTTPAdapter):
    """Asks once only, and trusts whom the requests to other servers trust."""

    def __init__(self, address: Address, access: Credentials) -> None:
        self._context = context(access, address.scheme == "https")
        super().__init__()

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **options: Any) -> None:
        """Connect by our own context."""
        super().init_poolmanager(connections, maxsize, block, ssl_context=self._context, **options)

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        """Connect by our own context through a proxy too."""
        return super().proxy_manager_for(proxy, ssl_context=self._context, **options)


class Session(requests.Session):
    """Asks with forms and follows no redirect: credentials must not go elsewhere.

    `seconds` is what a server may take to begin an answer; a whole one may take twice as much.
    """

    def __init__(self, shown: str, address: Address, access: Credentials, seconds: float) -> None:
        super().__init__()
        self.warnings: dict[str, None] = {}
        self._shown, self._time, self._takes_forms = shown, seconds, True
        self.trust_env = not address.is_loopback  # proxies
        self.auth = lambda request: request  # no .netrc
        own = {"Authorization": address.authorization} if address.authorization else {}
        self._has_credentials = bool(access.headers or own)
        self.headers.update({"User-Agent": f"diag/{__version__}", **access.headers, **own})
        self.verify = access.ca_file or True
        mutual = address.scheme == "https" and not access.client_cert
        self._reset_hint = f"if it wants a client certificate, {failure.MUTUAL}" if mutual else ""

    def resolve_redirects(self, *_: Any, **__: Any) -> Iterator[Any]:
        """None: where one is not followed, its answer would be read to the end nevertheless."""
        return iter(())

    def request(self, method: str, url: str, params: Any = None, **_: Any) -> Any:  # type: ignore[override]
        """Ask, and ask again where somebody in between was short of breath. Called by the library alone."""
        for pause in (*_PAUSES, None):
            reply = self._in_time(method, url, params)
            lasts = reply.status_code not in _AGAIN or (reply.document.get("error") and reply.status_code != _BUSY)
            if lasts or pause is None:
                return self._good(reply)
            time.sleep(pause)
        raise AssertionError("the last round returns")

    def _in_time(self, method: str, url: str, params: Any) -> _Reply:
        """Ask in a thread of its own: a name server, or an answer in drips, keeps to no limit of a socket."""
        replies: SimpleQueue[_Reply | Failure] = SimpleQueue()
        Thread(target=lambda: replies.put(self._reply(method, url, params)), daemon=True).start()
        try:
            reply = replies.get(timeout=2 * self._time)
        except Empty:
            reply = Failure(f"gave no whole answer within {2 * self._time:g} s", _SMALLER)
        if isinstance(reply, Failure):
            raise Unreachable(failure.sentence(self._shown, reply)) from reply
        return reply

    def _reply(self, method: str, url: str, params: Any) -> _Reply | Failure:
        try:
            return self._once(method, url, params)
        except Failure as error:
            return error
        except (OSError, ValueError) as error:  # those of requests are the former, an odd name is the latter
            return self._failure(error)

    def _once(self, method: str, url: str, params: Any) -> _Reply:
        post = method == "POST" and self._takes_forms
        how = {"data" if post else "params": params, "verify": self.verify}  # else the environment's goes before ours
        limits = (min(CONNECT, self._time), self._time)
        with super().request(
            "POST" if post else "GET", url, stream=True, allow_redirects=False, timeout=limits, **how
        ) as response:
            body = self._body(response)
        if post and response.status_code in _NO_POST:
            self._takes_forms = False
            return self._once(method, url, params)
        return _read(response, body)

    def _body(self, response: requests.Response) -> bytes:
        end, body = time.monotonic() + 2 * self._time, bytearray()
        for chunk in response.iter_content(_CHUNK):
            body += chunk
            if len(body) > MOST_BYTES:
                raise Failure(f"answered more than {MOST_BYTES >> 20} MiB", _SMALLER)
            if time.monotonic() > end:
                break  # nobody waits any more
        return bytes(body)

    def _good(self, reply: _Reply) -> _Reply:
        """The reply of a query that was answered; Refused with the server's sentence where it was not."""
        status, document = reply.status_code, reply.document
        if status in (401, 403):
            raise Unreachable(failure.sentence(self._shown, failure.of_credentials(status, self._has_credentials)))
        if document.get("error"):
            raise Refused(status, document)
        if reply.wrong or status != 200:
            hint = WHICH if status < 500 and status != _BUSY else "is it starting, or overloaded?"
            raise Unreachable(failure.sentence(self._shown, Failure(reply.wrong or f"answered HTTP {status}", hint)))
        warnings = map(str, document.get("warnings") or ())
        self.warnings |= dict.fromkeys(each for each in warnings if not each.startswith(_ADVICE))
        return reply

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, _OF_PROXIES):
            return Failure("cannot be reached through the proxy", "check http_proxy, https_proxy and no_proxy")
        if isinstance(error, requests.ConnectTimeout):
            return Failure(f"no connection within {min(CONNECT, self._time):g} s", "is the host up?", answered=False)
        if isinstance(error, requests.ReadTimeout):
            return Failure(f"took the connection and sent nothing for {self._time:g} s", _OVERLOADED)
        if "Read timed out" in str(error):
            return Failure(f"stopped for {self._time:g} s in the middle of its answer", _OVERLOADED)
        causes = list(failure.causes(error))
        causes += [each for cause in causes for each in cause.args if isinstance(each, BaseException)]
        if any(isinstance(each, ssl.SSLEOFError) for each in causes):
            return Failure("broke off the encrypted connection", self._reset_hint)
        return failure.of_tls(causes) or failure.of_network(causes, self._reset_hint) or _of_protocol(causes)


def _of_protocol(causes: Sequence[BaseException]) -> Failure:
    """What was wrong with what was said, where the connection was not."""
    found = (meaning for kind, meaning in _BROKEN if any(isinstance(each, kind) for each in causes))
    return next(found, Failure("gave no usable answer", WHICH))


def _read(response: requests.Response, body: bytes) -> _Reply:
    """The JSON object of an answer, or what it was instead."""
    status, where = response.status_code, response.headers.get("Location")
    if where and response.is_redirect:
        place = printable(_USER.sub("//", _API.split(where)[0]), 100) or "/"
        return _Reply(status, wrong=f"redirects to {place}, which is not followed")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return _Reply(status, wrong=f"answered {_kind(body)} instead of JSON (HTTP {status})")
    if not isinstance(document, dict) or not {"data", "error"} & document.keys():
        return _Reply(status, wrong=NO_API)
    return _Reply(status, document)


def _kind(body: bytes) -> str:
    if body.lstrip()[:1] == b"<":
        return "an HTML page"
    return f'"{printable(body[:60].decode("utf-8", "replace").strip(), 60)}"' if body.strip() else "nothing"
