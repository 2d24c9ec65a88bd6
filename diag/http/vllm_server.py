"""A vLLM server asked over HTTP: where its page is, what else it says of itself, and one request of our own."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from diag.core.formatting import printable
from diag.exposition.lines import MOST_BYTES, NotMetrics, refuse_other_formats
from diag.http.address import Address
from diag.http.failure import Failure
from diag.http.fetch import Answer, Fetcher
from diag.vllm.server.config import ServerFacts, from_server_info
from diag.vllm.server.launch import number

ACCEPT = "text/plain;version=0.0.4"
_SMALL = 2**20
_GONE = (404, 405)
_REFUSED = range(400, 500)


@dataclass(frozen=True)
class Probe:
    """How one request for one token went; seconds, `first_token` None where none came."""

    success: bool
    duration: float
    first_token: float | None

    def samples(self) -> list[tuple[str, tuple[str, ...], float]]:
        """Name, no labels, value: what stands on a page."""
        first = [] if self.first_token is None else [("diag_probe_first_token_seconds", (), self.first_token)]
        return [("diag_probe_success", (), self.success), ("diag_probe_duration_seconds", (), self.duration), *first]


@dataclass
class VllmServer:
    """One server; `path` is where its page was found, `told` what it says of itself, `notes` what to tell a reader."""

    address: Address
    fetcher: Fetcher
    told: ServerFacts = field(default_factory=ServerFacts)
    most: int = MOST_BYTES
    path: str = ""
    notes: list[str] = field(default_factory=list)

    async def page(self) -> bytes:
        """Its page; Failure or NotMetrics where there is none."""
        page = await self._page()
        refuse_other_formats(page)
        return page

    async def _page(self) -> bytes:
        if self.path:
            return self._good(await self.fetcher.get(self.path, ACCEPT, self.most))
        tried = []
        for path in self.address.candidates:
            answer = await self.fetcher.get(path, ACCEPT, self.most)
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
        self.told = ServerFacts(
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

    async def probe(self, seconds: float) -> Probe | None:
        """Send one request for one token; None where it was refused, which says nothing about the engine."""
        models = _listed(await self._json("/v1/models"))
        body = {"model": models[0]["id"] if models else "", "prompt": "1", "max_tokens": 1, "stream": True}
        start = time.monotonic()
        try:
            answer = await self.fetcher.post(self._beside("/v1/completions"), body, seconds)
        except Failure:
            return Probe(False, time.monotonic() - start, None)
        if answer.status in _REFUSED:
            host = printable(self.address.instance)
            note = f"the probe of {host} was refused (HTTP {answer.status}): it says nothing about the engine"
            self.notes += [note] if note not in self.notes else []
            return None
        success = answer.status == 200 and not answer.body.startswith(b'data: {"error"')
        return Probe(success, time.monotonic() - start, answer.first_chunk if success else None)


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
