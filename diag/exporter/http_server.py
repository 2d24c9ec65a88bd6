"""An HTTP or HTTPS server of pages for a Prometheus to scrape, for `diag exporter` and `diag replay`.

It bounds the number of connections, the size of a request and the time that a client may take.
"""

import errno
import math
import resource
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, NamedTuple, Protocol

from diag.core.errors import BadUsage
from diag.exporter.web_config import AccessFiles, TlsFiles

MOST = 64
"""Connections at a time, a thread for each. A Prometheus needs one."""
FULL_SECONDS = 0.1
"""Seconds without a new connection after there was no file descriptor for one."""
PATIENCE = 30.0
"""Seconds that a client has to send its next request, and then to take the response."""


@dataclass
class _Open:
    until: float
    is_asking: bool = True


class Connections:
    """Open connections, by socket. Dropping one shuts its socket down, which ends its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Open] = {}

    def admit(self, connection: socket.socket) -> bool:
        """Add a connection; at the bound, drop the one that has waited longest for a request, or return False.

        Three quarters of the file descriptors stay for what the page is made of.
        """
        most = min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        with self._lock:
            if len(self._open) >= most and not self._drop_idle():
                return False
            self._open[connection] = _Open(time.monotonic() + PATIENCE)
            return True

    def make_room(self) -> None:
        """Drop the connection that has waited longest for a request, if there is one."""
        with self._lock:
            self._drop_idle()

    def _drop_idle(self) -> bool:
        waiting = [old for old, state in self._open.items() if state.is_asking]
        if waiting:
            self._drop(min(waiting, key=lambda old: self._open[old].until))
        return bool(waiting)

    def set_deadline(self, connection: socket.socket, seconds: float, is_asking: bool) -> None:
        """Start to wait for a request, or to answer one; its page takes `seconds` at most before the client reads."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = _Open(time.monotonic() + seconds + PATIENCE, is_asking)

    def forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(connection, None)

    def drop_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            for late in [connection for connection, state in self._open.items() if state.until < now]:
                self._drop(late)

    def _drop(self, connection: socket.socket) -> None:
        del self._open[connection]
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS: another thread is using that


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Sent whatever the client accepts: Prometheus 2 and 3 escape names differently under OpenMetrics."""
SHARE = 0.8
"""Share of the scrape's time-out that the collectors may take."""
LEAST_SCRAPE = 0.1
"""Shortest time-out of a scrape in seconds; a header below it is ignored."""
MOST_HEAD, MOST_BODY = 2**17, 2**16
"""Bytes of a request's lines, and of a body that is read and ignored; a longer one ends the connection."""
_TIMEOUT = "X-Prometheus-Scrape-Timeout-Seconds"


class Answer(NamedTuple):
    """Response to a path."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


class Responder(Protocol):
    """Answers the paths of a `PageServer`."""

    def answer(self, path: str, seconds: float) -> Answer:
        """Return the page of a path within so many seconds; 404 with the known paths for any other."""


@dataclass(frozen=True)
class Listen:
    """Address to listen on, files in PEM format, and Prometheus' web configuration file; "" for none."""

    host: str
    port: int
    cert: str = ""
    key: str = ""
    client_ca: str = ""
    web_config: str = ""


class Head:
    """Reads the lines of requests; those of one request have at most MOST_HEAD bytes together."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.left = MOST_HEAD
        self.read, self.close = file.read, file.close

    def readline(self, size: int) -> bytes:
        """Read the next line; LineTooLong beyond the bound."""
        line = self._file.readline(size)
        self.left -= len(line)
        if self.left < 0:
            raise LineTooLong("request")
        return line


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD with the pages of a `Responder`."""

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
        super().setup()
        self.rfile: Any = Head(self.rfile)

    def handle_one_request(self) -> None:
        self.rfile.left = MOST_HEAD
        self.server.connections.set_deadline(self.connection, 0, is_asking=True)
        super().handle_one_request()

    def do_GET(self) -> None:
        self._read_body()
        self.server.connections.set_deadline(self.connection, self._limit, is_asking=False)
        users = self.server.files.access().users
        if users and not users.accept(self.headers.get("Authorization", "")):
            self._answer(Answer(401, b"a user and a password are required\n"), ("WWW-Authenticate", "Basic"))
            return
        seconds = self._limit
        with suppress(ValueError):
            scrape = float(self.headers.get(_TIMEOUT, ""))
            if math.isfinite(scrape) and scrape >= LEAST_SCRAPE:
                seconds = min(self._limit, SHARE * scrape)
        self._answer(self._responder.answer(self.path.partition("?")[0], seconds))

    do_HEAD = do_GET  # noqa: N815

    def _read_body(self) -> None:
        """Read and ignore a body, which is no request; one that is too long ends the connection."""
        length = self.headers.get("Content-Length", "0")
        if length == "0" and "Transfer-Encoding" not in self.headers:
            return
        self.close_connection = True
        if length.isascii() and length.isdigit() and len(length) < 9:
            self.rfile.read(min(int(length), MOST_BODY))  # closing with unread bytes may lose the response

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse an invalid request and end the connection; the response echoes nothing of it."""
        self.close_connection = True
        self.request_version = self.protocol_version  # an invalid head counts as HTTP/0.9, which has no status line
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
        """Return the header `Server`, without versions."""
        return "diag"

    def log_message(self, *_: object) -> None:
        """Log no scrape."""


class PageServer(ThreadingHTTPServer):
    """Serves each connection in a thread, TLS handshake included, so that an idle client cannot block others."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, listen: Listen, responder: Responder, limit: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self.connections = Connections()
        tls, files = None, (listen.cert, listen.key, listen.client_ca)
        if listen.web_config and any(files):
            raise BadUsage("--web.config.file sets TLS: leave out --tls-cert, --tls-key and --tls-client-ca")
        if listen.cert:
            tls = TlsFiles(*files, ssl.CERT_REQUIRED if listen.client_ca else ssl.CERT_NONE)
        elif any(files):
            raise BadUsage("--tls-key and --tls-client-ca need --tls-cert")
        self.files = AccessFiles(listen.web_config, tls)
        try:
            super().__init__((listen.host, listen.port), partial(Handler, responder, limit))
        except (OSError, OverflowError) as error:
            raise BadUsage(f"cannot listen on {listen.host}:{listen.port}: {error}") from error

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection, with the current certificate files."""
        try:
            connection, address = super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the client stays in the queue, and is asked for again
                self.connections.make_room()
                time.sleep(FULL_SECONDS)
            raise
        context = self.files.access().context
        if context:
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, unless there are too many."""
        if self.connections.admit(request):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        self.connections.forget(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Drop slow clients, twice a second."""
        self.connections.drop_late()

    def handle_error(self, *_: object) -> None:
        """Log no client that disconnects; a page never raises."""


def parse(listen: str) -> tuple[str, int]:
    """Parse "host:port", ":port" or "[::1]:port"; BadUsage for any other text."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) < 2**16:
        raise BadUsage(f"--listen takes host:port, not {listen!r}")
    return host.strip("[]") or "0.0.0.0", int(port)
