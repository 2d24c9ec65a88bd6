"""Survival: work that a log shows behind a death that it tells refutes that death, where nothing but the log is known.

A client that knows the engine's PID can write the line of a death into the log. A server that died processes no tokens:
what it had queued to be logged comes within seconds. So a log is interpreted as if the death were a client's text, too,
and that interpretation counts once the log shows work later than that.
"""

from diag.core.log_events import QUOTED
from diag.log.corroboration import LINGERS, Claim
from diag.log.interpreter import LogInterpreter
from diag.log.load_lines import reports_tokens
from diag.log.parse_line import AnsweredRequest, ParsedLine
from diag.log.patterns import Pattern
from diag.vllm.routes import is_served

FEWEST_SIGNS = 2
"""Signs of work that refute a death: the first statistics behind one may count tokens from before it."""


class Survival:
    """The interpretation of a log in which the deaths that it tells are none; `claims` are their first lines by event.

    `is_refuted` becomes true if the log shows the server at work afterwards; `is_over` is true if the server was
    started anew or shut down before that.
    """

    def __init__(self, interpreter: LogInterpreter) -> None:
        self.interpreter = interpreter
        self.claims: dict[str, Claim] = {}
        self.is_refuted = False
        self._starts = interpreter.starts
        self._heads: set[str] = set()
        self._signs = 0
        self._newest = 0.0

    @property
    def is_over(self) -> bool:
        return self.interpreter.phase != "serving" or self.interpreter.starts > self._starts

    @property
    def began(self) -> float:
        """The unix time of the first claim."""
        return min(claim.at for claim in self.claims.values())

    def take(self, line: ParsedLine, pattern: Pattern | None, read_at: float, at: float) -> None:
        """Interpret a line that was written at unix time `at`, but no claim and no other line of its record."""
        if claims_death(pattern) and pattern is not None:
            first = self.claims.get(pattern.name) or Claim(pattern.name, line.text, line.number, at, read_at)
            self.claims[pattern.name] = first
            self._heads.add(line.head)
            self._newest, self._signs = at, 0
        elif not line.head or line.head not in self._heads:
            served = self.interpreter.served
            self.interpreter.take(line, pattern, read_at, live=False)
            if self.interpreter.served > served and reports_tokens(line.text):
                self._note_work()

    def take_request(self, request: AnsweredRequest, own: float | None, read_at: float) -> None:
        """Interpret a line of the access log, as `LogInterpreter.take_request` does; some requests need the engine."""
        self.interpreter.take_request(request, own, read_at, live=False)
        needs_engine = request.method == "POST" and is_served(request.route)
        if needs_engine and request.status.startswith("2") and request.is_addressed:
            self._note_work()

    def _note_work(self) -> None:
        if (self.interpreter.latest or 0.0) >= self._newest + LINGERS:
            self._signs += 1
            self.is_refuted = self._signs >= FEWEST_SIGNS


def claims_death(pattern: Pattern | None) -> bool:
    """Return True if a line says that the server or a part of it died, or is about to."""
    return pattern is not None and pattern.kind == "event" and pattern.name in QUOTED
