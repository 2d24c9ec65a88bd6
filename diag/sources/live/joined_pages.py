"""A server's page joined with metrics of its host or pod, as `diag exporter` would serve it."""

import time

from diag.core.metric_families import plain
from diag.exporter.page import CollectionResult, HostPage, ServerView
from diag.exporter.vllm_page import PageReader, Scraped, is_answer, is_ours
from diag.exposition import NotMetrics
from diag.http.failure import Failure
from diag.http.vllm_server import VllmServer
from diag.sources.live.server import Unanswered
from diag.vllm.running_config import ServerFacts

SECONDS = 2.0
"""Time limit for reading GPUs, processes or log."""


class JoinedPages:
    """Implements `Pages`: the server's page, joined with metrics of its host or pod."""

    def __init__(self, server: VllmServer, host: ServerView) -> None:
        self._server = server
        self._host = host
        self._host_page = HostPage(self._host, write=plain)
        self._reader = PageReader()
        self._seen = False
        self._host.start()

    def page(self) -> bytes:
        """Return the joined page; Unanswered if there is none, but the host or an earlier page shows a server.

        Raises Failure or NotMetrics if nothing shows a server, or something else answers at its address.
        """
        collections, begin = self._host_page.collect(), time.monotonic()
        try:
            page = self._server.page()
            if is_ours(page):
                return page
            scraped = self._reader.read(page, self._server.facts)
        except (Failure, NotMetrics) as error:
            self._seen = self._seen or (self._host.has_server and not is_answer(error))
            if not self._seen:
                raise
            nothing = CollectionResult[Scraped](None, str(error), time.monotonic() - begin, is_answer(error))
            raise Unanswered(error, self._host_page.page(nothing, collections, SECONDS)) from error
        self._seen = True
        return self._host_page.page(CollectionResult(scraped, "", 0.0, True), collections, SECONDS)

    def facts(self) -> ServerFacts:
        """Return the facts that the server reports, completed by those of its host or pod."""
        return self._host.completed(self._server.facts)
