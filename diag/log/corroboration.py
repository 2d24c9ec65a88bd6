"""Corroboration: what is measured of a server beside its log decides which of the log's claims about it are believed.

Clients can write into a log, in more ways than patterns can tell. They cannot forge which process answers, when it was
started, that its engines process tokens, and what vLLM answers at /health. So a line that says that the server died,
ran out of memory, was shut down or was started anew is a claim as long as the process that was measured before it
answers after it.

The page and its start time prove the API server alone: with VLLM_KEEP_ALIVE_ON_ENGINE_DEATH it outlives its engine. So
they refute a shutdown and a new start. The death of an engine is refuted by tokens that are processed after it and by a
/health of 200, and confirmed by a /health of 503, by a process that is gone, and by requests that all fail or stand
still. If an idle server shows none of these, the claim stays open.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from diag.core.log_events import SHUT_DOWN
from diag.core.metric_prefix import GENERATED, PROMPTED, RUNNING, WAITING
from diag.exposition import lines_from, sample

STANDSTILL = 60.0
"""Seconds in which requests are in flight and no token is processed, after which a claimed death is believed."""
SURVIVED = 300.0
"""Seconds after which an exception did not end the API server: it went on."""
FEWEST_FAILED = 5
"""Requests that fail with HTTP 5xx, while none succeeds and no token is processed, after which a death is believed."""
LINGERS = 30.0
"""Seconds that a process may stay after its end was logged, while it frees GPUs and joins its threads."""
RESOLUTION = 1.0
"""Seconds to which a line's time, and a start time by two sources, may differ from the truth."""
READ_BY = 10.0
"""Seconds after which a line that was written is read."""
IMPORTS = 120.0
"""Seconds from the start of a process to its first log line: Python imports torch and vLLM."""
_START = b"process_start_time_seconds "
_TOKENS = tuple(f"{name}{{".encode() for name in (PROMPTED, GENERATED))
_ANSWERS = b"http_requests_total{"
_HEALTH = b"diag_vllm_health_status "
_IN_FLIGHT = tuple(f"{name}{{".encode() for name in (RUNNING, WAITING))
START = "start"
"""The claim that the server was started anew, beside the events of diag/core/log_events.py."""
OF_API_SERVER = frozenset({START, SHUT_DOWN})
"""The claims that concern the API server itself: its page refutes them."""


class Measurement(NamedTuple):
    """A scrape of the server at a unix time; nothing in it is text of the log.

    `page`: its /metrics page came; `answers`: something answered at its address, if only an error. `started`: unix
    times at which the server was started, by their source. `processes`: PID and start time of each of its processes,
    empty if unknown. `tokens`: tokens that its engines have processed, None if the page counts none; `in_flight`:
    requests that run or wait. `failed` and `succeeded`: requests answered with HTTP 5xx and 2xx since the start.
    `health`: HTTP status of vLLM's own answer to GET /health, None if it is not measured. `lacks_engine`: the API
    server runs on this host and no engine process of it does.
    """

    at: float
    page: bool
    answers: bool
    started: Mapping[str, float] = {}
    processes: frozenset[tuple[int, float]] = frozenset()
    tokens: float | None = None
    in_flight: float = 0.0
    failed: float = 0.0
    succeeded: float = 0.0
    health: int | None = None
    lacks_engine: bool = False


class Claim(NamedTuple):
    """A line that claims an event while the server is measured alive; `number` is 0 if unknown, times are unix seconds.

    `read_at` is the moment at which the line is certain to have been written.
    """

    event: str
    text: str
    number: int
    at: float
    read_at: float


class MeasuredServer:
    """The server as it is measured from scrape to scrape: which process it is, and what speaks for and against its end.

    `began` is the unix time from which log lines are of that process, None before one is measured; `started` that of
    its start, None if no source tells it; `answered_at` that of its first page.
    """

    def __init__(self) -> None:
        self.began: float | None = None
        self.started: float | None = None
        self.answered_at: float | None = None
        self._latest = Measurement(0.0, page=False, answers=True)  # no silence either
        self._started: dict[str, float] = {}
        self._tokens: float | None = None
        self._processes: frozenset[tuple[int, float]] = frozenset()
        """The processes before the oldest claim."""
        self._first: Measurement | None = None
        """The first scrape after the oldest claim."""
        self._mark: Measurement | None = None
        """The first scrape after the newest claim."""
        self._paged_at = 0.0
        self._is_ill = False
        """The last answer of /health was 503: a dead engine does not come back in the same process."""

    def see(self, scrape: Measurement, is_claimed: bool) -> bool:
        """Take the next scrape; `is_claimed`: a claim is open. Return True if another process is measured now.

        That is a later start or, if no source tells starts, fewer tokens than before. A start time that goes back is
        that of another server behind the same address.
        """
        if common := self._started.keys() & scrape.started.keys():
            is_new = any(scrape.started[source] > self._started[source] + RESOLUTION for source in common)
        else:
            is_new = scrape.tokens is not None and self._tokens is not None and scrape.tokens < self._tokens
        if is_new or (self.began is None and (scrape.page or scrape.started)):
            self.started, self.answered_at = max(scrape.started.values(), default=None), None
            self.began = scrape.at if self.started is None else self.started
            self._started, self._tokens, self._mark, self._is_ill = {}, None, None, False
        self._latest = scrape
        if scrape.page:
            self.answered_at, self._paged_at = self.answered_at or scrape.at, scrape.at
        self._started |= {source: max(at, self._started.get(source, at)) for source, at in scrape.started.items()}
        self._tokens = self._tokens if scrape.tokens is None else scrape.tokens
        self._is_ill = self._is_ill if scrape.health is None else scrape.health == 503
        if is_new or not is_claimed:
            self._processes, self._first, self._mark = scrape.processes, None, None
        elif self._first is None and scrape.page:
            self._first = scrape
        return is_new

    def refutes(self, claims: Collection[Claim]) -> bool:
        """Return True if the server goes on after its claimed end: tokens are processed, or what is claimed to be dead
        answers.

        The page has to come for `SURVIVED` seconds, and /health with 200 for `LINGERS` after the claim.
        """
        scrape, mark = self._latest, self._mark
        newest = max(claim.read_at for claim in claims)
        if not scrape.page:
            is_whole = bool(self._processes) and self._processes <= scrape.processes
            return is_whole and scrape.at >= newest + LINGERS
        if scrape.health == 200 and scrape.at >= newest + LINGERS:
            return True
        if not _concern_engine(claims) and scrape.at >= newest + SURVIVED and not self.confirms(claims):
            return True
        if mark is None or mark.at < newest + RESOLUTION:
            self._mark = scrape
            return False
        return scrape.tokens is not None and mark.tokens is not None and scrape.tokens > mark.tokens

    def confirms(self, claims: Collection[Claim]) -> bool:
        """Return True if what is measured speaks for a claimed end.

        That is silence, a process that is gone, a standstill; for an engine also a /health of 503, no engine process
        under the API server, or requests that all fail.
        """
        scrape, mark = self._latest, self._mark
        if not scrape.page:  # a server that went on for minutes did not end for what was claimed before them
            went_on = self._paged_at > max(claim.read_at for claim in claims) + SURVIVED
            return not went_on and (not scrape.answers or self.answered_at is not None)
        if scrape.health == 200:
            return False
        if scrape.processes and not self._processes <= scrape.processes:
            return True
        first = self._first  # since the oldest claim, have requests failed and none succeeded?
        all_fail = first is not None and (scrape.tokens, scrape.succeeded) == (first.tokens, first.succeeded)
        all_fail = all_fail and first is not None and scrape.failed >= first.failed + FEWEST_FAILED
        if _concern_engine(claims) and (self._is_ill or scrape.lacks_engine or all_fail):
            return True
        stands = mark is not None and scrape.tokens == mark.tokens and scrape.in_flight > 0 and mark.in_flight > 0
        return stands and mark is not None and scrape.at - mark.at >= STANDSTILL

    def wrote_at(self, at: float) -> bool:
        """Return True if a line of that time is of this process; of one whose start is unknown, if it had answered."""
        return self.began is not None and at > self.began - RESOLUTION

    def starts_at(self, at: float) -> bool:
        """Return True if the first lines of this process's own start may have been written at that time."""
        return self.started is not None and self.started - RESOLUTION <= at <= self.started + IMPORTS

    @property
    def answers(self) -> bool:
        """Return True if its latest page came."""
        return self._latest.page

    @property
    def serves(self) -> bool:
        """Return True if its pages have come for so long that every line of its start has been read."""
        return self._latest.page and self.answered_at is not None and self._latest.at - self.answered_at >= READ_BY


def _concern_engine(claims: Collection[Claim]) -> bool:
    """Return True if all of these claims, of which there is one at least, are about an engine."""
    return bool(claims) and all(claim.event not in OF_API_SERVER for claim in claims)


def measure(at: float, page: bytes) -> Measurement:
    """Return what a page of vLLM, scraped at that unix time, measures of its server."""

    def values(beginning: bytes) -> Iterator[float]:
        return (value for _, value in _series(page, beginning))

    started = list(values(_START))
    tokens = [value for name in _TOKENS for value in values(name)]
    in_flight = sum(value for name in _IN_FLIGHT for value in values(name))
    answers = {"5": 0.0, "2": 0.0}
    for labels, value in _series(page, _ANSWERS):
        if labels.get("method") == "POST" and (status := labels.get("status", "")[:1]) in answers:
            answers[status] += value
    return Measurement(
        at,
        page=True,
        answers=True,
        started={"process_start_time_seconds": max(started)} if started else {},
        tokens=sum(tokens) if tokens else None,
        in_flight=in_flight,
        failed=answers["5"],
        succeeded=answers["2"],
        health=next((int(value) for value in values(_HEALTH) if value in (200, 503)), None),
    )


def _series(page: bytes, beginning: bytes) -> Iterator[tuple[Mapping[str, str], float]]:
    """Yield labels and value of the series whose lines begin with a text; one that is no number is left out."""
    for line in lines_from(page, beginning).splitlines():
        if line.startswith(beginning):
            with suppress(ValueError):
                _, labels, value, *_ = sample(line)
                yield labels, float(value)
