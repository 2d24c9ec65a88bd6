"""vLLM's own page, byte for byte, and what it shows of the server."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diag.core.formatting import printable
from diag.core.metric_prefix import named_as_ours
from diag.exporter.collector_thread import CollectorFailed
from diag.exposition.lines import NotMetrics, is_cut, sample
from diag.http.address import Address
from diag.http.client import Client, Manner
from diag.http.credentials import from_environment
from diag.http.failure import Failure, WrongAnswer
from diag.http.vllm_server import VllmServer
from diag.vllm.server.config import Config, ServerFacts, from_page

REMEMBERED = 300.0
"""Seconds for which two servers behind one port stay reported."""
HEAD_START = 0.005
"""Seconds, where the request is not out before."""
_INFO = b"vllm:cache_config_info{"
_START = b"process_start_time_seconds "


@dataclass(frozen=True)
class Scraped:
    """One page; `up` where it has vLLM's metrics, a `problem` where it cannot be trusted all the same.

    `renamed` is what these metrics begin with instead of `vllm:`, "" where they do not.
    """

    page: bytes
    up: bool
    problem: str
    config: Config
    facts: ServerFacts
    renamed: str = ""


class PageReader:
    """Reads the pages of one server in turn: changes from one to the next count too."""

    def __init__(self) -> None:
        self.start = b""
        self._earlier: set[bytes] = set()
        self._several_until = 0.0
        self._info: tuple[bytes, Config] = (b"", {})
        self.unreadable: list[bytes] = []

    def read(self, page: bytes, facts: ServerFacts) -> Scraped:
        """Read a page; NotMetrics for what must not be passed on."""
        _refuse(page)
        self._watch_start(_lines(page, _START))
        ours, prefix = named_as_ours(page)
        return Scraped(page, b"vllm:" in ours, self._problem(ours), self._config(ours), facts, prefix)

    def _watch_start(self, start: bytes) -> None:
        """A start time that returns belongs to another server behind the same port."""
        if start == self.start:
            return
        if start in self._earlier:
            self._several_until = time.monotonic() + REMEMBERED
        self._earlier.add(self.start)
        self.start = start

    def _problem(self, page: bytes) -> str:
        if b"vllm:" not in page:
            return "the page has no vLLM metrics: is this vLLM, started without --disable-log-stats?"
        if time.monotonic() < self._several_until:
            return "more than one server answers on this port (their start times alternate): give each its own exporter"
        return ""

    def _config(self, page: bytes) -> Config:
        """Read off `vllm:cache_config_info` whenever it changed."""
        lines = _lines(page, _INFO)
        if lines != self._info[0]:
            infos = list(self._infos(lines))
            self._info = lines, from_page(infos, len({info["engine"] for info in infos if "engine" in info}))
        return self._info[1]

    def _infos(self, lines: bytes) -> Iterator[dict[str, str]]:
        """The labels of each line; one that is no sample costs itself."""
        self.unreadable = []
        for line in lines.split(b"\n"):
            try:
                yield sample(line)[1]
            except ValueError:
                self.unreadable += [line] if line.startswith(_INFO) else []


class PageScraper:
    """Scrapes one server for the exporter; used from one thread."""

    name = "vllm"

    def __init__(self, address: Address, timeout: float, launch: str = "") -> None:
        self.server = server(address, timeout, launch)
        self._reader = PageReader()
        self._facts_of: bytes | None = None

    def scrape(self) -> Scraped:
        """Scrape now; CollectorFailed with one sentence where there is no page of metrics."""
        try:
            scraped = self._reader.read(self.server.page(), self.server.facts)
            return self._readable(scraped if self._facts_of == self._reader.start else self._with_facts(scraped))
        except (Failure, NotMetrics) as error:
            raise CollectorFailed(f"{self.server.address.shown}: {error}", is_answer(error)) from error

    def _readable(self, scraped: Scraped) -> Scraped:
        """The page without the lines for which Prometheus would reject all of it, as far as they were read."""
        if not self._reader.unreadable:
            return scraped
        page = scraped.page
        for line in self._reader.unreadable:
            page = page.replace(line + b"\n", b"")
        shown = printable(self._reader.unreadable[0].decode("utf-8", "replace"), 60)
        return replace(scraped, page=page, problem=scraped.problem or f"left out a line that is no metric: {shown}")

    def wait_until_sent(self) -> None:
        """Wait until the request is on its way: what the host computes meanwhile must not hold it up."""
        if self.server.address.is_loopback:
            self.server.client.sent.wait(HEAD_START)

    def _with_facts(self, scraped: Scraped) -> Scraped:
        """A server that is new or was restarted is asked for what its page does not contain."""
        self.server.fetch_facts()
        self._facts_of = self._reader.start
        return self._reader.read(scraped.page, self.server.facts)


def is_answer(error: Failure | NotMetrics) -> bool:
    """Whether something answered, if not with metrics: an HTTP status, another page."""
    return isinstance(error, WrongAnswer | NotMetrics)


def server(address: Address, timeout: float, launch: str = "") -> VllmServer:
    """The server to scrape, with the credentials of the environment.

    On this host the connection is kept and the page comes uncompressed, which spares vLLM and us CPU time; elsewhere
    every scrape has its own connection: behind a kept one, a second server on the same address would go unnoticed.
    """
    local = address.is_loopback
    manner = Manner(timeout, keep=local, encoding="identity" if local else "gzip")
    client = Client(address, from_environment(os.environ), manner)
    return VllmServer(address, client, ServerFacts(launch=launch))


def _refuse(page: bytes) -> None:
    """NotMetrics for half a page, or a page of our own."""
    if not page.strip():
        raise NotMetrics("answered an empty page")
    if is_cut(page[page.rfind(b"\n") + 1 :]):
        raise NotMetrics("answered a page that ends in the middle of a line")
    if is_ours(page):
        raise NotMetrics("this is the page of a diag exporter: use the address of vLLM")


def is_ours(page: bytes) -> bool:
    """Whether an exporter of ours has served it."""
    return b"\ndiag_build_info{" in page


def _lines(page: bytes, beginning: bytes) -> bytes:
    """The lines of a page that begin like this; they stand together."""
    first = page.find(b"\n" + beginning) + 1
    if not first:
        return b""
    last = page.rfind(b"\n" + beginning) + 1
    return page[first : page.index(b"\n", last)]
