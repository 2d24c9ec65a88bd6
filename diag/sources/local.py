"""A server on this very host: its page with its GPUs, processes and log, as the exporter would serve it."""

import asyncio
import socket
import time
from datetime import tzinfo

from diag.exporter.host import Host, host, logged
from diag.exporter.page import Beside
from diag.exporter.part import Outcome
from diag.exporter.vllm import Reader, Scraped
from diag.sources.address import Address
from diag.sources.config import Told
from diag.sources.failure import Failure
from diag.sources.lines import NotMetrics
from diag.sources.server import Server

SECONDS = 2.0
"""What a look at GPUs, processes or log may take."""


class Local:
    """Stands between a watch and a server; keeps the protocol `diag.sources.live.Pages`."""

    def __init__(self, server: Server, log: str, zone: tzinfo | None) -> None:
        self._server = server
        here = is_here(server.address)
        self._host = host(server.address.port, log, zone) if here else Host(None, logged(log, zone), None)
        self._beside = Beside(self._host)
        self._reader = Reader()
        self._host.start()

    async def page(self) -> bytes:
        """The whole page; Failure or NotMetrics where neither a page nor anything else shows a server."""
        looks, start = self._beside.look(), time.monotonic()
        try:
            scraped = Outcome[Scraped](self._reader.read(await self._server.page(), self._server.told), "", 0.0)
        except (Failure, NotMetrics) as error:
            if not self._host.has_server:
                raise
            scraped = Outcome[Scraped](None, str(error), time.monotonic() - start)
        return await asyncio.to_thread(self._beside.page, scraped, looks, SECONDS)

    def told(self) -> Told:
        """What the server, its log and its processes say of it."""
        return self._host.told(self._server.told)


def is_here(address: Address) -> bool:
    """Whether the address is one of this host's."""
    if address.is_loopback:
        return True
    try:
        places = socket.getaddrinfo(address.host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_binds(family, place[0]) for family, _, _, _, place in places)


def _binds(family: int, name: str | int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((name, 0))
    except OSError:
        return False
    return True
