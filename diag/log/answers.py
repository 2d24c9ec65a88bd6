"""Answers of the server, as its access log has them: by route and status, and what clients asked for in vain.

vLLM's own counters miss the answers of its authentication, which stands in front of them: with a wrong key every answer
is a 401, and /metrics counts none. The access log mostly has no time: the order of its lines counts.

uvicorn's lines have no head, so a client whose text is logged with its line feeds can imitate one. What the page shows
of successes outweighs the log.
"""

import re
from collections import Counter, deque
from collections.abc import Iterator

from diag.core.metric_families import Sample
from diag.log.parse_line import AnsweredRequest
from diag.log.trackers import quote
from diag.vllm.routes import asks_for_inference, is_served

SINGLE = ("400", "401", "403", "404", "413", "422")
"""Statuses with causes of their own; all others are counted by their class."""
STATUSES = ("2xx", *SINGLE, "4xx", "5xx")
LATEST = 20
"""Answers that show how a log's server answered at its end."""
MOST_ROUTES = 1_000
"""Routes that are counted; clients may ask for any number of them."""
MOST_NAMES, MOST_NAME, KEPT = 4, 100, 3_600.0
"""Names of a kind that are kept, their characters, and the seconds after which another name may take a place."""
_MODEL_ERROR = "Error with model "
_NO_MODEL = re.compile(r"The model `(?P<name>[^`]{1,400})` does not exist")


class AnswerCounts:
    """Counts the answers of one server process."""

    def __init__(self) -> None:
        self.by_route: Counter[tuple[str, str]] = Counter()
        """Answers by route and class of the status: "/v1/completions", "2xx"."""
        self._by_status = dict.fromkeys(STATUSES, 0)
        """Answers to requests for inference."""
        self._row = self._longest = 0
        """Refused requests for inference since the last one that succeeded, and the most of them before that one."""
        self.latest: deque[str] = deque(maxlen=LATEST)
        """Classes of the last answers to requests for inference."""
        self._names: dict[tuple[str, str], float] = {}
        """Unix time of the last refused request by the kind and the name of what it asked for."""

    @property
    def succeeded(self) -> int | None:
        """Requests for inference that the server process has answered with success; None without any answer."""
        return self._by_status["2xx"] if any(self._by_status.values()) else None

    def begin(self) -> None:
        """Note that another server process was started."""
        self._by_status = dict.fromkeys(STATUSES, 0)
        self._row = self._longest = 0
        self.latest.clear()

    def count(self, request: AnsweredRequest, at: float) -> None:
        """Count the answer to a request."""
        route, status = request.route, request.status
        of_class = f"{status[0]}xx"
        self.by_route[route, of_class] += 1
        if len(self.by_route) > MOST_ROUTES:
            self.by_route.clear()
        if not asks_for_inference(request.method, route):
            return
        self.latest.append(of_class)
        counted = status if status in SINGLE else of_class
        if counted in self._by_status:  # a redirection is followed by another answer
            self._by_status[counted] += 1
        if of_class == "2xx":
            self._row, self._longest = 0, max(self._longest, self._row)
        elif of_class == "4xx":
            self._row += 1
            if status == "404" and not is_served(route):
                self._note("route", route, at)

    def read_error(self, text: str, at: float) -> None:
        """Note the model that a request asked for and that is not served, if vLLM's line says that."""
        if text.startswith(_MODEL_ERROR) and (found := _NO_MODEL.search(text[:1_000])):
            self._note("model", found["name"], at)

    def _note(self, kind: str, name: str, at: float) -> None:
        """Keep a name, which is a client's text: few at a time, each for long, so that clients cannot make many."""
        key, of_kind = (kind, quote(name, MOST_NAME)), [known for known in self._names if known[0] == kind]
        if key not in self._names and len(of_kind) >= MOST_NAMES:
            oldest = min(of_kind, key=self._names.__getitem__)
            if at - self._names[oldest] < KEPT:
                return
            del self._names[oldest]
        self._names[key] = at

    def samples(self) -> Iterator[Sample]:
        for status, count in self._by_status.items():
            yield "diag_vllm_log_answers_total", (status,), count
        yield "diag_vllm_log_refused_in_a_row", ("current",), self._row
        yield "diag_vllm_log_refused_in_a_row", ("longest",), self._longest
        for key, at in self._names.items():
            yield "diag_vllm_log_refused_name_timestamp_seconds", key, at
