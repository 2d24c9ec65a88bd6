"""Servers of pages: `diag exporter`, the page of one vLLM server and its host, and `diag replay`, a recording as live
servers, each on a port of its own.
"""

import json
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from diag.core.errors import BadUsage
from diag.core.files import refused_in_words
from diag.core.formatting import listed, printable, quantity
from diag.core.metric_families import Sample
from diag.exporter import http_server as serve
from diag.exporter.nccl import parse_address
from diag.exporter.page import CollectorThread, HostPage, host_collectors
from diag.exporter.vllm_page import PageScraper, server
from diag.exposition import render
from diag.http.address import parse
from diag.http.vllm_server import Probe
from diag.log.corroboration import measure
from diag.log.tail import STDIN, parse_timezone

if TYPE_CHECKING:
    from diag.diagnosis.progress import Health, Liveness
    from diag.sources.recording.reader import Replay
    from diag.vllm.running_config import ServerFacts

log = logging.getLogger("diag.exporter")
replay_log = logging.getLogger("diag.replay")
JUDGED_EVERY, PATIENCE, TOO_OLD = 5.0, 6.0, 60.0
"""Seconds between two scrapes for /livez and /readyz, for which one waits, and after which a judgement is void."""
REPORTED_EVERY = 15.0
"""Seconds for which a health report is valid: judging takes half a second of CPU time."""
REPLAY_TIMEOUT = 10.0
"""Seconds that a response of a replayed server may take."""
LOG_EVERY = 0.2
"""Seconds between two checks which lines of the log are due."""
WHERE = b"diag exporter: the page is at /metrics, the probes are at /livez and /readyz, the report at /health_report\n"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ExporterOptions:
    """Options of the command line; `timeout` and `probe` in seconds, a `probe` of 0 sends none."""

    vllm: str
    listen: str = "127.0.0.1:9400"
    log: str = ""
    log_timezone: str = ""
    nccl_ras: str = ""
    gpus: str = ""
    launch: str = ""
    timeout: float = 8.0
    probe: float = 0.0
    tls: tuple[str, str, str] = ("", "", "")
    web_config: str = ""


class Exporter:
    """Answers the paths of the exporter (the protocol `Responder` of the HTTP server)."""

    def __init__(self, options: ExporterOptions) -> None:
        address = parse(options.vllm)
        self._vllm = PageScraper(address, options.timeout / 2, options.launch)
        self._vllm_thread = CollectorThread(self._vllm.name, self._vllm.scrape)
        is_file = options.log not in ("", STDIN)
        log_file = str(Path(options.log).absolute()) if is_file else options.log  # messages name it to other readers
        self._host = host_collectors(
            address,
            log_file,
            parse_timezone(options.log_timezone),
            tuple(filter(None, map(str.strip, options.gpus.split(",")))),
            parse_address(options.nccl_ras),
        )
        self._probe = ProbeThread(options.probe, self._vllm) if options.probe else None
        self._host_page = HostPage(self._host, render, self._probe.samples if self._probe else tuple)
        self._liveness = LivenessThread(address.instance, partial(self.page, min(options.timeout, PATIENCE)))

    def page(self, seconds: float) -> bytes:
        """Return the page, from the collectors that finish within `seconds`."""
        vllm = self._vllm_thread.collect()
        self._vllm.wait_until_sent()
        collections = self._host_page.collect()
        scraped = vllm.result(seconds)
        own = scraped.value.page if scraped.value else b""
        return b"".join([own, *self._host_page.parts(scraped, collections, seconds)])

    def answer(self, path: str, seconds: float) -> serve.Answer:
        """Return the page at /metrics, the probes, the health report, and a list of these paths at /."""
        if path == "/metrics":
            return serve.Answer(200, self.page(seconds), serve.CONTENT_TYPE)
        if path == "/livez":
            health = self._liveness.health()
            return serve.Answer(200 if health.alive else 503, f"{health.liveness}\n".encode())
        if path == "/readyz":
            health = self._liveness.health()
            return serve.Answer(200 if health.ready else 503, f"{health.readiness}\n".encode())
        if path == "/health_report":
            return serve.Answer(200, self._liveness.report().encode(), "application/json")
        return serve.Answer(200 if path == "/" else 404, WHERE)

    def start(self) -> None:
        """Start the threads that work between the scrapes: the log, Xid errors, the probe."""
        self._host.start()
        if self._probe:
            self._probe.start()


class ProbeThread:
    """Sends one request for one token every `every` seconds, in a thread of its own."""

    def __init__(self, every: float, vllm: PageScraper) -> None:
        self._every = every
        self._vllm = vllm
        self._last: Probe | None = None

    def start(self) -> None:
        """Start the thread, which ends with the process."""
        threading.Thread(target=self._repeat, name="diag-probe", daemon=True).start()

    def _repeat(self) -> None:
        vllm = server(self._vllm.server.address, self._every)
        while True:
            if vllm.path or self._vllm.server.path:
                vllm.path = self._vllm.server.path
                self._last = vllm.probe(self._every)
            time.sleep(self._every)

    def samples(self) -> Sequence[Sample]:
        """Return the samples of the last probe; none before the first."""
        return self._last.samples() if self._last else ()


class LivenessThread:
    """Judges a page every few seconds, in a thread that starts with the first probe: most sites send none."""

    def __init__(self, instance: str, page: Callable[[], bytes]) -> None:
        self._instance = instance
        self._page = page
        self._first = threading.Lock()
        self._health: Health | None = None
        self._judged = 0.0
        self._liveness: Liveness | None = None
        self._pages, self._reporting = threading.Lock(), threading.Lock()
        self._report, self._reported = "", -math.inf

    def report(self) -> str:
        """Return the health report on the pages that are kept; they are judged at most every REPORTED_EVERY seconds."""
        from diag.commands.observe import judge_observation, site
        from diag.report import json as as_json

        health = self.health()
        with self._reporting:
            if self._health is None or self._liveness is None:
                return as_json.health_without_data(self._instance, health.liveness)
            if time.monotonic() - self._reported >= REPORTED_EVERY:
                contract, incidents = site(None, None)
                with self._pages:
                    seen = self._liveness.seen()
                report = judge_observation(seen, contract, incidents).report
                self._report, self._reported = as_json.render_health(report, contract.site), time.monotonic()
            return self._report

    def health(self) -> "Health":
        """Return the last judgement; unknown if it is too old."""
        from diag.diagnosis.progress import unknown_health

        if self._first.acquire(blocking=False):
            threading.Thread(target=self._repeat, name="diag-liveness", daemon=True).start()
        if self._health is None:
            return unknown_health("nothing has been judged yet")
        age = time.monotonic() - self._judged
        return (
            self._health if age < TOO_OLD else unknown_health(f"the last scrape ended {quantity(age, 'seconds')} ago")
        )

    def _repeat(self) -> None:
        from diag.diagnosis.progress import Liveness

        liveness = self._liveness = Liveness(self._instance, JUDGED_EVERY)
        while True:
            at = round(time.time() * 1000)
            begun = time.monotonic()
            try:
                page = self._page()
                with self._pages:
                    self._health = liveness.observe(at, page)
                self._judged = time.monotonic()
            except Exception:  # of any kind: a defect of diag must not restart a server
                log.exception("the liveness of vLLM cannot be judged")
            time.sleep(max(1.0, begun + JUDGED_EVERY - time.monotonic()))


def run(options: ExporterOptions) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    name, port = serve.parse(options.listen)
    exporter = Exporter(options)
    listener = serve.PageServer(serve.Listen(name, port, *options.tls, options.web_config), exporter, options.timeout)

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    exporter.start()
    scheme = "https" if listener.files.access().context else "http"
    log.info("serving the metrics of %s at %s://%s/metrics", parse(options.vllm).shown, scheme, options.listen)
    if name in _LOOPBACK:
        log.info("only this host can reach that address; for a Prometheus elsewhere: --listen 0.0.0.0:%d", port)
    listener.serve_forever()


# -- diag replay -------------------------------------------------------------------------------------------------------


class ReplayedServer:
    """Answers as vLLM does (the protocol `Responder` of the HTTP server)."""

    def __init__(self, replay: "Replay", facts: "ServerFacts") -> None:
        models = [{"id": name, "object": "model", "max_model_len": facts.max_model_len} for name in facts.models]
        self._replay = replay
        self._documents: dict[str, bytes] = {}
        if facts.version:
            self._documents["/version"] = json.dumps({"version": facts.version}).encode()
        if models:
            self._documents["/v1/models"] = json.dumps({"object": "list", "data": models}).encode()

    def answer(self, path: str, seconds: float) -> serve.Answer:
        """Return the page, the status of /health beside it, or the version and models, as far as they are known."""
        if path == "/metrics":
            scrape = self._replay.at(time.time())
            failed = f"this scrape failed when it was recorded: {scrape.failed}\n".encode()
            return serve.Answer(503, failed) if scrape.failed else serve.Answer(200, scrape.page, serve.CONTENT_TYPE)
        if path == "/health" and (health := measure(0.0, self._replay.at(time.time()).page).health):
            return serve.Answer(health, b"")
        if path in self._documents:
            return serve.Answer(200, self._documents[path], "application/json")
        return serve.Answer(404, f"diag replay has {listed(['/metrics', '/health', *self._documents])}\n".encode())


def replay(
    recording: Path, listen: str, speed: float, log_file: Path | None, at_end: Literal["again", "hold", "exit"]
) -> None:
    """Serve a recording until Ctrl-C, or until it ends if `at_end` is "exit"; write its log to `log_file` meanwhile."""
    from diag.log.parse_line import TimedLine, read_timed_lines
    from diag.sources.recording.reader import Replay, read_pages, restamped

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    recorded = read_pages(recording)
    begin, again = time.time(), at_end == "again"
    replays = {name: Replay(pages, begin, speed, again) for name, pages in recorded.scrapes.items()}
    first = next(iter(replays.values()))
    host, first_port = serve.parse(listen)
    with ExitStack() as serving:
        file, lines = None, deque[TimedLine]()
        if log_file:
            if not recorded.log.is_file():
                raise BadUsage(f"{recording} has no {recorded.log.name}: leave out --log")
            serving.enter_context(refused_in_words(log_file))
            file = serving.enter_context(log_file.open("a", encoding="utf-8"))
            lines.extend(read_timed_lines(recorded.log, recorded.log_zone, first.first))
        for port, (name, replayed) in enumerate(replays.items(), first_port):
            responder = ReplayedServer(replayed, recorded.facts[name])
            listener = serving.enter_context(serve.PageServer(serve.Listen(host, port), responder, REPLAY_TIMEOUT))
            threading.Thread(target=listener.serve_forever, daemon=True).start()
            serving.callback(listener.shutdown)
            replay_log.info("%s is replayed at http://%s:%d/metrics", printable(name), host, port)
        end = max(replayed.end for replayed in replays.values()) if at_end == "exit" else math.inf
        while time.time() < end:
            while file and lines and first.moment(lines[0].at) <= time.time():  # the log is not repeated
                line = lines.popleft()
                file.write(restamped(line.text, first.moment(line.at)) + "\n")
            if file:
                file.flush()
            time.sleep(LOG_EVERY)
