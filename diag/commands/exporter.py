"""The exporter of one vLLM server: its page, its threads, and its life from the command line to a signal."""

import logging
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from diag.core.metric_families import Sample
from diag.exporter import http_server as serve
from diag.exporter.host import host
from diag.exporter.log.timezone import zone
from diag.exporter.page import HostPage
from diag.exporter.part import PagePart
from diag.exporter.vllm_page import PageScraper, server
from diag.http.address import parse
from diag.http.vllm_server import Probe

log = logging.getLogger("diag.exporter")


@dataclass(frozen=True)
class ExporterOptions:
    """What the command line said; `timeout` and `probe` in seconds, `probe` 0 for none; "" for what was not named."""

    vllm: str
    listen: str = "127.0.0.1:9400"
    log: str = ""
    log_timezone: str = ""
    gpus: str = ""
    launch: str = ""
    timeout: float = 8.0
    probe: float = 0.0
    tls: tuple[str, str, str] = ("", "", "")


class Exporter:
    """Keeps the protocol `serve.Answering`."""

    def __init__(self, settings: ExporterOptions) -> None:
        address = parse(settings.vllm)
        self._vllm = PageScraper(address, settings.timeout / 2, settings.launch)
        self._host = host(address, settings.log, zone(settings.log_timezone), chosen(settings.gpus))
        self._part = PagePart(self._vllm.name, self._vllm.look)
        self._probe = Probing(settings.probe, self._vllm) if settings.probe else None
        self._beside = HostPage(self._host, self._probe.samples if self._probe else tuple)

    def page(self, seconds: float) -> bytes:
        """The whole page."""
        look = self._part.look()
        self._vllm.wait_until_sent()
        looks = self._beside.look()
        return self._beside.page(look.outcome(seconds), looks, seconds)

    def start(self) -> None:
        """Start what goes on between the scrapes: the log, Xid errors, the probe."""
        self._host.start()
        if self._probe:
            self._probe.start()


class Probing:
    """One request for one token every so many seconds, in a thread of its own."""

    def __init__(self, every: float, vllm: PageScraper) -> None:
        self._every = every
        self._vllm = vllm
        self._last: Probe | None = None

    def start(self) -> None:
        """Begin; the thread ends with the process."""
        threading.Thread(target=self._go_on, name="diag-probe", daemon=True).start()

    def _go_on(self) -> None:
        own = server(self._vllm.server.address, self._every)
        while True:
            if own.path or self._vllm.server.path:
                own.path = self._vllm.server.path
                self._last = own.probe(self._every)
            time.sleep(self._every)

    def samples(self) -> Sequence[Sample]:
        """How the last one went; nothing before the first."""
        return self._last.samples() if self._last else ()


def chosen(gpus: str) -> tuple[str, ...]:
    """The indices or UUIDs of `--gpus 0,1`."""
    return tuple(each.strip() for each in gpus.split(",") if each.strip())


def run(settings: ExporterOptions) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    name, port = serve.parse(settings.listen)
    exporter = Exporter(settings)
    listener = serve.PageServer(serve.Listen(name, port, *settings.tls), exporter, settings.timeout)
    signal.signal(signal.SIGTERM, _stop)
    exporter.start()
    scheme = "https" if settings.tls[0] else "http"
    log.info("the page of %s is at %s://%s/metrics", parse(settings.vllm).shown, scheme, settings.listen)
    listener.serve_forever()


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
