"""What a vLLM server's log says of it: lines in, samples out. Pure: neither files nor a clock.

While a server is at work, what looks like a start that failed may be what a client sent; once its /metrics page does
not answer any more, no client can have. So such lines are read in both ways, and the page decides which of them counts.
"""

from collections.abc import Mapping
from datetime import tzinfo

from diag.core.metric_families import Sample
from diag.exporter.log.line import ACCESS, MOST_CHARACTERS, Line, LineReader
from diag.exporter.log.reading import LogReading
from diag.exporter.log.recognise import recognise
from diag.vllm.server.config import ServerFacts

SILENT_SECONDS, SILENT_SCRAPES = 15.0, 3
"""How long, and at how many scrapes in a row, no page shows that a server has ended: longer than a scrape or two."""


class ServerLog:
    """Fed with lines in their order, and with whether the page answers, knows at any time what they told.

    `file` is the name of the file that the lines are from, "" where they are from none; `reading` is what they are fed
    to, where that is more than usual.
    """

    def __init__(self, zone: tzinfo | None = None, file: str = "", reading: LogReading | None = None) -> None:
        self._reader = LineReader(zone)
        self._reading = reading or LogReading(file)
        self._ended: LogReading | None = None
        """The other way to read it, as if the server that it showed at work had ended unseen."""
        self._silent_since = 0.0
        self._silent_scrapes = 0

    @property
    def ahead(self) -> float:
        """By how many seconds the last line that was read live and has a time is ahead of the clock: a wrong zone."""
        return self._reading.ahead

    @property
    def latest(self) -> float | None:
        """Unix time of the last line of any kind."""
        return self._reading.latest

    @property
    def config(self) -> Mapping[str, float]:
        """What is known of the running configuration by now, names of `launch.FLAGS`."""
        return dict(self._reading.facts.config)  # a copy: another thread may read it

    @property
    def version(self) -> str:
        """Of vLLM; "" where not said."""
        return self._reading.facts.version

    @property
    def model(self) -> str:
        """The name it is served under, never a path; "" where not said."""
        return self._reading.facts.model

    def completes(self, told: ServerFacts) -> ServerFacts:
        """With what the log says; of version and model, what the server says itself wins."""
        models = told.models or ((self.model,) if self.model else ())
        version = told.version or self.version
        log: dict[str, float | str] = {**self.config, **self._reading.facts.words}
        return told._replace(version=version, models=models, log=log, log_whole=self._reading.facts.whole)

    def feed(self, line: str, read_at: float, live: bool = True, number: int = 0) -> None:
        """One line, or one redrawing of a bar, without its end; `live` says what a line without a time takes.

        `number` is that of the line in its file, 0 where it is not known.
        """
        request = ACCESS.match(line)
        if request:
            self._reading.request(self._reader.moment(request["iso"], read_at), read_at, live)
            self._ended = None
            return
        for part in self._reader.read(line[:MOST_CHARACTERS], read_at):
            self._take(part._replace(number=number), read_at, live)

    def _take(self, line: Line, read_at: float, live: bool) -> None:
        pattern, reading = recognise(line.text, line.level), self._reading
        if self._ended is None and reading.is_heard and reading.is_of_another(line, pattern):
            self._ended = reading.ended(read_at, live)
        starts, served = reading.starts, reading.served
        reading.take(line, pattern, read_at, live)
        if self._ended is None:
            return
        self._ended.take(line, pattern, read_at, live)
        if reading.starts > starts and self._has_ended(read_at):
            self._reading = self._ended
        if reading.starts > starts or reading.served > served or not reading.is_heard:
            self._ended = None

    def page(self, at: float, answers: bool, live: bool = True) -> None:
        """Whether /metrics answered at that time; if so, what was read live before it was none of another start."""
        if answers:
            self._silent_scrapes = 0
            self._ended = None if live else self._ended
            return
        self._silent_since = self._silent_since if self._silent_scrapes else at
        self._silent_scrapes += 1

    def process_ended(self, at: float, by_signal: bool) -> None:
        """Who runs the server knows that its process ended: what the log shows from here on is of another start."""
        self._reading.process_ended(at, by_signal)
        self._ended = None

    def _has_ended(self, now: float) -> bool:
        """Whether other starts failed, and the page no longer answers."""
        is_silent = self._silent_scrapes >= SILENT_SCRAPES and now - self._silent_since >= SILENT_SECONDS
        return is_silent and self._ended is not None and self._ended.failed > 0

    def samples(self, now: float) -> list[Sample]:
        """Everything that is known, at that time."""
        reading = self._ended if self._ended is not None and self._has_ended(now) else self._reading
        return reading.samples(now)
