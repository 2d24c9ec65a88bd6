"""`diag replay`: a recording as live servers, each on a port of its own, until Ctrl-C."""

import itertools
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from diag.core.errors import BadUsage
from diag.core.files import refused_in_words
from diag.core.formatting import listed, printable
from diag.exporter.http_server import CONTENT_TYPE, Answer, Listen, PageServer, parse
from diag.exporter.log.parse_line import TimedLine, read_timed_lines
from diag.sources.recording.reader import Recorded, read_pages
from diag.sources.recording.replay import Replay, restamped
from diag.vllm.server.config import ServerFacts

log = logging.getLogger("diag.replay")
TIMEOUT = 10.0
"""Seconds that an answer may take."""
LOG_EVERY = 0.2
"""Seconds between two looks at which lines of the log are due."""


@dataclass(frozen=True)
class ReplayOptions:
    """What the command line asked for; `log` is the file to write the recorded log to as time passes."""

    recording: Path
    listen: str
    speed: float
    log: Path | None
    at_end: Literal["again", "hold", "exit"]


class ReplayedServer:
    """Answers as vLLM does (the protocol `Responder` of the HTTP server)."""

    def __init__(self, replay: Replay, facts: ServerFacts) -> None:
        models = [{"id": name, "object": "model", "max_model_len": facts.max_model_len} for name in facts.models]
        said = {"/version": {"version": facts.version}, "/v1/models": {"object": "list", "data": models}}
        known = {"/version": facts.version, "/v1/models": models}
        self._replay = replay
        self._said = {path: json.dumps(what).encode() for path, what in said.items() if known[path]}

    def answer(self, path: str, seconds: float) -> Answer:
        """Its page, and its version and models where they are known; /health is always 200, as vLLM's is."""
        if path == "/metrics":
            scrape = self._replay.at(time.time())
            failed = f"this scrape failed when it was recorded: {scrape.failed}\n".encode()
            return Answer(503, failed) if scrape.failed else Answer(200, scrape.page, CONTENT_TYPE)
        if path == "/health":
            return Answer(200, b"")
        if path in self._said:
            return Answer(200, self._said[path], "application/json")
        return Answer(404, f"diag replay has {listed(['/metrics', '/health', *self._said])}\n".encode())


def run(options: ReplayOptions) -> None:
    """Serve until Ctrl-C, or until the recording ends where that was asked for."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    recorded = read_pages(options.recording)
    begin, again = time.time(), options.at_end == "again"
    replays = {name: Replay(pages, begin, options.speed, again) for name, pages in recorded.scrapes.items()}
    host, first_port = parse(options.listen)
    with ExitStack() as serving:
        lines = serving.enter_context(_log(options, recorded, next(iter(replays.values()))))
        for port, (name, replay) in enumerate(replays.items(), first_port):
            server = ReplayedServer(replay, recorded.facts[name])
            serving.enter_context(_listening(PageServer(Listen(host, port), server, TIMEOUT)))
            log.info("%s is replayed at http://%s:%d/metrics", printable(name), host, port)
        end = max(replay.end for replay in replays.values()) if options.at_end == "exit" else math.inf
        while time.time() < end:
            next(lines)
            time.sleep(LOG_EVERY)


@contextmanager
def _listening(server: PageServer) -> Iterator[None]:
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


@contextmanager
def _log(options: ReplayOptions, recorded: Recorded, replay: Replay) -> Iterator[Iterator[None]]:
    """What writes the lines that are due, each time it is asked for the next time; the log is told once."""
    if options.log is None:
        yield itertools.repeat(None)
        return
    if not recorded.log.is_file():
        raise BadUsage(f"{options.recording} has no {recorded.log.name}: leave out --log")
    with refused_in_words(options.log), options.log.open("a", encoding="utf-8") as file:
        yield _writing(file, read_timed_lines(recorded.log, recorded.log_zone, replay.first), replay)


def _writing(file: TextIO, lines: Sequence[TimedLine], replay: Replay) -> Iterator[None]:
    rest = deque(lines)
    while True:
        while rest and replay.moment(rest[0].at) <= time.time():
            line = rest.popleft()
            file.write(restamped(line.text, replay.moment(line.at)) + "\n")
        file.flush()
        yield
