"""`diag exporter`: the page over HTTP or HTTPS, for Prometheus to scrape instead of vLLM's own."""

import socket
import ssl
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from diag.core.errors import BadUsage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Whatever is asked for: under OpenMetrics, Prometheus 2 and 3 would get names with another escaping."""
SHARE = 0.8
"""Of the time that Prometheus gives a scrape, what the parts may take."""
PATIENCE = 30.0
"""Seconds after which a client that says nothing is dropped."""
_TIMEOUT = "X-Prometheus-Scrape-Timeout-Seconds"


class PageSource(Protocol):
    """What the server needs: a page within so many seconds."""

    def page(self, seconds: float) -> bytes:
        """The whole page."""


@dataclass(frozen=True)
class Listen:
    """Where to listen; files in PEM format, "" for none."""

    host: str
    port: int
    cert: str = ""
    key: str = ""
    client_ca: str = ""


class Handler(BaseHTTPRequestHandler):
    """Answers GET of /metrics, and of / with where that is."""

    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    disable_nagle_algorithm = True
    wbufsize = -1

    def __init__(self, exporter: PageSource, limit: float, *args: object) -> None:
        self._exporter = exporter
        self._limit = limit
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer one request."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, CONTENT_TYPE, self._exporter.page(self._seconds()))
        elif path == "/":
            self._answer(200, "text/plain; charset=utf-8", b"diag exporter: the page is at /metrics\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", b"there is only /metrics here\n")

    def _seconds(self) -> float:
        try:
            scrape = float(self.headers.get(_TIMEOUT, ""))
        except ValueError:
            return self._limit
        return min(self._limit, SHARE * scrape) if scrape > 0 else self._limit

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: a scrape is no news."""


class PageServer(ThreadingHTTPServer):
    """A thread for each connection; a handshake is made there too, so that a silent client holds up nobody."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, listen: Listen, exporter: PageSource, limit: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        context = _tls(listen)
        try:
            super().__init__((listen.host, listen.port), partial(Handler, exporter, limit))
        except (OSError, OverflowError) as error:
            raise BadUsage(f"cannot listen on {listen.host}:{listen.port}: {error}") from error
        if context:
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client that goes away is no news, and a page never raises."""


def _tls(listen: Listen) -> ssl.SSLContext | None:
    if not listen.cert:
        if listen.key or listen.client_ca:
            raise BadUsage("--tls-key and --tls-client-ca need --tls-cert")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(listen.cert, listen.key or None, password="")
        if listen.client_ca:
            context.load_verify_locations(listen.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        files = ", ".join(file for file in (listen.cert, listen.key, listen.client_ca) if file)
        why = "not PEM, encrypted, or not a pair" if isinstance(error, ssl.SSLError) else error.strerror
        raise BadUsage(f"the TLS files {files} cannot be used: {why}") from error
    return context


def parse(listen: str) -> tuple[str, int]:
    """Host and port of "host:port", ":port" or "[::1]:port"; BadUsage where it is none."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) < 2**16:
        raise BadUsage(f"--listen takes host:port, not {listen!r}")
    return host.strip("[]") or "0.0.0.0", int(port)
