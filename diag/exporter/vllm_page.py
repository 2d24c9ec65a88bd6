"""vLLM's own page: scrape it, pass it on byte for byte, and read the server's configuration off it."""

import os
import time
from collections import deque
from dataclasses import dataclass, replace

from diag.core.formatting import printable
from diag.core.metric_prefix import CACHE_INFO, OWN, named_as_ours
from diag.exposition import NotMetrics, is_cut, lines_from, sample
from diag.http.address import Address, from_environment
from diag.http.client import Client
from diag.http.failure import Failure, WrongAnswer
from diag.http.vllm_server import VllmServer
from diag.log.corroboration import Measurement, measure
from diag.vllm.running_config import Config, ServerFacts, from_page

REMEMBERED = 300.0
"""Seconds for which two servers behind one port stay reported."""
HEAD_START = 0.005
"""Seconds to wait at most until the request is sent."""
MOST_STARTS = 64
"""Start times of earlier servers that are kept."""
_INFO = f"{CACHE_INFO}{{".encode()
_START = b"process_start_time_seconds "


class CollectorFailed(Exception):
    """A collection without a result; the message is a sentence that gives the reason.

    `answered` is True if the collector's source responded all the same.
    """

    def __init__(self, sentence: str, answered: bool = False) -> None:
        super().__init__(sentence)
        self.answered = answered


@dataclass(frozen=True)
class Scraped:
    """One page; `up` if it has vLLM's metrics, a `problem` if it cannot be trusted.

    `renamed` is the prefix of these metrics instead of vLLM's own, "" if they have that. `health` is the HTTP status of
    vLLM's own answer to GET /health meanwhile, None if it did not come in time; `unanswered` if the last one got none.
    """

    page: bytes
    up: bool
    problem: str
    config: Config
    facts: ServerFacts
    renamed: str = ""
    health: int | None = None
    unanswered: bool = False

    def measured(self, at: float) -> Measurement:
        """Return what the page, scraped at that unix time, and /health measure of their server."""
        seen = measure(at, named_as_ours(self.page)[0]) if self.up else Measurement(at, page=False, answers=True)
        return seen if self.health is None else seen._replace(health=self.health)


class PageReader:
    """Reads the pages of one server in turn, since changes from one to the next count too."""

    def __init__(self) -> None:
        self.start = b""
        self._earlier: deque[bytes] = deque(maxlen=MOST_STARTS)
        self._several_until = 0.0
        self._info: tuple[bytes, Config] = (b"", {})
        """The lines of cache_config_info, and the configuration in them."""
        self.unreadable: list[bytes] = []
        """Such lines that are no sample."""

    def read(self, page: bytes, facts: ServerFacts, health: int | None = None, unanswered: bool = False) -> Scraped:
        """Read a page; NotMetrics for half a page, and for a page of diag itself."""
        if not page.strip():
            raise NotMetrics("answered an empty page")
        if is_cut(page[page.rfind(b"\n") + 1 :]):
            raise NotMetrics("answered a page that ends in the middle of a line")
        if is_ours(page):
            raise NotMetrics("this is the page of a diag exporter: use the address of vLLM")

        start = lines_from(page, _START)
        if start != self.start:
            if start in self._earlier:  # a start time that returns belongs to another server behind the same port
                self._several_until = time.monotonic() + REMEMBERED
            self._earlier.append(self.start)
            self.start = start

        ours, prefix = named_as_ours(page)
        problem = ""
        if OWN.encode() not in ours:
            problem = "the page has no vLLM metrics: is this vLLM, started without --disable-log-stats?"
        elif time.monotonic() < self._several_until:
            problem = (
                "more than one server answers on this port (their start times alternate): give each its own exporter"
            )
        lines = lines_from(ours, _INFO)
        if lines != self._info[0]:
            infos: list[dict[str, str]] = []
            self.unreadable = []
            for line in lines.split(b"\n"):
                try:
                    infos.append(sample(line)[1])
                except ValueError:
                    self.unreadable += [line] if line.startswith(_INFO) else []
            self._info = lines, from_page(infos, len({info["engine"] for info in infos if "engine" in info}))
        return Scraped(page, OWN.encode() in ours, problem, self._info[1], facts, prefix, health, unanswered)


def health_alone(problem: str, server: VllmServer) -> Scraped:
    """Return what a server says that answers at /health while its page is missing."""
    return Scraped(b"", False, problem, {}, server.facts, health=server.health)


class PageScraper:
    """Scrapes one server for the exporter; used from one thread."""

    name = "vllm"

    def __init__(self, address: Address, timeout: float, launch: str = "") -> None:
        self.server = server(address, timeout, launch)
        self._reader = PageReader()
        self._facts_of: bytes | None = None

    def scrape(self) -> Scraped:
        """Scrape now; CollectorFailed with one sentence if there is no page of metrics."""
        try:
            page = self.server.page()
            health = self.server.health, self.server.unanswered
            scraped = self._reader.read(page, self.server.facts, *health)
            if self._facts_of != self._reader.start:  # a new or restarted server: fetch the facts that its page lacks
                self.server.fetch_facts()
                self._facts_of = self._reader.start
                scraped = self._reader.read(page, self.server.facts, *health)
        except (Failure, NotMetrics) as error:
            problem = f"{self.server.address.shown}: {error}"
            if self.server.health is None:
                raise CollectorFailed(problem, is_answer(error)) from error
            return health_alone(problem, self.server)

        page = scraped.page
        for line in self._reader.unreadable:  # for these, Prometheus would reject the whole page
            page = page.replace(line + b"\n", b"")
        if not self._reader.unreadable:
            return scraped
        first = printable(self._reader.unreadable[0].decode("utf-8", "replace"), 60)
        return replace(scraped, page=page, problem=scraped.problem or f"left out a line that is no metric: {first}")

    def wait_until_sent(self) -> None:
        """Wait until the request is sent, so that the host's collectors do not delay it."""
        if self.server.address.is_loopback:
            self.server.client.sent.wait(HEAD_START)


def is_answer(error: Failure | NotMetrics) -> bool:
    """Return True if something answered without metrics: an HTTP status, another page."""
    return isinstance(error, WrongAnswer | NotMetrics)


def server(address: Address, timeout: float, launch: str = "") -> VllmServer:
    """Return the server to scrape, with the credentials of the environment.

    On this host the connection is kept and the page comes uncompressed, which spares CPU time; elsewhere every scrape
    has its own connection: with a kept one, a second server on the same address would go unnoticed.
    """
    local, credentials = address.is_loopback, from_environment(os.environ)
    client = Client(address, credentials, timeout, keep=local, encoding="identity" if local else "gzip")
    return VllmServer(address, client, ServerFacts(launch=launch))


def is_ours(page: bytes) -> bool:
    """Return True if a diag exporter has served the page."""
    return b"\ndiag_build_info{" in page
