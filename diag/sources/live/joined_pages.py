"""A server's page, and the samples of its host or pod that `diag exporter` would add."""

import time
from itertools import chain

from diag.core.metric_families import Sample
from diag.exporter.page import CollectionResult, HostPage, ServerView
from diag.exporter.vllm_page import PageReader, Scraped, health_alone, is_answer, is_ours
from diag.exposition import NotMetrics
from diag.http.failure import Failure
from diag.http.vllm_server import VllmServer
from diag.sources.live.server import ServerPage, Unanswered
from diag.vllm.running_config import ServerFacts

SECONDS = 2.0
"""Time limit for reading GPUs, processes or log."""


class JoinedPages:
    """Implements `Pages`: the server's page, joined with metrics of its host or pod."""

    def __init__(self, server: VllmServer, host: ServerView) -> None:
        self._server = server
        self._host = host
        self._host_page = HostPage[list[Sample]](self._host, list)
        self._reader = PageReader()
        self._seen = False
        self._host.start()

    def page(self) -> ServerPage:
        """Return the page and the samples; Unanswered without a page if the host or an earlier page shows a server.

        Raises Failure or NotMetrics if nothing shows a server, or something else answers at its address.
        """
        collections, begin = self._host_page.collect(), time.monotonic()
        try:
            page = self._server.page()
            if is_ours(page):
                return ServerPage(page)
            scraped = self._reader.read(page, self._server.facts, self._server.health)
        except (Failure, NotMetrics) as error:
            self._seen = self._seen or (self._host.has_server and not is_answer(error))
            if not self._seen:
                raise
            health = None if self._server.health is None else health_alone(str(error), self._server)
            answered = is_answer(error) or health is not None
            nothing = CollectionResult[Scraped](health, str(error), time.monotonic() - begin, answered)
            raise Unanswered(error, list(chain(*self._host_page.parts(nothing, collections, SECONDS)))) from error
        self._seen = True
        parts = self._host_page.parts(CollectionResult(scraped, "", 0.0, True), collections, SECONDS)
        return ServerPage(scraped.page, list(chain(*parts)))

    def facts(self) -> ServerFacts:
        """Return the facts that the server reports, completed by those of its host or pod."""
        return self._host.completed(self._server.facts)
