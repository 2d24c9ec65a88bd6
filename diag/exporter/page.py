"""The exporter's page: vLLM's own, byte for byte, then ours; all parts are looked at at once, each with a time-out."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from diag import __version__
from diag.core.formatting import printable
from diag.core.metric_families import Collector, Sample, render
from diag.exporter.host import HostCollectors
from diag.exporter.part import Look, LookOutcome, PagePart
from diag.exporter.vllm_page import Scraped
from diag.vllm.server.config import ServerFacts, settle

log = logging.getLogger("diag.exporter")
Write = Callable[[Iterable[Sample]], bytes]
"""Samples as text: `render` for Prometheus, `plain` for a page that only we read."""


@dataclass(frozen=True)
class Rendered:
    """A collector's families as text, and what is wrong with them."""

    text: bytes
    problem: str


class HostPage:
    """Everything on the page but vLLM's own part."""

    def __init__(
        self, host: HostCollectors, more: Callable[[], Iterable[Sample]] = tuple, write: Write = render
    ) -> None:
        self._host = host
        self._more = more
        self._write = write
        self._parts = [PagePart(each.name, _rendering(each, write)) for each in host.collectors]
        self._said: dict[str, str] = {}

    def look(self) -> list[Look[Rendered]]:
        """Begin to look at every part, while vLLM works on its page."""
        return [part.look() for part in self._parts]

    def page(self, scraped: LookOutcome[Scraped], looks: Sequence[Look[Rendered]], seconds: float) -> bytes:
        """The whole page; a part may take so many seconds from the beginning of its look on."""
        found = {part.name: look.outcome(seconds) for part, look in zip(self._parts, looks, strict=True)}
        outcomes: dict[str, LookOutcome[Scraped] | LookOutcome[Rendered]] = {"vllm": scraped, **found}
        problems = {name: _problem(each) for name, each in outcomes.items()}
        self._say(problems)
        durations = {name: each.seconds for name, each in outcomes.items()}
        own = self._write([*_parts(problems, durations), *self._server(scraped.result), *self._more()])
        texts = (each.result.text for each in found.values() if each.result)
        return b"".join([scraped.result.page if scraped.result else b"", *texts, own])

    def _server(self, scraped: Scraped | None) -> Iterator[Sample]:
        yield "diag_build_info", (__version__,), 1
        yield "diag_vllm_up", (), float(bool(scraped and scraped.up))
        told = self._host.told(scraped.told if scraped else ServerFacts())
        if told.version or told.models:
            yield "diag_vllm_info", (told.version, ", ".join(told.models)), 1
        settled = settle(scraped.config if scraped else {}, told)
        for flag, value in sorted(settled.numbers.items()):
            yield "diag_vllm_config", (flag,), value

    def _say(self, problems: dict[str, str]) -> None:
        """One line in the log for every problem that comes or goes."""
        for name, problem in problems.items():
            if problem != self._said.get(name, ""):
                log.warning("%s: %s", name, printable(problem, 400) or "works again")
        self._said = problems


def _rendering(collector: Collector, write: Write) -> Callable[[], Rendered]:
    def look() -> Rendered:
        found = collector.collect()
        return Rendered(write(found.samples), found.problem)

    return look


def _problem(outcome: LookOutcome[Scraped] | LookOutcome[Rendered]) -> str:
    return outcome.problem or (outcome.result.problem if outcome.result else "")


def _parts(problems: dict[str, str], durations: dict[str, float]) -> Iterator[Sample]:
    for name, problem in problems.items():
        yield "diag_scrape_success", (name,), float(not problem)
        yield "diag_scrape_duration_seconds", (name,), durations[name]
