"""Local receivers of Alertmanager's messages: Slack, PagerDuty, Opsgenie and a webhook over HTTP, and a mail server."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any, NamedTuple


class Received(NamedTuple):
    """The messages that arrived, in their order: JSON documents by the path that they were posted to, and mails."""

    http: str
    smtp: str
    posts: list[tuple[str, Any]]
    mails: list[dict[str, str]]

    def of(self, path: str) -> list[Any]:
        return [post for there, post in [*self.posts] if there.startswith(path)]


@contextmanager
def listening() -> Iterator[Received]:
    """Receive messages on two ports of this host."""
    posts: list[tuple[str, Any]] = []
    mails: list[dict[str, str]] = []

    class Posts(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            body = b"{}" if self.path.startswith("/opsgenie") else b"ok"
            self.send_response(202 if self.path.startswith(("/opsgenie", "/pagerduty")) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    class Mails(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 test\r\n")
            for line in self.rfile:
                word = line.split()[0].upper() if line.split() else b""
                if word == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    mails.append(_mail(self.rfile))
                self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
                if word == b"QUIT":
                    return

    with ExitStack() as stack:
        servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), Posts),
            ThreadingTCPServer(("127.0.0.1", 0), Mails),
        ]
        for server in servers:
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, daemon=True).start()
        http, smtp = ("{}:{}".format(*server.server_address) for server in servers)
        yield Received(f"http://{http}", smtp, posts, mails)


def _mail(lines: Any) -> dict[str, str]:
    """Return subject, text and HTML of a mail, which a line with one dot ends."""
    raw = b""
    for line in lines:
        if line == b".\r\n":
            break
        raw += line.removeprefix(b".") if line.startswith(b"..") else line
    mail = message_from_bytes(raw, policy=policy.default)
    parts = {
        part.get_content_type(): part.get_content().replace("\r\n", "\n")
        for part in mail.walk()
        if not part.is_multipart()
    }
    return {"subject": str(mail["Subject"]), "text": parts.get("text/plain", ""), "html": parts.get("text/html", "")}
