"""Small real servers on 127.0.0.1 that misbehave on purpose."""

import socket
import ssl
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 444.0
process_start_time_seconds 1.79522728772e+09
"""


@dataclass(frozen=True)
class Reply:
    body: bytes = PAGE
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/plain; version=0.0.4"})


@dataclass(frozen=True)
class Request:
    """`count` numbers the requests for this path from 1 on."""

    method: str
    path: str
    headers: Mapping[str, str]
    count: int
    body: bytes = b""


@dataclass
class Server:
    port: int
    scheme: str = "http"
    requests: list[Request] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def instance(self) -> str:
        return f"127.0.0.1:{self.port}"

    def asked(self, path: str) -> list[Request]:
        return [each for each in self.requests if each.path == path]


Answer = Callable[[Request], Reply | None]
"""None closes the connection without an answer."""


def on_metrics(*replies: Reply) -> Answer:
    """Answer /metrics with these replies in turn, the last one for ever; everything else is 404."""

    def answer(request: Request) -> Reply | None:
        if request.path != "/metrics":
            return Reply(b"", 404)
        return replies[min(request.count, len(replies)) - 1]

    return answer


def pages(*bodies: bytes) -> Answer:
    return on_metrics(*(Reply(each) for each in bodies))


@contextmanager
def serving(answer: Answer, context: ssl.SSLContext | None = None, keep: bool = False) -> Iterator[Server]:
    """Serve the answers; `keep` the connections open, as a Prometheus does."""
    counts: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1" if keep else "HTTP/1.0"
        disable_nagle_algorithm = True

        def handle_one(self) -> None:
            count = counts[self.path] = counts[self.path] + 1
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, dict(self.headers), count, body)
            server.requests.append(request)
            reply = answer(request)
            self.close_connection = not keep or reply is None
            if reply is not None:
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(reply.body)

        do_GET = do_POST = do_PATCH = handle_one  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with _Http(("127.0.0.1", 0), Handler) as http:
        if context is not None:
            http.socket = context.wrap_socket(http.socket, server_side=True)
        server = Server(http.server_address[1], "https" if context else "http")
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """A client that turns away is what these tests want."""


@contextmanager
def talking(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[Server]:
    """A server below HTTP: `talk` is called with each connection, and with an event that is set at the end."""
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            talk(connection, over)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            if over.is_set():
                connection.close()
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield Server(port)
        finally:
            over.set()
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join()


def hang(connection: socket.socket, over: threading.Event) -> None:
    """Take the connection and never answer."""
    over.wait()


def take(connection: socket.socket) -> None:
    """Take a whole request: who closes a connection with something unread resets it, and what was sent may be lost."""
    request = b""
    while b"\r\n\r\n" not in request:
        request += _more(connection)
    head, _, body = request.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
    while len(body) < length:
        body += _more(connection)


def _more(connection: socket.socket) -> bytes:
    received = connection.recv(65536)
    if not received:
        raise ConnectionError("the client has gone")
    return received


def drip(connection: socket.socket, over: threading.Event) -> None:
    """Answer one byte at a time, for ever."""
    take(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while not over.wait(0.05):
        connection.sendall(b"#")


def flood(connection: socket.socket, over: threading.Event) -> None:
    """Answer 200 MB, as fast as they are taken."""
    take(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    line = b"x 1\n" * 65536
    for _ in range(200 * 2**20 // len(line)):
        connection.sendall(line)


def break_off(connection: socket.socket, over: threading.Event) -> None:
    """Promise more than is sent."""
    take(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + PAGE)


def cut_off(connection: socket.socket, over: threading.Event) -> None:
    """End in the middle of a line, without a length that would tell."""
    take(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + PAGE[:-4])


def babble(connection: socket.socket, over: threading.Event) -> None:
    """Speak something else than HTTP."""
    take(connection)
    connection.sendall(b"220 mail.example ESMTP\r\n\r\n")


def slam(connection: socket.socket, over: threading.Event) -> None:
    """Close the connection without a word."""
    take(connection)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command = ["openssl", "req", "-x509", *kind, *subject, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def server_context(cert: Path, key: Path, clients: Path | None = None) -> ssl.SSLContext:
    """Return a TLS context; with `clients`, only clients with a certificate of that authority may connect."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    return context
