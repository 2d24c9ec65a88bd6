"""`diag exporter`: the page of one vLLM server and its host, its threads, from the command line to SIGTERM."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from diag.core.formatting import quantity
from diag.core.metric_families import Sample
from diag.exporter import http_server as serve
from diag.exporter.collector_thread import CollectorThread
from diag.exporter.log.tail import STDIN, parse_timezone
from diag.exporter.page import HostPage, host_collectors
from diag.exporter.vllm_page import PageScraper, server
from diag.http.address import parse
from diag.http.vllm_server import Probe

if TYPE_CHECKING:
    from diag.diagnosis.progress import Health

log = logging.getLogger("diag.exporter")
JUDGED_EVERY, TOO_OLD = 5.0, 60.0
"""Seconds between two scrapes for /livez and /readyz, and after which the last judgement says nothing any more."""
WHERE = b"diag exporter: the page is at /metrics, the probes are at /livez and /readyz\n"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ExporterOptions:
    """What the command line asked for; `timeout` and `probe` in seconds, a `probe` of 0 sends none."""

    vllm: str
    listen: str = "127.0.0.1:9400"
    log: str = ""
    log_timezone: str = ""
    gpus: str = ""
    launch: str = ""
    timeout: float = 8.0
    probe: float = 0.0
    tls: tuple[str, str, str] = ("", "", "")
    web_config: str = ""


class Exporter:
    """What the HTTP server asks for pages (its protocol `Responder`)."""

    def __init__(self, options: ExporterOptions) -> None:
        address = parse(options.vllm)
        self._vllm = PageScraper(address, options.timeout / 2, options.launch)
        self._vllm_thread = CollectorThread(self._vllm.name, self._vllm.scrape)
        self._host = host_collectors(
            address, _absolute(options.log), parse_timezone(options.log_timezone), gpu_names(options.gpus)
        )
        self._probe = ProbeThread(options.probe, self._vllm) if options.probe else None
        self._host_page = HostPage(self._host, self._probe.samples if self._probe else tuple)
        self._liveness = LivenessThread(address.instance, partial(self.page, options.timeout))

    def page(self, seconds: float) -> bytes:
        """The whole page, of what is there within so many seconds."""
        vllm = self._vllm_thread.collect()
        self._vllm.wait_until_sent()
        collections = self._host_page.collect()
        return self._host_page.page(vllm.result(seconds), collections, seconds)

    def answer(self, path: str, seconds: float) -> serve.Answer:
        """The page at /metrics, the probes, and at / where they are."""
        if path == "/metrics":
            return serve.Answer(200, self.page(seconds), serve.CONTENT_TYPE)
        if path == "/livez":
            health = self._liveness.health()
            return serve.Answer(200 if health.alive else 503, f"{health.liveness}\n".encode())
        if path == "/readyz":
            health = self._liveness.health()
            return serve.Answer(200 if health.ready else 503, f"{health.readiness}\n".encode())
        return serve.Answer(200 if path == "/" else 404, WHERE)

    def start(self) -> None:
        """Start what goes on between the scrapes: the log, Xid errors, the probe."""
        self._host.start()
        if self._probe:
            self._probe.start()


class ProbeThread:
    """Sends one request for one token every so many seconds, in a thread of its own."""

    def __init__(self, every: float, vllm: PageScraper) -> None:
        self._every = every
        self._vllm = vllm
        self._last: Probe | None = None

    def start(self) -> None:
        """Begin; the thread ends with the process."""
        threading.Thread(target=self._go_on, name="diag-probe", daemon=True).start()

    def _go_on(self) -> None:
        vllm = server(self._vllm.server.address, self._every)
        while True:
            if vllm.path or self._vllm.server.path:
                vllm.path = self._vllm.server.path
                self._last = vllm.probe(self._every)
            time.sleep(self._every)

    def samples(self) -> Sequence[Sample]:
        """The result of the last probe; nothing before the first."""
        return self._last.samples() if self._last else ()


class LivenessThread:
    """Judges a page every few seconds, in a thread that begins with the first question: most sites ask none."""

    def __init__(self, instance: str, page: Callable[[], bytes]) -> None:
        self._instance = instance
        self._page = page
        self._first = threading.Lock()
        self._health: Health | None = None
        self._judged = 0.0

    def health(self) -> "Health":
        """The last judgement; where that is long ago, nobody can tell."""
        from diag.diagnosis.progress import unknown_health  # with all that judges: 20 MiB

        if self._first.acquire(blocking=False):
            threading.Thread(target=self._go_on, name="diag-liveness", daemon=True).start()
        if self._health is None:
            return unknown_health("nothing has been judged yet")
        age = time.monotonic() - self._judged
        return (
            self._health if age < TOO_OLD else unknown_health(f"the last scrape ended {quantity(age, 'seconds')} ago")
        )

    def _go_on(self) -> None:
        from diag.diagnosis.progress import Liveness

        liveness = Liveness(self._instance, JUDGED_EVERY)
        while True:
            at = round(time.time() * 1000)
            try:
                self._health = liveness.observe(at, self._page())
                self._judged = time.monotonic()
            except Exception:  # whatever it is: a server must not be restarted for a defect of ours
                log.exception("the liveness of vLLM cannot be judged")
            time.sleep(JUDGED_EVERY)


def _absolute(log: str) -> str:
    """The log's file as those call it who read of it elsewhere; "-" is standard input."""
    return log if log in ("", STDIN) else str(Path(log).absolute())


def gpu_names(gpus: str) -> tuple[str, ...]:
    """The indices or UUIDs of `--gpus 0,1`."""
    return tuple(gpu.strip() for gpu in gpus.split(",") if gpu.strip())


def run(options: ExporterOptions) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    name, port = serve.parse(options.listen)
    exporter = Exporter(options)
    listener = serve.PageServer(serve.Listen(name, port, *options.tls, options.web_config), exporter, options.timeout)
    signal.signal(signal.SIGTERM, _stop)
    exporter.start()
    scheme = "https" if listener.files.access().context else "http"
    log.info("serving the metrics of %s at %s://%s/metrics", parse(options.vllm).shown, scheme, options.listen)
    if name in _LOOPBACK:
        log.info("only this host can reach that address; for a Prometheus elsewhere: --listen 0.0.0.0:%d", port)
    listener.serve_forever()


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
