"""A vLLM server over HTTP: where its /metrics page is, what else it reports of itself, and one probe request."""

import json
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diag.core.formatting import printable
from diag.exposition.lines import MOST_BYTES, NotMetrics, refuse_other_formats
from diag.http.address import PAGE, Address
from diag.http.background import start
from diag.http.client import Client, Response
from diag.http.failure import VLLM, Failure, WrongAnswer
from diag.vllm.server.config import ServerFacts, from_server_info
from diag.vllm.server.launch import number

ACCEPT = "text/plain;version=0.0.4"
SMALL = 2**20
_GONE = (404, 405)
_REFUSED = (401, 403)
_REJECTED = range(400, 500)
_MARKS = (b"# TYPE ", b"vllm:")
"""One of them stands in any page of metrics of vLLM: /health, too, answers 200."""


@dataclass(frozen=True)
class Probe:
    """How one request for one token went; times in seconds, `first_token` None where no token came."""

    success: bool
    duration: float
    first_token: float | None

    def samples(self) -> list[tuple[str, tuple[str, ...], float]]:
        """Name, no labels, value: as on a page."""
        first = [] if self.first_token is None else [("diag_probe_first_token_seconds", (), self.first_token)]
        return [("diag_probe_success", (), self.success), ("diag_probe_duration_seconds", (), self.duration), *first]


@dataclass
class VllmServer:
    """One server: `path` is where its page was found, `facts` what it reports of itself, `notes` are for the reader."""

    address: Address
    client: Client
    facts: ServerFacts = field(default_factory=ServerFacts)
    most_bytes: int = MOST_BYTES
    path: str = ""
    notes: list[str] = field(default_factory=list)

    def page(self) -> bytes:
        """Its page; Failure or NotMetrics where there is none."""
        page = self._page()
        refuse_other_formats(page)
        return page

    def _page(self) -> bytes:
        if self.path:
            return self._good(self.client.get(self.path, ACCEPT, self.most_bytes))
        tried = []
        for path in self.address.candidates:
            response = self.client.get(path, ACCEPT, self.most_bytes)
            problem = _no_page(response, path)
            if not problem:
                self._found(path)
                return response.body
            tried.append((path, problem, response.status))
        raise self._nowhere(tried)

    def _nowhere(self, tried: list[tuple[str, str, int]]) -> Failure:
        """Why there is no page; that credentials are missing goes before all else."""
        path, problem, status = next((found for found in tried if found[2] in _REFUSED), tried[0])
        if status in _REFUSED or (len(tried) == 1 and status not in (200, *_GONE)):
            return self.client.refusal(status)
        if len(tried) == 1:
            has_reason = problem.startswith("answered")
            reason = problem if has_reason else f"has no page {path.partition('?')[0]} ({problem})"
            return WrongAnswer(reason, VLLM.address)
        places = ", ".join(f"{printable(path.partition('?')[0], 60)} ({problem})" for path, problem, _ in tried)
        return WrongAnswer(f"has no metrics at {places}", VLLM.address)

    def _found(self, path: str) -> None:
        self.path = path
        shown = path.partition("?")[0]
        if self.address.path.rstrip("/") not in ("", shown):
            self.notes.append(f"{printable(self.address.shown)} is not a metrics page: {printable(shown)} was used")

    def _good(self, response: Response) -> bytes:
        if response.status != 200:
            raise self.client.refusal(response.status)
        return response.body

    def fetch_facts(self) -> None:
        """Ask for what the page does not contain; what is not answered stays unknown."""
        paths = ("/version", "/v1/models", "/server_info?config_format=json")
        requests = [start(partial(self._json, path)) for path in paths]
        version, models, info = (request.result() for request in requests)
        listed = _listed(models)
        lengths = [number(model.get("max_model_len")) for model in listed]
        self.facts = ServerFacts(
            version=str(_get(version, "version") or ""),
            models=tuple(str(model["id"]) for model in listed),
            max_model_len=next((length for length in lengths if length is not None), None),
            server_info=from_server_info(info),
            launch=self.facts.launch,
            root=_root(listed),
        )

    def _json(self, path: str) -> Any:
        try:
            response = self.client.get(self._beside(path), most_bytes=SMALL)
            return json.loads(response.body) if response.status == 200 else None
        except (Failure, ValueError, RecursionError):
            return None

    def _beside(self, path: str) -> str:
        return self.path.partition("?")[0].removesuffix(PAGE) + path

    def probe(self, seconds: float) -> Probe | None:
        """Send one request for one token; None where it was rejected, which says nothing about the engine."""
        models = _listed(self._json("/v1/models"))
        body = {"model": models[0]["id"] if models else "", "prompt": "1", "max_tokens": 1, "stream": True}
        begin = time.monotonic()
        try:
            response = self.client.post(self._beside("/v1/completions"), body, seconds)
        except Failure:
            return Probe(False, time.monotonic() - begin, None)
        if response.status in _REJECTED:
            self._note_rejected(response.status)
            return None
        success = response.status == 200 and not response.body.startswith(b'data: {"error"')
        return Probe(success, time.monotonic() - begin, response.first_byte if success else None)

    def _note_rejected(self, status: int) -> None:
        host = printable(self.address.instance)
        note = f"{host} rejected the probe (HTTP {status}): this says nothing about the engine"
        self.notes += [note] if note not in self.notes else []


def _no_page(response: Response, path: str) -> str:
    """Why the page must be somewhere else, or ""."""
    if response.status != 200:
        return f"HTTP {response.status}"
    try:
        refuse_other_formats(response.body)
    except NotMetrics as error:
        return str(error)
    is_page = path.partition("?")[0].endswith(PAGE) or any(mark in response.body for mark in _MARKS)
    return "" if is_page else "answered something other than metrics"


def _get(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, dict) else None


def _root(listed: list[dict[str, Any]]) -> str:
    """What the first model was loaded from; adapters have a parent."""
    roots = (model.get("root") for model in listed if not model.get("parent"))
    return next((root for root in roots if isinstance(root, str)), "")


def _listed(models: Any) -> list[dict[str, Any]]:
    data = _get(models, "data")
    return [model for model in data if _get(model, "id")] if isinstance(data, list) else []
