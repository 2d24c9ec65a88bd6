"""A real Alertmanager with the generated inhibition rules, and the pager that it calls."""

import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

Generated = Mapping[str, str]
"""What `diag generate` writes, by its path."""


@contextmanager
def pager() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook: its URL and every alert that arrived, with the unix time at which it `arrived` and its `page`."""
    arrived: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            post = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told = {"arrived": time.time(), "page": post.get("groupKey")}
            arrived.extend({**alert, **told} for alert in post["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield "http://{}:{}".format(*server.server_address), arrived
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def running(folder: Path, generated: Generated, config: str) -> Iterator[str]:
    """One with that configuration and the generated inhibition rules; yields host:port."""
    found = shutil.which("prometheus-alertmanager")
    if found is None:
        pytest.skip("no prometheus-alertmanager: .ci/components installs it")
    (folder / "alertmanager.yml").write_text(config + generated["alerts/inhibit_rules.yaml"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*free.getsockname())
    options = (f"--storage.path={folder}/am", f"--web.listen-address={address}", "--cluster.listen-address=")
    with (folder / "alertmanager.log").open("w") as log:
        command = [found, f"--config.file={folder}/alertmanager.yml", *options]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(30)


def snippet(generated: Generated, name: str) -> str:
    """A file as alerts/README.md shows it."""
    return re.search(rf"```\w+ {re.escape(name)}\n(.*?)```", generated["alerts/README.md"], re.DOTALL)[1]


def hasty(config: str, pages: str = "5s", tickets: str = "5s") -> str:
    """The configuration with short waits for other alerts of the same group; of tickets, also for a page."""
    assert "group_wait: 5m" in config and "group_wait: 30s" in config
    return config.replace("group_wait: 5m", f"group_wait: {tickets}").replace("group_wait: 30s", f"group_wait: {pages}")
