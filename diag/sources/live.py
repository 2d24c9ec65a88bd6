"""One live server: its page found and scraped, what else it says of itself, and a probe."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from diag.sources.address import Address
from diag.sources.config import Told, from_server_info
from diag.sources.failure import Failure
from diag.sources.fetch import Answer, Fetcher
from diag.sources.launch import number
from diag.sources.page import NotMetrics, refuse_other_formats
from diag.sources.pages import Target
from diag.sources.text import printable
from diag.sources.wall import Wall

_ACCEPT = "text/plain;version=0.0.4"
_SMALL = 2**20
_GONE = (404, 405)
_REFUSED = range(400, 500)


class Sink(Protocol):
    """Where scrapes go as they come in."""

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Keep a page; what is returned is what is judged."""

    def failed(self, at: int, instance: str, reason: str) -> None:
        """Keep a failed scrape."""


class Nowhere:
    """Keeps nothing."""

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Judge the page as it is."""
        return page

    def failed(self, at: int, instance: str, reason: str) -> None:
        """Do nothing."""


@dataclass
class Live:
    """A server that is watched; `tick` is the next point of its cadence."""

    target: Target
    address: Address
    fetcher: Fetcher
    wall: Wall
    sink: Sink
    told: Told
    tick: int = 0
    path: str = ""
    answered: bool = False
    asked: bool = False
    failure: Failure | None = None
    notes: list[str] = field(default_factory=list)
    probed: bytes = b""
    published: bool = False

    async def scrape(self) -> None:
        """Scrape once, and remember why where that fails."""
        at = self.wall.now()
        try:
            page = await self._page()
            refuse_other_formats(page)
        except (Failure, NotMetrics) as error:
            self._failed(at, error)
            return
        self.published = bool(self.probed)
        kept = self.sink.page(at, self.target.instance, _with(page, self.probed))
        reason = self.target.add(at, kept)
        self.failure = Failure(reason) if reason else None
        self.answered = self.answered or not reason

    def _failed(self, at: int, error: Failure | NotMetrics) -> None:
        reason = printable(str(error))
        self.failure = error if isinstance(error, Failure) else Failure(reason, "give the server's own address")
        self.sink.failed(at, self.target.instance, reason)
        self.target.fail(at, reason)

    async def _page(self) -> bytes:
        if self.path:
            return self._good(await self.fetcher.get(self.path, _ACCEPT))
        tried = []
        for path in self.address.candidates:
            answer = await self.fetcher.get(path, _ACCEPT)
            why = _no_page(answer)
            if not why:
                self._found(path)
                return self._good(answer)
            tried.append((path, why))
        raise _nowhere(tried)

    def _found(self, path: str) -> None:
        self.path = path
        shown = path.partition("?")[0]
        if self.address.path.rstrip("/") not in ("", shown):
            self.notes.append(f"{printable(self.address.shown)} is no page of metrics: {printable(shown)} was used")

    def _good(self, answer: Answer) -> bytes:
        if answer.status != 200:
            raise self.fetcher.refusal(answer.status)
        return answer.body

    async def ask(self) -> None:
        """Ask what the page does not say; what is not answered stays unknown."""
        paths = ("/version", "/v1/models", "/server_info?config_format=json")
        version, models, info = await asyncio.gather(*map(self._json, paths))
        listed = _listed(models)
        lengths = [number(each.get("max_model_len")) for each in listed]
        self.told = Told(
            version=str(_get(version, "version") or ""),
            models=tuple(str(each["id"]) for each in listed),
            max_model_len=next((each for each in lengths if each is not None), None),
            server_info=from_server_info(info),
            launch=self.told.launch,
        )

    async def _json(self, path: str) -> Any:
        try:
            answer = await self.fetcher.get(self._beside(path), most=_SMALL)
            return json.loads(answer.body) if answer.status == 200 else None
        except (Failure, ValueError, RecursionError):
            return None

    def _beside(self, path: str) -> str:
        return self.path.partition("?")[0].removesuffix("/metrics") + path

    async def probe(self, seconds: float) -> None:
        """Send one request for one token; how it went is on every later page."""
        models = _listed(await self._json("/v1/models"))
        body = {"model": models[0]["id"] if models else "", "prompt": "1", "max_tokens": 1}
        start = time.monotonic()
        try:
            status = (await self.fetcher.post(self._beside("/v1/completions"), body, seconds)).status
        except Failure:
            status = 0
        if status in _REFUSED:
            host = printable(self.target.instance)
            self.notes.append(f"the probe of {host} was refused (HTTP {status}): it says nothing about the engine")
            return
        took = time.monotonic() - start
        self.probed = b"diag_probe_success %d\ndiag_probe_duration_seconds %.3f\n" % (status == 200, took)

    @property
    def owes_probe(self) -> bool:
        """Whether a probe ended since the last scrape."""
        return bool(self.probed) and not self.published


def _with(page: bytes, probed: bytes) -> bytes:
    """The page with the probe's result, unless it is cut off or has a probe of its own."""
    return page + probed if page.endswith(b"\n") and b"\ndiag_probe_success" not in page else page


def _no_page(answer: Answer) -> str:
    """Why the page must be somewhere else, or ""."""
    if answer.status in _GONE:
        return f"HTTP {answer.status}"
    try:
        refuse_other_formats(answer.body if answer.status == 200 else b"")
    except NotMetrics as error:
        return str(error)
    return ""


def _nowhere(tried: list[tuple[str, str]]) -> Failure:
    hint = "is this the address of a vLLM server?"
    path, why = tried[0]
    if len(tried) == 1:
        return Failure(why if why.startswith("answered") else f"has no page {path.partition('?')[0]} ({why})", hint)
    places = ", ".join(f"{printable(path.partition('?')[0], 60)} ({why})" for path, why in tried)
    return Failure(f"has no metrics at {places}", hint)


def _get(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, dict) else None


def _listed(models: Any) -> list[dict[str, Any]]:
    data = _get(models, "data")
    return [each for each in data if _get(each, "id")] if isinstance(data, list) else []
