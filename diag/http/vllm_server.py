"""A vLLM server over HTTP: finding its /metrics page, its /health, reading its version, models and configuration, and
a probe."""

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunning
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diag.core.files import parse_json
from diag.core.formatting import printable
from diag.core.metric_prefix import OWN
from diag.exposition import MOST_BYTES, NotMetrics, refuse_other_formats
from diag.http.address import PAGE, Address
from diag.http.client import Client, Request, Response, run_in_thread
from diag.http.failure import SCALES, VLLM, Failure, WrongAnswer
from diag.knowledge.other_engines import ONLY_JUDGES, program_of_models, program_of_page
from diag.vllm.running_config import ServerFacts, from_server_info, number

ACCEPT = "text/plain;version=0.0.4"
SMALL = 2**20
DEAD = 503
"""HTTP status of GET /health whose engine is dead."""
HEALTH_SECONDS, HEALTH_WAIT = 4.0, 0.5
"""Time limit of a GET /health, and the seconds for which a page that has come waits for it. A busy server answers it
late: then its health is not measured."""
_GONE = (404, 405)
_REFUSED = (401, 403)
_SCALES = b"The model is currently scaling"
"""The answer of vLLM's ScalingMiddleware to every request."""
_MARKS = (b"# TYPE ", OWN.encode())
"""Every page with vLLM's metrics contains one of these; /health answers 200, too."""


@dataclass(frozen=True)
class Probe:
    """The result of one request for one token; times in seconds, `first_token` is None if no token arrived."""

    success: bool
    duration: float
    first_token: float | None

    def samples(self) -> list[tuple[str, tuple[str, ...], float]]:
        """Samples for the server's page: name, no labels, value."""
        samples: dict[str, float] = {"success": int(self.success), "duration_seconds": self.duration}
        samples |= {} if self.first_token is None else {"first_token_seconds": self.first_token}
        return [(f"diag_probe_{name}", (), value) for name, value in samples.items()]


@dataclass
class VllmServer:
    """One server: `path` is that of its page once found, `facts` is reported by its API, `notes` are for the user."""

    address: Address
    client: Client
    facts: ServerFacts = field(default_factory=ServerFacts)
    most_bytes: int = MOST_BYTES
    path: str = ""
    notes: list[str] = field(default_factory=list)
    health: int | None = None
    """HTTP status of vLLM's own answer to GET /health beside the last page; None if it did not come in time."""
    unanswered: bool = False
    """True if the last GET /health that has ended got nothing in `HEALTH_SECONDS`, or the error of a proxy."""
    _asked: Future[int | None] | None = None

    def page(self) -> bytes:
        """Read the /metrics page and find its path first, and /health beside it, also if there is no page.

        Raises Failure or NotMetrics if there is no page.
        """
        self.health = None
        asked = self._ask_health() if self.path else None  # both at once
        reached = True
        try:
            return self._read_page()
        except Failure as failure:  # an answer without a page shows no vLLM, unless a page has come before
            reached = bool(self.path) if isinstance(failure, WrongAnswer) else failure.reached
            raise
        finally:
            with suppress(StillRunning):
                self.health = (asked or self._ask_health()).result(HEALTH_WAIT) if reached else None

    def health_samples(self) -> list[tuple[str, tuple[str, ...], float]]:
        """Return the samples about /health beside the last page: name, no labels, value; none if it is not measured."""
        if self.health is not None:
            return [("diag_vllm_health_status", (), float(self.health))]
        return [("diag_vllm_health_unanswered", (), 1.0)] if self.unanswered else []

    def _ask_health(self) -> Future[int | None]:
        """Begin a GET /health, or join the one under way: a server that answers late gets no second one."""

        def status() -> int | None:
            path = self._path_beside_page("/health")
            try:
                response = self.client.send(Request(path, most_bytes=SMALL, seconds=HEALTH_SECONDS, follow=False))
            except Failure:
                self.unanswered = True
                return None
            is_own = _is_vllms_health(response, bool(self.path))
            self.unanswered = not is_own and response.status >= 500
            return response.status if is_own else None

        if self._asked is None or self._asked.done():
            self._asked = run_in_thread(status)
        return self._asked

    def _read_page(self) -> bytes:
        if self.path:
            response = self.client.get(self.path, ACCEPT, self.most_bytes)
            if response.status == 503 and _SCALES in response.body[:SMALL]:
                raise WrongAnswer(SCALES, "wait until it has switched")
            if response.status != 200:
                raise self.client.refusal(response.status)
            refuse_other_formats(response.body)
            return response.body
        tried = []
        for path in self.address.candidates:
            response = self.client.get(path, ACCEPT, self.most_bytes)
            place, problem = path.partition("?")[0], "" if response.status == 200 else f"HTTP {response.status}"
            if not problem:
                try:
                    refuse_other_formats(response.body)
                except NotMetrics as error:
                    problem = str(error)
            if not problem and not place.endswith(PAGE) and not any(mark in response.body for mark in _MARKS):
                problem = "answered something other than metrics"
            if problem:
                tried.append((place, problem, response.status))
                continue
            if other := program_of_page(response.body):
                raise WrongAnswer(f"is no vLLM server: its metrics are those of {other}", ONLY_JUDGES)
            self.path = path
            if self.address.path.rstrip("/") not in ("", place):
                self.notes.append(f"{printable(self.address.shown)} is not a metrics page: {printable(place)} was used")
            return response.body

        path, problem, status = next((attempt for attempt in tried if attempt[2] in _REFUSED), tried[0])
        if status in _REFUSED or (len(tried) == 1 and status not in (200, *_GONE)):
            raise self.client.refusal(status)
        if len(tried) == 1:
            other = ""
            if status in _GONE:
                request = Request("/v1/models", most_bytes=SMALL, seconds=HEALTH_SECONDS, follow=False)
                with suppress(Failure):
                    other = program_of_models(self.client.send(request).body)
            if other:
                raise WrongAnswer(f"is no vLLM server but {other}, by its /v1/models", ONLY_JUDGES)
            reason = problem if problem.startswith("answered") else f"has no page {path} ({problem})"
            raise WrongAnswer(reason, VLLM.address)
        places = ", ".join(f"{printable(path, 60)} ({problem})" for path, problem, _ in tried)
        raise WrongAnswer(f"has no metrics at {places}", VLLM.address)

    def fetch_facts(self) -> None:
        """Query version, models and configuration; a path that does not answer leaves its facts unknown."""
        paths = ("/version", "/v1/models", "/server_info?config_format=json")
        requests = [run_in_thread(partial(self._json, path)) for path in paths]
        version, models, info = (request.result() for request in requests)
        listed = _listed_models(models)
        lengths = [number(model.get("max_model_len")) for model in listed]
        roots = (model.get("root") for model in listed if not model.get("parent"))  # an adapter has a parent
        self.facts = ServerFacts(
            version=str(_get(version, "version") or ""),
            models=tuple(str(model["id"]) for model in listed),
            max_model_len=next((length for length in lengths if length is not None), None),
            server_info=from_server_info(info),
            launch=self.facts.launch,
            root=next((root for root in roots if isinstance(root, str)), ""),
        )

    def _json(self, path: str) -> Any:
        """Return the document at a path beside the page; None if there is none."""
        try:
            response = self.client.get(self._path_beside_page(path), most_bytes=SMALL)
            return parse_json(response.body) if response.status == 200 else None
        except (Failure, ValueError):
            return None

    def _path_beside_page(self, path: str) -> str:
        return self.path.partition("?")[0].removesuffix(PAGE) + path

    def probe(self, seconds: float) -> Probe | None:
        """Send one request for one token; None if it was rejected, which proves nothing about the engine."""
        models = _listed_models(self._json("/v1/models"))
        body = {"model": models[0]["id"] if models else "", "prompt": "1", "max_tokens": 1, "stream": True}
        begin = time.monotonic()
        try:
            response = self.client.post(self._path_beside_page("/v1/completions"), body, seconds)
        except Failure:
            return Probe(False, time.monotonic() - begin, None)
        if 400 <= response.status < 500:
            host = printable(self.address.instance)
            note = f"{host} rejected the probe (HTTP {response.status}): this says nothing about the engine"
            self.notes += [note] if note not in self.notes else []
            return None
        success = response.status == 200 and not response.body.startswith(b'data: {"error"')
        return Probe(success, time.monotonic() - begin, response.first_byte if success else None)


def _is_vllms_health(response: Response, has_page: bool) -> bool:
    """Return True if vLLM itself has answered GET /health, and no proxy or gateway before it.

    vLLM answers with 200 or, for a dead engine alone, 503, both without a body. A proxy says in a body why it refuses a
    request; Envoy names the time of an answer that it passes on. A 200 without a body may be that of any gateway, so it
    has to name vLLM's HTTP server, uvicorn, as any answer has to if no page has shown yet that this is vLLM.
    """
    if response.status not in (200, DEAD) or response.body:
        return False
    server = response.headers.get("server", "").lower()
    if "uvicorn" in server or not has_page:
        return "uvicorn" in server
    return "x-envoy-upstream-service-time" in response.headers or (response.status == DEAD and "envoy" not in server)


def _get(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, dict) else None


def _listed_models(models: Any) -> list[dict[str, Any]]:
    data = _get(models, "data")
    return [model for model in data if _get(model, "id")] if isinstance(data, list) else []
