"""The table of failures: what the line that ended a server means, and the one action that mends it.

diag/knowledge/failures/*.toml has the table; docs/failures.md explains how to add to it. It is read when a log line was
quoted, so that its patterns cost nothing elsewhere.
"""

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

from diag.core.formatting import listed, printable
from diag.vllm.flags.registry import release

RESERVE = 0.02
"""Share of a GPU's memory that stays free beside a server, for the CUDA contexts of others."""
LEAST_SHARE = 0.3
"""A smaller share of the GPU holds no model worth a server: the GPU has to be freed instead."""
MOST_DIVISOR = 128
"""GPUs that one model is split over, at most."""
_PLACE = re.compile(r"\{(?:(?P<function>\w+)\()?(?P<names>\w+(?:, ?\w+)*)\)?\}")


class Failure(NamedTuple):
    """One kind of failure: `pattern` is searched in the exception that ended a process, and in what it was raised from.

    `means` and `do` may name the pattern's groups, as {name} or {function(name)}; `first` and `last` are the releases
    of vLLM to which the advice applies, "" for an open end; `source` is the file that prints the line, or a page.
    """

    id: str
    pattern: re.Pattern[str]
    means: str
    do: str
    source: str
    example: str
    first: str = ""
    last: str = ""


class KnownFailure(NamedTuple):
    """A failure of the table with the numbers of a line filled in."""

    id: str
    means: str
    do: str
    source: str


@lru_cache(maxsize=1)
def table() -> tuple[Failure, ...]:
    """Return the whole table, in the order in which its patterns are tried."""
    folder = files("diag.knowledge") / "failures"
    found = []
    for file in sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name):
        for each in tomllib.loads(file.read_text(encoding="utf-8"))["failure"]:
            ends = each.pop("releases", ("", ""))
            found.append(Failure(**{**each, "pattern": re.compile(each["pattern"])}, first=ends[0], last=ends[1]))
    return tuple(found)


def known_failure(texts: tuple[str, ...], version: str) -> KnownFailure | None:
    """Return the failure that the first of these texts shows which shows any; None if the table has none.

    A failure of other releases is left out if the release is known.
    """
    at = release(version)
    for text in texts:
        for failure in table():
            first, last = release(failure.first), release(failure.last)
            applies = not at or ((not first or first <= at) and (not last or at <= last))
            if applies and (match := failure.pattern.search(text)):
                values = {name: value or "?" for name, value in match.groupdict().items()}
                filled = (_filled(each, values) for each in (failure.means, failure.do))
                return KnownFailure(failure.id, *filled, failure.source)
    return None


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Fill in the groups; a number that cannot be computed is a question mark."""

    def value(place: re.Match[str]) -> str:
        given = [values.get(name.strip(), "?") for name in place["names"].split(",")]
        if not place["function"]:
            return printable(given[0])
        try:
            return FUNCTIONS[place["function"]](*(float(each.replace(",", "")) for each in given))
        except ValueError:
            return "?"

    return _PLACE.sub(value, text)


def _divisors(count: float) -> str:
    """List the divisors, of those that are numbers of GPUs: "1, 2, 4 or 7"."""
    found = [str(each) for each in range(1, min(int(count), MOST_DIVISOR) + 1) if count % each == 0]
    return listed(found, most=len(found)) if len(found) < 2 else f"{', '.join(found[:-1])} or {found[-1]}"


def _share(free: float, total: float) -> str:
    """The share of the GPU that a server may take; "?" if that is too little for one."""
    share = math.floor(100 * (free / total - RESERVE)) / 100 if total else 0.0
    if share < LEAST_SHARE:
        raise ValueError
    return f"{share:g}"


FUNCTIONS: Mapping[str, Callable[..., str]] = {
    "divisors": _divisors,
    "down": lambda value: str(math.floor(value)),
    "up": lambda value: str(math.ceil(value)),
    "minus": lambda one, other: f"{one - other:g}",
    "share": _share,
}
"""Arithmetic of the texts."""
