"""The one HTTP client: requests to one server, bounded in time and size, by the standard library.

http.client leaves open what a hostile server makes use of: a response in drips, of any size, that unpacks to a
thousand times its size, or redirects that carry credentials elsewhere. This is where all of that is bounded.
"""

import json
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection, IncompleteRead
from urllib.parse import quote, urljoin, urlsplit

from diag import __version__
from diag.core.formatting import printable
from diag.exposition.lines import MOST_BYTES
from diag.http import failure
from diag.http.address import PORTS, Address, without_user
from diag.http.background import start
from diag.http.credentials import Credentials, tls
from diag.http.deadline import Deadline, timed_response
from diag.http.failure import VLLM, Failure, Hints
from diag.http.gunzip import Gunzip
from diag.http.proxy import Proxy, proxy_for

CONNECT_SECONDS = 5.0
"""At most for a connection to one of a host's addresses."""
_CHUNK = 2**18
_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_ENCODINGS = ("", "identity", "gzip", "x-gzip")
_SAFE = "/?:@!$&'()*+,;=%-._~[]"


@dataclass(frozen=True)
class Manner:
    """How requests to a server are made.

    wait: seconds for a connection (at most CONNECT_SECONDS), and then for every next byte; a whole request may take
    twice as long. keep: whether connections stay open for the next request. encoding: what a body may come in.
    """

    wait: float
    hints: Hints = VLLM
    keep: bool = False
    encoding: str = "gzip"


@dataclass(frozen=True)
class Request:
    """`path` has the query; `seconds` are for the whole request, 0 for twice the wait."""

    path: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    most_bytes: int = MOST_BYTES
    seconds: float = 0.0
    follow: bool = True


@dataclass(frozen=True)
class Response:
    """A whole response, decoded; `location` where it redirects; `first_byte`: seconds until its body began."""

    status: int
    body: bytes
    location: str = ""
    first_byte: float | None = None


class Client:
    """Requests to one server, from any thread."""

    def __init__(self, address: Address, credentials: Credentials, manner: Manner) -> None:
        self._address, self._manner = address, manner
        own = {"Authorization": address.authorization} if address.authorization else {}
        both = (credentials.headers, own) if address.has_password else (own, credentials.headers)
        secrets = _merged(*both)
        self._has_credentials = bool(secrets)
        standard = {"User-Agent": f"diag/{__version__}", "Accept": "*/*", "Accept-Encoding": manner.encoding}
        self._headers = _merged(standard, secrets)
        self._context = tls(credentials) if address.scheme == "https" else None
        self.hints = failure.for_server(manner.hints, address.scheme == "https", bool(credentials.client_cert))
        self._idle: list[HTTPConnection] = []
        self.sent = threading.Event()
        """Set from the moment a request is out until its response is in."""

    def get(self, path: str, accept: str = "*/*", most_bytes: int = MOST_BYTES) -> Response:
        """Get a path, redirects on the same server followed; Failure where there is no whole response."""
        return self.send(Request(path, headers={"Accept": accept}, most_bytes=most_bytes))

    def post(self, path: str, document: object, seconds: float) -> Response:
        """Post JSON; the whole request may take so many seconds."""
        body = json.dumps(document).encode()
        return self.send(Request(path, "POST", {"Content-Type": "application/json"}, body, seconds=seconds))

    def send(self, request: Request) -> Response:
        """Send a request; Failure where there is no whole response."""
        seconds = request.seconds or 2 * self._manner.wait
        deadline = Deadline(request.seconds or self._manner.wait, seconds, self.hints)
        path = request.path
        try:
            for _ in range(_HOPS):
                response = self._exchange(request, path, deadline)
                if not response.location or not request.follow:
                    return response
                path = self._same_server(path, response.location)
        except failure.EXCEPTIONS as error:
            raise failure.from_exception(error, self.hints) from error
        raise Failure("redirects in a loop", "use the address where the redirects should end")

    def refusal(self, status: int) -> Failure:
        """What a response with an error status means."""
        if status in (401, 403):
            return failure.of_credentials(status, self._has_credentials)
        return failure.WrongAnswer(f"answered HTTP {status}", self.hints.address)

    def _exchange(self, request: Request, path: str, deadline: Deadline) -> Response:
        """One request and its response; again over a new connection where one that was kept turns out to be closed."""
        try:
            kept = self._idle.pop()
        except IndexError:
            return self._over(self._connected(deadline), request, path, deadline)
        try:
            return self._over(kept, request, path, deadline)
        except (ConnectionError, ssl.SSLError):
            self._idle.clear()  # the others are as old
            return self._over(self._connected(deadline), request, path, deadline)

    def _over(self, connection: HTTPConnection, request: Request, path: str, deadline: Deadline) -> Response:
        reusable = False
        connection.sock.settimeout(deadline.next())
        connection.response_class = partial(timed_response, deadline)  # type: ignore[assignment]
        try:
            target, headers = self._head(path, request)
            connection.request(request.method, target, request.body, headers)
            self.sent.set()
            raw = connection.getresponse()
            response = _read(raw, request.most_bytes, deadline)
            reusable = self._manner.keep and not raw.will_close and not response.location
            raw.close()  # only then the connection takes the next request
            return response
        except TimeoutError as error:
            raise failure.silent(deadline.wait) from error
        finally:
            self.sent.clear()
            if reusable:
                self._idle.append(connection)
            else:
                connection.close()

    def _head(self, path: str, request: Request) -> tuple[str, dict[str, str]]:
        """Target and headers of the request: a proxy of plain HTTP takes the whole URL."""
        target, proxied = quote(path, safe=_SAFE) or "/", self._proxy if self._context is None else None
        if proxied:
            target = self._address.origin + target
        return target, _merged(self._headers, request.headers, proxied.headers if proxied else {})

    def _connected(self, deadline: Deadline) -> HTTPConnection:
        """A new connection, its socket open; a name server, too, has no more time than the whole request."""
        seconds = min(CONNECT_SECONDS, deadline.wait)
        connection = self._connection(seconds)
        try:
            start(connection.connect).result(deadline.left())
        except TimeoutError as error:
            if self._proxy:
                raise failure.of_proxy() from error
            raise _no_connection(connection, deadline, seconds) from error
        except OSError as error:
            if self._proxy and not isinstance(error, ssl.SSLError):
                raise failure.of_proxy() from error
            raise
        return connection

    def _connection(self, seconds: float) -> HTTPConnection:
        address, proxy = self._address, self._proxy
        host, port = (proxy.host, proxy.port) if proxy else (address.host, address.port)
        if self._context is None:
            return HTTPConnection(host, port, timeout=seconds)
        connection = HTTPSConnection(host, port, timeout=seconds, context=self._context)
        if proxy:
            connection.set_tunnel(address.host, address.port, proxy.headers)
        return connection

    @cached_property
    def _proxy(self) -> Proxy | None:
        return proxy_for(self._address)

    def _same_server(self, path: str, location: str) -> str:
        """The path of a redirect; credentials must not follow it to another server."""
        try:
            target = urlsplit(urljoin(self._address.origin + path, location))
            port = target.port or PORTS.get(target.scheme)
        except ValueError as error:
            raise Failure("redirects to an invalid URL") from error
        if (target.scheme, target.hostname, port) != (self._address.scheme, self._address.host, self._address.port):
            where = without_user(f"{target.scheme}://{target.netloc}")
            raise Failure(f"redirects to another server ({where}), which is not followed", "use that address")
        return target.path + (f"?{target.query}" if target.query else "")


def _no_connection(connection: HTTPConnection, deadline: Deadline, seconds: float) -> Failure:
    """It took too long: a name server keeps to no limit of ours, and after a connection TLS may be silent."""
    if connection.sock:
        return failure.silent(seconds)
    return failure.no_connection(deadline.seconds if deadline.is_over else seconds)


def _read(raw: HTTPResponse, most_bytes: int, deadline: Deadline) -> Response:
    """The whole response; of a redirect nobody needs the body."""
    location = raw.getheader("Location", "") if raw.status in _REDIRECTS else ""
    if location:
        return Response(raw.status, b"", location)
    encoding = raw.getheader("Content-Encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        raise Failure(f"answered in an encoding that was not requested ({printable(encoding, 20)})")
    gunzip = Gunzip() if "gzip" in encoding else None
    body, first_byte = bytearray(), None
    while chunk := raw.read1(_CHUNK):
        first_byte = first_byte or time.monotonic() - deadline.begin
        for part in gunzip.feed(chunk) if gunzip else (chunk,):
            body += part
            if len(body) > most_bytes:
                raise failure.too_large(most_bytes, deadline.hints)
    if raw.length or (gunzip and not gunzip.complete):
        raise IncompleteRead(b"")
    return Response(raw.status, bytes(body), first_byte=first_byte)


def _merged(*headers: Mapping[str, str]) -> dict[str, str]:
    """The headers together, whatever the case of their names; the last one counts."""
    found = {name.lower(): (name, value) for mapping in headers for name, value in mapping.items()}
    return dict(found.values())
