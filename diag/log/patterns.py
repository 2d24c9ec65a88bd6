"""The table of log lines that have a meaning (patterns.toml), and the search in it.

A text is recognised at its beginning only, and only at a level at which vLLM writes it. Clients' input is logged inside
of other lines, and must not look like a failure.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Literal, NamedTuple

from diag.core.declarations import PACKAGE, Mistake, Place, did_you_mean, read, typed
from diag.core.formatting import GIB, LOG_UNITS
from diag.core.log_events import CUDA_GRAPH_CAPTURE, LOG_EVENTS, STARTUP_PHASES
from diag.log.marks import MARKS

FILE = PACKAGE / "log" / "patterns.toml"
Kind = Literal["banner", "hint", "stage", "progress", "setting", "event", "serves", "ends", "fatal"]
"""The meaning of a line. A banner begins a new start; a hint does so only if no start is under way; a stage has been
reached by a start; progress is made inside a stage; a setting is of the configuration; an event is counted; "serves"
and "ends" show the server at work and shutting down; "fatal" is printed by a command that cannot start.
"""
PHASES = tuple(phase.name for phase in STARTUP_PHASES)
KERNEL_WARM_UP = "kernel_warm_up"
_BEFORE_CAPTURE = PHASES.index(CUDA_GRAPH_CAPTURE)
STAGES = (*PHASES[:_BEFORE_CAPTURE], KERNEL_WARM_UP, *PHASES[_BEFORE_CAPTURE:])
"""The phases, with warm_up in two parts: kernels are warmed up before the graphs are captured."""
EVENTS = tuple(event.name for event in LOG_EVENTS)
_NAMES = {"stage": STAGES, "event": EVENTS, "fatal": EVENTS}
"""The names that a line of a kind may have."""

RAW = ""
"""The level of a line without a head: a traceback, a progress bar, the output of a library."""
FAILED = frozenset({RAW, "ERROR", "CRITICAL"})
_PART = re.compile(r"\{([a-z]\w*)\}")


class Pattern(NamedTuple):
    """A text that vLLM wrote in the releases from `first` to `last`.

    `begins` is a regular expression without groups. `numbers` is searched in the whole text; its groups are fields of
    the event, or flags of the configuration. `logger` names the files, one space between them, that have logged it in
    any release, as they stand in a line's head: once clients are served, the line counts from them only. It is "" for a
    text without a head of vLLM's: an exception, a bar, uvicorn's lines, the output of a library or a shell. An
    exception counts in a record of the end of an engine or a worker, or in one that shows `record_event`. A device's
    runtime prints a line that `aborts` before it aborts its process: once clients are served, a death proves the line.
    """

    kind: Kind
    begins: str
    levels: tuple[Literal["", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], ...]
    name: str = ""
    first: str = "0.6.0"
    last: str = "0.33.0"
    numbers: str = ""
    logger: str = ""
    record_event: str = ""
    aborts: bool = False

    def mistakes(self) -> Iterator[tuple[str, str]]:
        names = _NAMES.get(self.kind, (self.name,))
        if self.name not in names:
            yield f"'{self.name}' is no {self.kind}{did_you_mean(self.name, names)}", "name"


class Table(NamedTuple):
    """The file: {name} in a pattern, or in a part below it, stands for the part of that name."""

    parts: Mapping[str, str]
    pattern: tuple[Pattern, ...]

    def expanded(self) -> tuple[Pattern, ...]:
        """Return the patterns with their parts' texts."""
        parts: dict[str, str] = {}

        def with_parts(text: str, place: Place) -> str:
            for name in _PART.findall(text):
                if name not in parts:
                    raise Mistake(f"names '{name}', which is no part{did_you_mean(name, parts)}", place)
            return _PART.sub(lambda name: parts[name[1]], text)

        for name, text in self.parts.items():
            parts[name] = with_parts(text, ("parts", name))
        return tuple(
            pattern._replace(
                begins=with_parts(pattern.begins, ("pattern", at, "begins")),
                numbers=with_parts(pattern.numbers, ("pattern", at, "numbers")),
                logger=with_parts(pattern.logger, ("pattern", at, "logger")),
            )
            for at, pattern in enumerate(self.pattern)
        )


class Checked(Table):
    """The table as `diag incidents` reads it: to compile each expression by itself costs more than all at once."""

    def mistakes(self) -> tuple[()]:
        for at, pattern in enumerate(self.expanded()):
            for key in ("begins", "numbers"):
                expression = typed(getattr(pattern, key), re.Pattern[str], ("pattern", at, key))
                if key == "begins" and expression.groups:
                    raise Mistake("must be without groups, (?:...)", ("pattern", at, key))
        return ()


@cache
def patterns() -> tuple[Pattern, ...]:
    return read(FILE, Table).expanded()


MOST_SEARCHED = 2_000
"""Characters of a text that are searched for numbers, which may take as many steps as their square."""


def recognise(text: str, level: str) -> Pattern | None:
    """Return the pattern that a line's text, without its head, shows at that level."""
    find = _finder()
    pattern = find(text)
    if pattern is None and level in FAILED:
        before = MARKS.before.match(text)
        pattern = find(text[before.end() :]) if before and before.end() else None
    return pattern if pattern and level in pattern.levels else None


@cache
def _finder() -> Callable[[str], Pattern | None]:
    """Return a function that finds the pattern of a text: one without groups rejects most texts ten times as fast."""
    table = patterns()
    any_of_them = re.compile("|".join(pattern.begins for pattern in table))
    each_of_them = re.compile("|".join(f"({pattern.begins})" for pattern in table))

    def find(text: str) -> Pattern | None:
        match = each_of_them.match(text) if any_of_them.match(text) else None
        return table[match.lastindex - 1] if match and match.lastindex else None

    return find


def read_values(pattern: Pattern, text: str) -> dict[str, str]:
    """Return the groups of the pattern's `numbers` that are in the line."""
    match = re.search(pattern.numbers, text[:MOST_SEARCHED]) if pattern.numbers else None
    return {name: value for name, value in match.groupdict().items() if value} if match else {}


def parse_amount(text: str) -> float:
    """Parse a number as vLLM prints it: "131,072", "2.0 GiB" (in gibibytes), "136.00 MiB"; ValueError for none."""
    digits, _, unit = text.replace(",", "").partition(" ")
    return float(digits) * LOG_UNITS.get(unit, GIB) / GIB
