"""`diag exporter`: the page over HTTP or HTTPS, for Prometheus to scrape instead of vLLM's own."""

import math
import socket
import ssl
from dataclasses import dataclass
from functools import partial
from http.client import LineTooLong  # noqa: TID251  what the handler catches; no request is made
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, Protocol

from diag.core.errors import BadUsage
from diag.exporter.connections import PATIENCE, Connections
from diag.exporter.web_config import AccessFiles, TlsFiles

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Whatever is asked for: under OpenMetrics, Prometheus 2 and 3 would get names with another escaping."""
SHARE = 0.8
"""Of the time that Prometheus gives a scrape, what the parts may take."""
LEAST_SCRAPE = 0.1
"""Seconds; no Prometheus gives a scrape less."""
MOST_HEAD, MOST_BODY = 2**17, 2**16
"""Bytes of a request's lines, and of a body that is read to no use; a longer one ends the connection."""
LIVENESS, READINESS = PROBES = ("/livez", "/readyz")
_TIMEOUT = "X-Prometheus-Scrape-Timeout-Seconds"
_TEXT = "text/plain; charset=utf-8"


class PageSource(Protocol):
    """What the server asks."""

    def page(self, seconds: float) -> bytes:
        """The whole page, within so many seconds."""

    def health(self, path: str) -> tuple[bool, str]:
        """Whether the server is alive or ready, which of them a path of PROBES asks, and one sentence; at once."""


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
    """Answers GET and HEAD of /metrics, of the probes, and of / with where they are."""

    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    disable_nagle_algorithm = True
    wbufsize = -1
    server: "PageServer"

    def __init__(self, exporter: PageSource, limit: float, *args: object) -> None:
        self._exporter = exporter
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
            self._answer(401, _TEXT, b"a user and a password are required\n", ("WWW-Authenticate", "Basic"))
            return
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, CONTENT_TYPE, self._exporter.page(self._seconds()))
        elif path in PROBES:
            well, sentence = self._exporter.health(path)
            self._answer(200 if well else 503, _TEXT, f"{sentence}\n".encode())
        elif path == "/":
            self._answer(200, _TEXT, b"diag exporter: the page is at /metrics, the probes are at /livez and /readyz\n")
        else:
            self._answer(404, _TEXT, b"there are only /metrics, /livez and /readyz here\n")

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
            self._answer(405, _TEXT, b"only GET and HEAD are answered\n", ("Allow", "GET, HEAD"))
        else:
            self._answer(code, _TEXT, b"this request is not answered\n")

    def _answer(self, status: int, kind: str, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        closing = (("Connection", "close"),) if self.close_connection else ()
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers, *closing):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def version_string(self) -> str:
        """What `Server` says: no version of anything."""
        return "diag"

    def log_message(self, *_: object) -> None:
        """Say nothing: a scrape is no news."""


class PageServer(ThreadingHTTPServer):
    """A thread for each connection; a handshake is made there too, so that a silent client holds up nobody."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, listen: Listen, exporter: PageSource, limit: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self.connections = Connections()
        self.files = AccessFiles(listen.web_config, _tls(listen))
        try:
            super().__init__((listen.host, listen.port), partial(Handler, exporter, limit))
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
