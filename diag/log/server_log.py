"""Turn the lines of a vLLM server's log into samples, line by line. No files, no clock.

Several interpretations: a line that ends a server at work, or starts it anew, may be a client's input. So from such a
line on the log is interpreted both ways, and what is measured beside the log (corroboration.py) decides which of the
interpretations counts.
"""

import math
from copy import deepcopy
from datetime import tzinfo

from diag.core.log_events import ENGINE_DEAD, QUOTED, SHUT_DOWN, LogEnding, LogState
from diag.core.metric_families import Sample
from diag.log.corroboration import LINGERS, START, Claim, MeasuredServer, Measurement
from diag.log.ending import FEWEST_SIGNS
from diag.log.interpreter import LogInterpreter
from diag.log.load import reports_tokens
from diag.log.origin import LineOrigin
from diag.log.parse_line import (
    MOST_CHARACTERS,
    UVICORN,
    AnsweredRequest,
    LineParser,
    ParsedLine,
    is_access,
    parse_request,
)
from diag.log.patterns import Pattern, recognise
from diag.log.trackers import MOST_NAME, MOST_TEXT, LoggedConfig, quote
from diag.vllm.routes import is_served
from diag.vllm.running_config import ServerFacts

SILENT_SECONDS, SILENT_SCRAPES = 15.0, 3
"""The server has ended if /metrics does not answer for this long and for so many scrapes in a row."""


class ServerLog:
    """Keeps the state of a server by its log: `feed` it lines in their order, and by `page` what is measured beside it.

    `file` is the name of the log file, "" if there is none; `interpreter` interprets the lines.
    """

    def __init__(self, zone: tzinfo | None = None, file: str = "", interpreter: LogInterpreter | None = None) -> None:
        self._parser = LineParser(zone)
        self._file = file
        self._measured = MeasuredServer()
        self._proven = (interpreter or LogInterpreter(file)).doubting(self._measured)
        self._claimed: LogInterpreter | None = None
        """The other interpretation, which believes the open claims."""
        self._open: dict[str, Claim] = {}
        """The first claim of each event that is neither refuted nor believed for good, with the newest times."""
        self._refuted: dict[str, Claim] = {}
        self._if_ended: LogInterpreter | None = None
        """The other interpretation, as if the server that the log showed at work had ended without a line."""
        self._survival: Survival | None = None
        """The other interpretation of a log alone, as if the server had survived a death that the log tells."""
        self.withdrawn: float | None = None
        """Unix time of the last death that was taken for one until the log refuted it."""
        self._silent_since = 0.0
        self._silent_scrapes = 0
        self._fewest = math.inf
        """The fewest requests in flight since a claimed drain began."""

    @property
    def current(self) -> LogInterpreter:
        """The interpretation that counts."""
        return self._claimed if self._claimed is not None and self._is_confirmed else self._proven

    @property
    def _is_confirmed(self) -> bool:
        return self._measured.confirms(self._open.values())

    @property
    def latest(self) -> float | None:
        """Unix time of the last line of any kind."""
        return self.current.clock.latest

    @property
    def config(self) -> LoggedConfig:
        """Version, model and running configuration as far as they are known."""
        return self.current.states.run.config

    @property
    def state(self) -> LogState:
        """The state of the server at the last line, without its lines."""
        return self.current.judge.state

    @property
    def ending(self) -> LogEnding:
        """The state of the server at the last line."""
        return self.current.judge.ending

    def completes(self, facts: ServerFacts) -> ServerFacts:
        """Add the log's facts to the server's own; version and model that the server reports itself win."""
        config = self.config
        return facts._replace(
            version=facts.version or config.version,
            models=facts.models or ((config.model,) if config.model else ()),
            log={**config.numbers, **config.words},
            log_whole=config.has_all_args,
            platform=config.platform,
            log_ending=self.ending,
        )

    def feed(self, line: str, read_at: float, live: bool = True, number: int = 0) -> None:
        """Read one line, or one redrawing of a bar, without its end; if `live`, a line without a time gets `read_at`.

        `number` is the line number in the file, 0 if unknown.
        """
        head = None if self._parser.is_within_line else UVICORN.match(line)
        request = parse_request(line[head.end() :]) if head else None
        if head and request:
            own = self._parser.parse_time(head["iso"], read_at)
            self._take_request(request, ParsedLine("", at=own, stamped=own is not None), read_at, live)
            return
        for parsed in self._parser.parse(line[:MOST_CHARACTERS], read_at):
            if is_access(parsed):
                request = parse_request(parsed.text) if parsed.form != "inside" else None
                if request:
                    self._take_request(request, parsed, read_at, live)
                continue
            numbered, main = parsed._replace(number=number), self._claimed or self._proven
            pattern = recognise(numbered.text, numbered.level)
            if self._if_ended is None and main.phase == "serving" and main.shows_failed_start(numbered, pattern):
                self._if_ended = main.with_server_ended(read_at, live)
            starts, served = main.states.starts, main.states.served
            self._take(numbered, pattern, read_at, live)
            main = self._claimed or self._proven
            if self._if_ended is None:
                continue
            self._if_ended.take(numbered, pattern, read_at, live)
            has_begun = main.states.starts > starts
            if has_begun and self._has_ended(read_at):
                self._settle(self._if_ended)
            if has_begun or main.states.served > served or main.phase != "serving":
                self._if_ended = None

    def _take_request(self, request: AnsweredRequest, line: ParsedLine, read_at: float, live: bool) -> None:
        if self._claimed is not None:
            self._claimed.take_request(request, line, read_at, live)
        if self._proven.take_request(request, line, read_at, live):
            self._if_ended = None
        if self._survival is not None:
            self._survival.take_request(request, line, read_at)
            self._end_survival()

    def _take(self, line: ParsedLine, pattern: Pattern | None, read_at: float, live: bool) -> None:
        """Interpret a line; if it only claims what it says, believe it in a second interpretation."""
        is_alone = self._survival is None and not live and self._measured.began is None
        if is_alone and claims_death(pattern) and self._proven.phase == "serving":
            self._survival = Survival(deepcopy(self._proven))
        claim = self._proven.take(line, pattern, read_at, live)
        if self._claimed is not None:
            self._claimed.take(line, pattern, read_at, live)
        elif claim is not None:
            self._claimed = self._proven.believing()
            if claim.origin is LineOrigin.DOUBTED:
                self._claimed.take(line, pattern, read_at, live)
            else:
                self._claimed.interpret(claim)
        if claim is not None:
            if pattern is None or pattern.kind not in ("event", "ends", "fatal"):
                event = ENGINE_DEAD if claim.error is not None else START
            else:
                event = SHUT_DOWN if pattern.kind == "ends" else pattern.name
            first = self._open.get(event) or Claim(event, line.text, line.number, claim.at, read_at)
            self._open[event] = first._replace(at=max(first.at, claim.at), read_at=max(first.read_at, read_at))
        if self._survival is not None:
            self._survival.take(line, pattern, read_at, self._proven.clock.latest or 0.0)
            self._end_survival()

    def _end_survival(self) -> None:
        """Keep the interpretation in which the server survived if its work shows that; drop it with the server."""
        survival = self._survival
        if survival is None or not (survival.is_refuted or survival.is_over):
            return
        self._survival = None
        if survival.is_refuted:
            self._settle(survival.interpreter)
            self._refuted = {**survival.claims, **self._refuted}
            self.withdrawn = min(claim.at for claim in survival.claims.values())

    def page(self, seen: Measurement, live: bool = True) -> None:
        """Take what a scrape has measured; if the page came, no line that was read live before was of another start."""
        self._survival = None
        if self._measured.see(seen, bool(self._open)):  # another process: what ended the last one is no claim
            self._settle(self._claimed or self._proven)
            self._refuted = {}
        shutdown = self._claimed.states.run.shutdown if self._claimed is not None else None
        if shutdown is not None and shutdown.drains_until and seen.page:
            self._fewest = min(self._fewest, seen.in_flight)
            if seen.in_flight > self._fewest:  # a server that drains accepts no more requests
                shutdown.drains_until = 0.0
        if self._open and not self._drains(seen.at) and self._measured.refutes(self._open.values()):
            self._refuted |= {
                name: self._refuted.get(name, claim)._replace(at=claim.at) for name, claim in self._open.items()
            }
            self._settle(self._proven)
        if self._measured.serves:
            self._proven.states.server_answers(seen.at)
        if seen.answers:
            self._silent_scrapes = 0
            self._if_ended = None if live else self._if_ended
            return
        self._silent_since = self._silent_since if self._silent_scrapes else seen.at
        self._silent_scrapes += 1

    def _drains(self, now: float) -> bool:
        """Return True if the server was told to stop and still waits for its requests: it answers and generates."""
        return self._claimed is not None and now < self._claimed.states.run.shutdown.drains_until

    def _settle(self, interpreter: LogInterpreter) -> None:
        """Keep one interpretation for good."""
        self._proven, self._claimed, self._open = interpreter.doubting(self._measured), None, {}
        self._fewest = math.inf

    def process_ended(self, at: float, by_signal: bool) -> None:
        """Note that the server's process ended, as its supervisor reports: all later lines are of another start."""
        self._settle(self._claimed or self._proven)
        self._proven.states.process_ended(at, by_signal)
        self._if_ended = None

    def _has_ended(self, now: float) -> bool:
        """Return True if other starts failed and the page no longer answers."""
        is_silent = self._silent_scrapes >= SILENT_SCRAPES and now - self._silent_since >= SILENT_SECONDS
        return is_silent and self._if_ended is not None and self._if_ended.states.failed > 0

    def samples(self, now: float) -> list[Sample]:
        """Return the samples of the interpretation that counts, and the claims that are not believed.

        A claim has its first line as labels, the time of its newest line as the value.
        """
        interpreter = self._if_ended if self._if_ended is not None and self._has_ended(now) else self.current
        samples = [*interpreter.samples(now)]
        is_measured = self._measured.answers or (self._measured.began is None and bool(self._refuted))
        if self._drains(now) or not is_measured or (self._open and self._is_confirmed):
            return samples
        others = (self._open[event] for event in self._open.keys() - self._refuted.keys())
        for claim in (*self._refuted.values(), *others):
            line = str(claim.number) if claim.number and self._file else ""
            state = "open" if claim.event in self._open else "refuted"
            labels = (claim.event, quote(self._file, MOST_NAME), line, quote(claim.text, MOST_TEXT), state)
            newest = self._open.get(claim.event, claim)
            samples.append(("diag_vllm_log_claim_timestamp_seconds", labels, max(claim.at, newest.at)))
        return samples


def claims_death(pattern: Pattern | None) -> bool:
    """Return True if a line says that the server or a part of it died, or is about to."""
    return pattern is not None and pattern.kind == "event" and pattern.name in QUOTED


class Survival:
    """The interpretation of a log in which the deaths that it tells are none; `claims` are their first lines by event.

    A client that knows the engine's PID can write the line of a death into the log. A server that died processes no
    tokens: what it had queued to be logged comes within seconds. So work that a log shows later than that refutes the
    death, where nothing but the log is known: `is_refuted` becomes true. `is_over` is true if the server was started
    anew or shut down before that.
    """

    def __init__(self, interpreter: LogInterpreter) -> None:
        self.interpreter = interpreter
        self.claims: dict[str, Claim] = {}
        self.is_refuted = False
        self._starts = interpreter.states.starts
        self._heads: set[str] = set()
        self._signs = 0
        self._newest = 0.0

    @property
    def is_over(self) -> bool:
        return self.interpreter.phase != "serving" or self.interpreter.states.starts > self._starts

    def take(self, line: ParsedLine, pattern: Pattern | None, read_at: float, at: float) -> None:
        """Interpret a line that was written at unix time `at`, but no claim and no other line of its record."""
        if claims_death(pattern) and pattern is not None:
            self.claims.setdefault(pattern.name, Claim(pattern.name, line.text, line.number, at, read_at))
            self._heads.add(line.head)
            self._newest, self._signs = at, 0
        elif not line.head or line.head not in self._heads:
            served = self.interpreter.states.served
            self.interpreter.take(line, pattern, read_at, live=False)
            if self.interpreter.states.served > served and reports_tokens(line.text):
                self._note_work()

    def take_request(self, request: AnsweredRequest, line: ParsedLine, read_at: float) -> None:
        """Interpret a line of the access log, as `LogInterpreter.take_request` does; some requests need the engine."""
        is_written = self.interpreter.take_request(request, line, read_at, live=False)
        needs_engine = request.method == "POST" and is_served(request.route)
        if is_written and needs_engine and request.status.startswith("2") and request.is_addressed:
            self._note_work()

    def _note_work(self) -> None:
        if (self.interpreter.clock.latest or 0.0) >= self._newest + LINGERS:
            self._signs += 1
            self.is_refuted = self._signs >= FEWEST_SIGNS
