"""The connections of the exporter's server: how many there may be, and how long a client may take."""

import math
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import LineTooLong  # noqa: TID251  what the handler catches; no request is made
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, NamedTuple, Protocol

from diag.core.errors import BadUsage
from diag.exporter.web_config import AccessFiles, TlsFiles

MOST = 64
"""Connections at a time, a thread for each. A Prometheus takes one."""
PATIENCE = 30.0
"""Seconds that a client has to send its next request, and then to take the response."""


@dataclass
class _Open:
    until: float
    is_asking: bool = True


class Connections:
    """What is open, by its socket. A connection is dropped by shutting its socket down, and its thread then ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Open] = {}

    def admit(self, connection: socket.socket) -> bool:
        """Count a new one; where there are too many, the one that has waited longest for a request goes, if any."""
        with self._lock:
            waiting = [old for old, state in self._open.items() if state.is_asking]
            if len(self._open) >= MOST and not waiting:
                return False
            if len(self._open) >= MOST:
                self._drop(min(waiting, key=lambda old: self._open[old].until))
            self._open[connection] = _Open(time.monotonic() + PATIENCE)
            return True

    def asks(self, connection: socket.socket) -> None:
        """A request is awaited from now on."""
        self._set(connection, PATIENCE, True)

    def is_answered(self, connection: socket.socket, seconds: float) -> None:
        """A request is there whole; its page takes so many seconds at most, and then its client may take its time."""
        self._set(connection, seconds + PATIENCE, False)

    def _set(self, connection: socket.socket, seconds: float, is_asking: bool) -> None:
        with self._lock:
            if connection in self._open:
                self._open[connection] = _Open(time.monotonic() + seconds, is_asking)

    def forget(self, connection: socket.socket) -> None:
        """It is closed."""
        with self._lock:
            self._open.pop(connection, None)

    def drop_late(self) -> None:
        """Drop those that took too long."""
        now = time.monotonic()
        with self._lock:
            for late in [connection for connection, state in self._open.items() if state.until < now]:
                self._drop(late)

    def _drop(self, connection: socket.socket) -> None:
        del self._open[connection]
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS: another thread is using that


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Whatever is asked for: under OpenMetrics, Prometheus 2 and 3 would get names with another escaping."""
SHARE = 0.8
"""Of the time that Prometheus gives a scrape, what the parts may take."""
LEAST_SCRAPE = 0.1
"""Seconds; no Prometheus gives a scrape less."""
MOST_HEAD, MOST_BODY = 2**17, 2**16
"""Bytes of a request's lines, and of a body that is read to no use; a longer one ends the connection."""
_TIMEOUT = "X-Prometheus-Scrape-Timeout-Seconds"


class Answer(NamedTuple):
    """What a path is answered."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


class Responder(Protocol):
    """What the server asks."""

    def answer(self, path: str, seconds: float) -> Answer:
        """What is at a path, within so many seconds; 404 and what there is where nothing is."""


@dataclass(frozen=True)
class Listen:
    """Where to listen; files in PEM format, and one that Prometheus calls its web configuration; "" for none."""

    host: str
    port: int
    cert: str = ""
    key: str = ""
    client_ca: str = ""
    web_config: str = ""


class Head:
    """The lines of one request after another, none of them longer than MOST_HEAD in all."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.left = MOST_HEAD
        self.read, self.close = file.read, file.close

    def readline(self, size: int) -> bytes:
        """The next line; LineTooLong where it is one too many."""
        line = self._file.readline(size)
        self.left -= len(line)
        if self.left < 0:
            raise LineTooLong("request")
        return line


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of what a `Responder` has."""

    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    disable_nagle_algorithm = True
    wbufsize = -1
    server: "PageServer"

    def __init__(self, responder: Responder, limit: float, *args: object) -> None:
        self._responder = responder
        self._limit = limit
        super().__init__(*args)  # type: ignore[arg-type]

    def setup(self) -> None:
        """Read lines within bounds."""
        super().setup()
        self.rfile: Any = Head(self.rfile)

    def handle_one_request(self) -> None:
        """Await a request and answer it."""
        self.rfile.left = MOST_HEAD
        self.server.connections.asks(self.connection)
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer one request."""
        self._read_body()
        self.server.connections.is_answered(self.connection, self._limit)
        users = self.server.files.access().users
        if users and not users.accept(self.headers.get("Authorization", "")):
            self._answer(Answer(401, b"a user and a password are required\n"), ("WWW-Authenticate", "Basic"))
            return
        self._answer(self._responder.answer(self.path.partition("?")[0], self._seconds()))

    do_HEAD = do_GET  # noqa: N815

    def _read_body(self) -> None:
        """Read to no use what may follow the head: it is no request. What is too long ends the connection."""
        length = self.headers.get("Content-Length", "0")
        if length == "0" and "Transfer-Encoding" not in self.headers:
            return
        self.close_connection = True
        if length.isascii() and length.isdigit() and len(length) < 9:
            self.rfile.read(min(int(length), MOST_BODY))  # an answer may be lost where something was not read

    def _seconds(self) -> float:
        try:
            scrape = float(self.headers.get(_TIMEOUT, ""))
        except ValueError:
            return self._limit
        return min(self._limit, SHARE * scrape) if math.isfinite(scrape) and scrape >= LEAST_SCRAPE else self._limit

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is none; nothing of it is echoed, and the connection ends."""
        self.close_connection = True
        self.request_version = self.protocol_version  # of a head that is none it is 0.9, which has no status
        if code == 501:
            self._read_body()
            self._answer(Answer(405, b"only GET and HEAD are answered\n"), ("Allow", "GET, HEAD"))
        else:
            self._answer(Answer(code, b"this request is not answered\n"))

    def _answer(self, answer: Answer, *headers: tuple[str, str]) -> None:
        self.send_response(answer.status)
        closing = (("Connection", "close"),) if self.close_connection else ()
        for name, value in (
            ("Content-Type", answer.kind),
            ("Content-Length", str(len(answer.body))),
            *headers,
            *closing,
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else answer.body)

    def version_string(self) -> str:
        """What `Server` says: no version of anything."""
        return "diag"

    def log_message(self, *_: object) -> None:
        """Say nothing: a scrape is no news."""


class PageServer(ThreadingHTTPServer):
    """A thread for each connection; a handshake is made there too, so that a silent client holds up nobody."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, listen: Listen, responder: Responder, limit: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self.connections = Connections()
        self.files = AccessFiles(listen.web_config, _tls(listen))
        try:
            super().__init__((listen.host, listen.port), partial(Handler, responder, limit))
        except (OSError, OverflowError) as error:
            raise BadUsage(f"cannot listen on {listen.host}:{listen.port}: {error}") from error

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection, with the certificate that is in the files now."""
        connection, address = super().get_request()
        context = self.files.access().context
        if context:
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start its thread, where there is room for one more."""
        if self.connections.admit(request):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.connections.forget(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second: drop who is too slow."""
        self.connections.drop_late()

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client that goes away is no news, and a page never raises."""


def _tls(listen: Listen) -> TlsFiles | None:
    given = (listen.cert, listen.key, listen.client_ca)
    if listen.web_config and any(given):
        raise BadUsage("--web.config.file says all about TLS: leave out --tls-cert, --tls-key and --tls-client-ca")
    if not listen.cert:
        if any(given):
            raise BadUsage("--tls-key and --tls-client-ca need --tls-cert")
        return None
    return TlsFiles(*given, ssl.CERT_REQUIRED if listen.client_ca else ssl.CERT_NONE)


def parse(listen: str) -> tuple[str, int]:
    """Host and port of "host:port", ":port" or "[::1]:port"; BadUsage where it is none."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) < 2**16:
        raise BadUsage(f"--listen takes host:port, not {listen!r}")
    return host.strip("[]") or "0.0.0.0", int(port)
