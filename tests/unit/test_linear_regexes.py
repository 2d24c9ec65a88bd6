"""No regular expression over foreign text takes more steps than some multiple of its length, whatever somebody wrote.

Where an expression tries to match at one place, as all but those of `SEARCHED` do, it is so unless two repetitions of
any length stand behind each other that may both give back what they took.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from functools import cache
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]

import pytest

from diag import log
from diag.log.patterns import MOST_SEARCHED, Pattern, patterns, read_values

OTHERS = (
    "diag.exposition",
    "diag.sources.recording.reader",
    "diag.sources.recording.writer",
    "diag.http.prometheus_api",
    "diag.exporter.process.table",
    "diag.exporter.process.server",
    "diag.vllm.command.secret_search",
    "diag.core.formatting",
)
LONG = 400
"""A repetition of up to so many characters is a constant."""
SEARCHED = {"_ANSI", "_TOKEN", "no_reason", "_REPEATED", "_QUERIED", "_TIMEOUT", "_HOME"}
"""Tried at every place: none of them may scan far, and then fail."""
REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)
EVERY = frozenset(map(chr, range(128)))


def expressions() -> Iterator[tuple[str, str, int]]:
    """Name, text and flags of every expression over logs, pages, recordings and a Prometheus' errors."""
    logs = (found.name for found in pkgutil.iter_modules(log.__path__, f"{log.__name__}."))
    for module in (*logs, *OTHERS):
        for name, value in vars(importlib.import_module(module)).items():
            if isinstance(value, re.Pattern):
                yield name, value.pattern if isinstance(value.pattern, str) else value.pattern.decode(), value.flags
            elif name == "MARKS" and module == "diag.log.marks":
                yield from ((field, regex.pattern, regex.flags) for field, regex in value._asdict().items())
            elif name == "_LOOKED_FOR":
                yield from ((name, regex.pattern, 0) for regex, _ in value)
    yield from ((pattern.begins, pattern.begins, 0) for pattern in patterns())


@cache
def members(item: str) -> frozenset[str]:
    return frozenset(filter(re.compile(item, re.DOTALL).fullmatch, EVERY))


def first(items: Iterable[tuple[object, object]]) -> frozenset[str]:
    """The characters that these items may begin with."""
    found: frozenset[str] = frozenset()
    for op, av in items:
        if op is sre.LITERAL:
            return found | {chr(av)}
        if op is sre.BRANCH:
            return found.union(*map(first, av[1]))
        if op is sre.SUBPATTERN:
            return found | first(av[3])
        if op in (*REPEATS, sre.POSSESSIVE_REPEAT):
            found |= first(av[2])
            if av[0]:
                return found
        elif op in (sre.AT, sre.ASSERT, sre.ASSERT_NOT):
            continue
        else:
            return found | characters(op, av)
    return found | {"the end"}


def characters(op: object, av: object) -> frozenset[str]:
    """Return the characters of a class, or of any other item that is not taken apart."""
    if op is sre.NOT_LITERAL:
        return EVERY - {chr(av)}  # type: ignore[arg-type]
    if op is not sre.IN:
        return EVERY
    named = {sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_WORD: r"\w", sre.CATEGORY_SPACE: r"\s"}
    named |= {sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_NOT_WORD: r"\W", sre.CATEGORY_NOT_SPACE: r"\S"}
    found: set[str] = set()
    for kind, value in av:  # type: ignore[attr-defined]
        if kind is sre.LITERAL:
            found.add(chr(value))
        elif kind is sre.RANGE:
            found |= set(map(chr, range(value[0], value[1] + 1)))
        elif kind is sre.CATEGORY:
            found |= members(named[value])
    return EVERY - found if av[0][0] is sre.NEGATE else frozenset(found)  # type: ignore[index]


def gives_back(items: list[tuple[object, object]], rest: list[tuple[object, object]]) -> int:
    """How many repetitions of any length, on one way through the items, may end at more than one place and then fail.

    `rest` follows the items.
    """
    most = 0
    for at, (op, av) in enumerate(items):
        behind = [*items[at + 1 :], *rest]
        if op is sre.BRANCH:
            most += max(gives_back(list(way), behind) for way in av[1])
        elif op is sre.SUBPATTERN:
            most += gives_back(list(av[3]), behind)
        elif op in (sre.ASSERT, sre.ASSERT_NOT):
            most += gives_back(list(av[1]), [(sre.LITERAL, 0)])
        elif op in REPEATS:
            inside = gives_back(list(av[2]), behind)
            follows = first(behind)
            is_long = av[1] > LONG and "the end" not in follows and bool(first(av[2]) & follows)
            most += (2 * inside if av[1] > 1 else inside) + is_long
    return most


def alphabet(items: Iterable[tuple[object, object]]) -> frozenset[str]:
    """All characters that these items may consist of."""
    found: frozenset[str] = frozenset()
    for op, av in items:
        if op is sre.LITERAL:
            found |= {chr(av)}
        elif op is sre.BRANCH:
            found = found.union(*map(alphabet, av[1]))
        elif op is sre.SUBPATTERN:
            found |= alphabet(av[3])
        elif op in (*REPEATS, sre.POSSESSIVE_REPEAT):
            found |= alphabet(av[2])
        elif op not in (sre.AT, sre.ASSERT, sre.ASSERT_NOT):
            found |= characters(op, av)
    return found


def begins_inside(
    items: list[tuple[object, object]], rest: list[tuple[object, object]], begins: frozenset[str]
) -> bool:
    """Return True if an unbounded repetition before a possible failure contains the expression's beginning."""
    for at, (op, av) in enumerate(items):
        behind = [*items[at + 1 :], *rest]
        ways = av[1] if op is sre.BRANCH else [av[3]] if op is sre.SUBPATTERN else []
        if op in (*REPEATS, sre.POSSESSIVE_REPEAT):
            ways = [av[2]]
            if av[1] > LONG and "the end" not in first(behind) and alphabet(av[2]) & begins:
                return True
        if any(begins_inside(list(way), behind, begins) for way in ways):
            return True
    return False


def is_linear(name: str, text: str, flags: int) -> bool:
    items = list(_parser.parse(text, flags & ~re.UNICODE))
    return gives_back(items, []) <= 1 and not (name in SEARCHED and begins_inside(items, [], first(items)))


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        (r".*x", True),
        (r"\d+x\d+y", True),
        (r".*x.*y", False),
        (r"(?:.*x)*y", False),
        (r".*x.*", True),
        (r"a|.*x.*y", False),
        (r".{0,99}x.*y", True),
    ],
)
def test_single_position_check_finds_its_known_defect(regex: str, expected: bool) -> None:
    assert is_linear("", regex, 0) == expected


@pytest.mark.parametrize(
    ("regex", "expected"),
    [(r"'(?:[^'\\]|\\.)*'", False), (r"'(?:[^'\\]|\\.)*+'", False), (r"'(?:[^'\\]|\\.)*+'?", True), (r"x\d+y", True)],
)
def test_all_positions_check_finds_its_known_defect(regex: str, expected: bool) -> None:
    assert is_linear("_TOKEN", regex, 0) == expected


def test_every_expression_is_linear() -> None:
    assert not {name: text for name, text, flags in expressions() if not is_linear(name, text, flags)}
    assert {name for name, *_ in expressions()} >= SEARCHED


def test_the_numbers_of_a_line_are_looked_for_at_its_beginning_only() -> None:
    pattern = Pattern("event", "", (), "x", numbers=r"(?P<n>\d+)")
    assert read_values(pattern, "x" * (MOST_SEARCHED - 1) + "12") == {"n": "1"}
