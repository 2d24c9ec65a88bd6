"""A server on this host: its page with its GPUs, processes and log, as the exporter would serve it."""

import time
from datetime import tzinfo

from diag.core.metric_families import plain
from diag.exporter.collector_thread import CollectionResult
from diag.exporter.host import host_collectors
from diag.exporter.page import HostPage
from diag.exporter.vllm_page import PageReader, Scraped, is_ours
from diag.exposition.lines import NotMetrics
from diag.http.failure import Failure
from diag.http.vllm_server import VllmServer
from diag.vllm.server.config import ServerFacts

SECONDS = 2.0
"""How long reading GPUs, processes or log may take."""


class LocalPages:
    """Stands between a watch and a server; keeps the protocol `Pages`."""

    def __init__(self, server: VllmServer, log: str, zone: tzinfo | None) -> None:
        self._server = server
        self._host = host_collectors(server.address, log, zone)
        self._host_page = HostPage(self._host, write=plain)
        self._reader = PageReader()
        self._host.start()

    def page(self) -> bytes:
        """The whole page; Failure or NotMetrics where neither a page nor anything else shows a server."""
        collections, begin = self._host_page.collect(), time.monotonic()
        try:
            page = self._server.page()
            if is_ours(page):
                return page
            scraped = CollectionResult[Scraped](self._reader.read(page, self._server.facts), "", 0.0)
        except (Failure, NotMetrics) as error:
            if not self._host.has_server:
                raise
            scraped = CollectionResult[Scraped](None, str(error), time.monotonic() - begin)
        return self._host_page.page(scraped, collections, SECONDS)

    def facts(self) -> ServerFacts:
        """What the server, its log and its processes report of it."""
        return self._host.completed(self._server.facts)
