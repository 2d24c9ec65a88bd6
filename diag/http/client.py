"""The HTTP client: requests to one server, bounded in time and size, directly or through a proxy of the environment.

http.client has no defence against a hostile server: a response that arrives in drips, has any size, expands to a
thousand times its size, or redirects credentials to another server. This client bounds each of these.
"""

import io
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection, IncompleteRead
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from diag import __version__
from diag.core.debug_log import timed
from diag.core.files import Gunzip
from diag.core.formatting import printable
from diag.exposition import MOST_BYTES
from diag.http import failure
from diag.http.address import PAGE, PORTS, WAYS, Address, Credentials, basic, is_within, without_user
from diag.http.failure import MUTUAL, VLLM, Failure, Hints, WrongAnswer
from diag.http.tls import tls

T = TypeVar("T")
CONNECT_SECONDS = 5.0
"""Time limit for a connection to one of a host's addresses."""
_CHUNK = 2**18
_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_ENCODINGS = ("", "identity", "gzip", "x-gzip")
_SAFE = "/?:@!$&'()*+,;=%-._~[]"


def run_in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread; the future holds its result or exception."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled; its result may be left unread

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name="diag-http", daemon=True).start()
    return future


class Deadline:
    """The time limits of one request: `wait` seconds for every next byte, `seconds` for the whole response."""

    def __init__(self, wait: float, seconds: float, hints: Hints) -> None:
        self.wait, self.hints, self.seconds = wait, hints, seconds
        self.begin = time.monotonic()

    def left(self) -> float:
        """Seconds until the deadline; Failure if it has passed."""
        left = self.begin + self.seconds - time.monotonic()
        if left <= 0:
            raise self.late
        return left

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.begin >= self.seconds

    def next(self) -> float:
        return min(self.wait, self.left())

    @property
    def late(self) -> Failure:
        """The failure to raise once the deadline has passed."""
        return failure.too_long(self.seconds, self.hints)


class TimedReads(io.RawIOBase):
    """A socket's bytes for one response; each wait and their sum are bounded."""

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._socket, self._deadline, self._begun = connected, deadline, False
        self._raw = connected.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read the bytes that are available; Failure if none arrives in time."""
        seconds, wait = self._deadline.next(), self._deadline.wait
        self._socket.settimeout(seconds)
        try:
            count = self._raw.readinto(buffer)
        except TimeoutError as error:
            if seconds < wait:
                raise self._deadline.late from error
            raise failure.silent(wait, self._begun) from error
        self._begun = True
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def timed_response(deadline: Deadline, connected: socket.socket, *args: Any, **options: Any) -> HTTPResponse:
    """Return an HTTPResponse that is read within the deadline, for `HTTPConnection.response_class`."""
    timed = SimpleNamespace(makefile=lambda mode: io.BufferedReader(TimedReads(connected, deadline)))
    return HTTPResponse(timed, *args, **options)  # type: ignore[arg-type]  # only makefile of a socket is used


@dataclass(frozen=True)
class Request:
    """One request: `path` includes the query; `seconds` limits the whole request, 0 for twice the wait."""

    path: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    most_bytes: int = MOST_BYTES
    seconds: float = 0.0
    follow: bool = True


@dataclass(frozen=True)
class Response:
    """A complete decoded response; `location` is set for a redirect; `first_byte`: seconds until the body began.

    The names of `headers` are in lower case.
    """

    status: int
    body: bytes
    location: str = ""
    first_byte: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy; the headers are a secret."""

    host: str
    port: int
    headers: dict[str, str] = field(default_factory=dict, repr=False)


def proxy_for(address: Address) -> Proxy | None:
    """Return the proxy that http_proxy, https_proxy or all_proxy names for an address; Failure if it is unsupported."""
    proxies = getproxies()
    text = proxies.get(address.scheme) or proxies.get("all")
    if not text or address.is_loopback or proxy_bypass(address.host) or proxy_bypass(address.instance):
        return None
    for exempt in proxies.get("no", "").split(","):  # no_proxy may also name networks
        with suppress(ValueError):
            if ipaddress.ip_address(address.host) in ipaddress.ip_network(exempt.strip(), strict=False):
                return None
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        host, port = url.hostname, url.port or 80
    except ValueError as error:
        raise failure.unusable_proxy() from error
    if url.scheme != "http" or not host:  # neither SOCKS nor a proxy behind TLS is supported
        raise failure.unusable_proxy()
    user = f"{unquote(url.username)}:{unquote(url.password or '')}" if url.username else ""
    return Proxy(host, port, {"Proxy-Authorization": basic(user)} if user else {})


class Client:
    """Requests to one server, from any thread.

    wait: seconds for a connection (at most CONNECT_SECONDS), and then for every next byte; a whole request may take
    twice as long. keep: keep connections open for the next request. encoding: accepted encodings of a body.
    Credentials belong to a path of the server: a redirect is followed only if it stays within `prefix`, or within the
    requested path.
    """

    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        wait: float,
        hints: Hints = VLLM,
        keep: bool = False,
        encoding: str = "gzip",
    ) -> None:
        self._address, self._wait, self._keep = address, wait, keep
        of_url = {"Authorization": address.authorization} if address.authorization else {}
        both = (credentials.headers, of_url) if address.has_password else (of_url, credentials.headers)
        secrets = _merged(*both)
        self._has_credentials = bool(secrets)
        standard = {"User-Agent": f"diag/{__version__}", "Accept": "*/*", "Accept-Encoding": encoding}
        self._headers = _merged(standard, secrets)
        self._context = tls(credentials) if address.scheme == "https" else None
        mutual = "" if credentials.client_cert else f"if it requires a client certificate, {MUTUAL}"
        self.hints = replace(hints, cut=mutual if self._context else "is it https?")
        self._idle: list[HTTPConnection] = []
        self.sent = threading.Event()
        """Set from the time a request is sent until its response has arrived."""

    def get(self, path: str, accept: str = "*/*", most_bytes: int = MOST_BYTES) -> Response:
        """Get a path and follow redirects within the same prefix; Failure if there is no complete response."""
        return self.send(Request(path, headers={"Accept": accept}, most_bytes=most_bytes))

    def post(self, path: str, document: object, seconds: float) -> Response:
        """Post JSON; `seconds` limits the whole request."""
        body = json.dumps(document).encode()
        return self.send(Request(path, "POST", {"Content-Type": "application/json"}, body, seconds=seconds))

    def send(self, request: Request) -> Response:
        """Send a request; Failure if there is no complete response."""
        seconds = request.seconds or 2 * self._wait
        deadline = Deadline(request.seconds or self._wait, seconds, self.hints)
        path = request.path
        try:
            for _ in range(_HOPS):
                with timed("request", f"{self._address.instance}{path.partition('?')[0]}"):
                    response = self._exchange(request, path, deadline)
                if not response.location or not request.follow:
                    return response
                path = self._redirect_target(request.path, path, response.location)
        except failure.EXCEPTIONS as error:
            raise failure.from_exception(error, self.hints) from error
        raise Failure("redirects in a loop", "use the address where the redirects should end")

    def refusal(self, status: int) -> Failure:
        """Return the failure for a response with an error status."""
        if status not in (401, 403):
            return WrongAnswer(f"answered HTTP {status}", self.hints.address)
        if self._has_credentials:
            return WrongAnswer(f"rejects the credentials (HTTP {status})", f"check {WAYS}")
        return WrongAnswer(f"requires credentials (HTTP {status})", f"set {WAYS}")

    def _exchange(self, request: Request, path: str, deadline: Deadline) -> Response:
        """Send one request and read its response; retry on a new connection if the server has closed a kept one."""
        try:
            kept = self._idle.pop()
        except IndexError:
            return self._send_over(self._connect(deadline), request, path, deadline)
        try:
            return self._send_over(kept, request, path, deadline)
        except (ConnectionError, ssl.SSLError):
            self._idle.clear()  # the other kept connections are as old
            return self._send_over(self._connect(deadline), request, path, deadline)

    def _send_over(self, connection: HTTPConnection, request: Request, path: str, deadline: Deadline) -> Response:
        reusable = False
        connection.sock.settimeout(deadline.next())
        connection.response_class = partial(timed_response, deadline)  # type: ignore[assignment]
        try:
            target, proxied = quote(path, safe=_SAFE) or "/", self._proxy if self._context is None else None
            if proxied:  # a proxy of plain HTTP requires the whole URL
                target = self._address.origin + target
            headers = _merged(self._headers, request.headers, proxied.headers if proxied else {})
            connection.request(request.method, target, request.body, headers)
            self.sent.set()
            raw = connection.getresponse()
            response = _read(raw, request.most_bytes, deadline)
            reusable = self._keep and not raw.will_close and not response.location
            raw.close()  # the connection accepts the next request only after this
            return response
        except TimeoutError as error:
            raise failure.silent(deadline.wait) from error
        finally:
            self.sent.clear()
            if reusable:
                self._idle.append(connection)
            else:
                connection.close()

    def _connect(self, deadline: Deadline) -> HTTPConnection:
        """Open a new connection; resolving the name, too, takes no longer than the whole request may."""
        seconds, address, proxy = min(CONNECT_SECONDS, deadline.wait), self._address, self._proxy
        host, port = (proxy.host, proxy.port) if proxy else (address.host, address.port)
        if self._context is None:
            connection = HTTPConnection(host, port, timeout=seconds)
        else:
            connection = HTTPSConnection(host, port, timeout=seconds, context=self._context)
            if proxy:
                connection.set_tunnel(address.host, address.port, proxy.headers)
        try:
            run_in_thread(connection.connect).result(deadline.left())
        except TimeoutError as error:
            if proxy:
                raise failure.unusable_proxy() from error
            if connection.sock:  # connected, but the TLS handshake got no response
                raise failure.silent(seconds) from error
            # the system's resolver ignores the time limit of a connection
            raise failure.no_connection(deadline.seconds if deadline.is_over else seconds) from error
        except OSError as error:
            if proxy and not isinstance(error, ssl.SSLError):
                raise failure.unusable_proxy() from error
            raise
        return connection

    @cached_property
    def _proxy(self) -> Proxy | None:
        return proxy_for(self._address)

    def prefix(self, path: str) -> str:
        """Return the prefix that credentials for a requested path are meant for: that of the address.

        It is the address's path without a final /metrics: /team-a for http://HOST/team-a/metrics, and the whole server
        for http://HOST.
        """
        return self._address.path.rstrip("/").removesuffix(PAGE)

    def _redirect_target(self, requested: str, path: str, location: str) -> str:
        """Return the path of a redirect; Failure for another server or prefix, which must not receive credentials."""
        try:
            target = urlsplit(urljoin(self._address.origin + path, location))
            port = target.port or PORTS.get(target.scheme)
            places = (self.prefix(requested), requested.partition("?")[0])
            is_inside = any(is_within(target.path, place) for place in places)
        except ValueError as error:
            raise Failure("redirects to an invalid URL") from error
        where = without_user(f"{target.scheme}://{target.netloc}")
        if (target.scheme, target.hostname, port) != (self._address.scheme, self._address.host, self._address.port):
            raise Failure(f"redirects to another server ({where}), which is not followed", "use that address")
        if not is_inside:
            elsewhere = without_user(where + target.path)
            raise Failure(f"redirects to another path ({elsewhere}), which is not followed", "use that address")
        return target.path + (f"?{target.query}" if target.query else "")


def _read(raw: HTTPResponse, most_bytes: int, deadline: Deadline) -> Response:
    """Read and decode the response; the body of a redirect is not read."""
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
    headers = {name.lower(): value for name, value in raw.getheaders()}
    return Response(raw.status, bytes(body), first_byte=first_byte, headers=headers)


def _merged(*headers: Mapping[str, str]) -> dict[str, str]:
    """Merge headers, whose names are case-insensitive; the last value counts."""
    return dict({name.lower(): (name, value) for mapping in headers for name, value in mapping.items()}.values())
