"""Values as text: numbers with units, moments, lists and foreign text for people to read, and sizes to parse."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

MIB, GIB = 2**20, 2**30
FLAG_SUFFIXES: Mapping[str, int] = {
    **{"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    **{"K": 2**10, "M": MIB, "G": GIB, "T": 2**40},
}
"""Suffixes of vLLM's human-readable integers since 0.8.4: 8k is 8,000 and 8K is 8,192."""
BYTE_UNITS: Mapping[str, int] = {
    **{"b": 1, "bytes": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": MIB, "GiB": GIB, "TiB": 2**40},
}
"""1 GB is 10^9 bytes and 1 GiB 2^30."""
LOG_UNITS: Mapping[str, int] = {**BYTE_UNITS, "KB": 2**10, "MB": MIB, "GB": GIB}
"""Units in vLLM's log: before 0.8.3 it wrote GB and meant GiB."""
QUANTITY_SUFFIXES: Mapping[str, float] = {
    **{"m": 1e-3, "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18},
    **{"Ki": 2**10, "Mi": MIB, "Gi": GIB, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60},
}
"""Suffixes of Kubernetes' quantities: memory in bytes, CPUs in cores."""
_UNITS: Mapping[str, int] = {**FLAG_SUFFIXES, **BYTE_UNITS}
_WRITTEN = re.compile(r"(\d{1,19}(?:\.\d+)?)( ?)([A-Za-z]*)")
MOST_SHOWN = 4_000
"""Characters of one foreign text: a label may be megabytes long."""
_SCALES: dict[str, tuple[tuple[float, float, str], ...]] = {
    "seconds": ((1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min"), (float("inf"), 3600, "h")),
    "bytes": ((MIB, 1, "bytes"), (GIB, MIB, "MiB"), (float("inf"), GIB, "GiB")),
    "celsius": ((float("inf"), 1, "°C"),),
    "watts": ((float("inf"), 1, "W"),),
}
"""For absolute values below a bound: the divisor, and the unit to write."""
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {chr(code) for code in range(0xFE00, 0xFE10)}
"""Characters that are printable in Unicode, but invisible."""
_ADDRESS = re.compile(r"(?<![A-Za-z0-9])([A-Za-z][A-Za-z0-9+.-]{0,20}:/+)([^\s'\"<>]+)")
_AUTHORITY = re.compile(r"[^/?#]*")
_USER = re.compile(r"(?<![\w./:@-])-{0,2}[\w.-]+:[^\s/'\"@]{1,200}@(?!sha256:)")
_QUERY = re.compile(r"(?<=[\w/])\?[\w.~%-]{1,100}=[^\s'\"<>]*")
"""User and query of an address without a scheme: user:password@host/path?name=value."""
_PUNCTUATION = ".,;:!?)]}"


def addresses_without_secrets(text: str) -> str:
    """Drop user, password, query and fragment of every address in a text, also of one that `Path` made https:/.

    If an @ behind the host shows that a password has a slash in it, nothing of the address stays.
    """

    def without_secrets(match: re.Match[str]) -> str:
        scheme, address = match.groups()
        _, at, rest = address.rpartition("@")
        authority = _AUTHORITY.match(address)
        if at and authority and "@" not in authority[0]:
            return f"{scheme}…"
        ended = rest.rstrip(_PUNCTUATION)
        kept = re.split(r"[?#]", ended, maxsplit=1)[0]
        name, colon, port = kept.partition("/")[0].partition(":")
        if colon and ended.endswith("…") and not port.isdecimal() and not name.startswith("["):  # cut within a password
            return f"{scheme}{name}:…"
        return scheme + kept + rest[len(ended) :]

    text = _ADDRESS.sub(without_secrets, text) if ":/" in text else text
    return _QUERY.sub("", _USER.sub("", text))


def escaped(text: str, most: int = MOST_SHOWN) -> str:
    """Return at most so many characters of a text, with every invisible or control character escaped.

    Terminal escapes, line breaks and changes of the direction of writing are among them: a label may hold anything.
    """
    text = text if len(text) <= most else text[: most - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char.isprintable() and char not in _BLANK else char.encode("unicode_escape").decode() for char in text
    )


def printable(text: str, most: int = 160) -> str:
    """Escape foreign text within a sentence, and shorten it."""
    return escaped(text, most)


def in_python(value: object) -> str:
    """Return a value as Python writes it, escaped and shortened, for a sentence about a file in which it is wrong."""
    return printable(repr(value), 60)


def pasted(text: str) -> str:
    """Escape a command that is going to be pasted: in one line, and never shortened."""
    return escaped(text, len(text))


YEAR_10_000 = 253_402_300_800
"""Unix seconds from which no date can be written."""


class TimeFormat(NamedTuple):
    """Formats unix seconds with their zone, as a time of day or, if `dated`, with the date; UTC unless `local`."""

    dated: bool = False
    local: bool = False

    def __call__(self, unix: float) -> str:
        return self._text(unix, "%Y-%m-%d %H:%M:%S %Z" if self.dated else "%H:%M:%S %Z")

    def span(self, start: float, end: float) -> str:
        """Format two times, a common date and the zone written once: "02:30:22 - 02:30:34 UTC"."""
        first = self._text(start, "%Y-%m-%d %H:%M:%S" if self.dated else "%H:%M:%S")
        return f"{first} - {self._replace(dated=self.dated and not self.is_one_day(start, end))(end)}"

    def is_one_day(self, start: float, end: float) -> bool:
        return self._text(start, "%F") == self._text(end, "%F")

    def _text(self, unix: float, form: str) -> str:
        moment_of_day = datetime.fromtimestamp(unix, UTC)
        return (moment_of_day.astimezone() if self.local else moment_of_day).strftime(form)


clock = TimeFormat()
"""Formats a time of day: "02:16:07 UTC"."""
moment = TimeFormat(dated=True)
"""Formats a date and a time of day: "2026-07-14 02:16:07 UTC"."""


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Format a count with its noun: "1 scrape", "2 scrapes", "3 queries"."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def listed(names: list[str], separator: str = ", ", most: int = 3) -> str:
    """Join the first few of many names: "a, b, c and 7 more"."""
    rest = len(names) - most
    return separator.join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def number(value: float) -> str:
    """Format a number with three significant digits and as few characters as possible, never with an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{'-' if value < 0 else ''}<0.001" if 0 < abs(value) < 0.001 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """Format a value with its unit: "7.4 %", "85 ms", "2.5 min", "17.9 GiB"; a plain number for any other unit.

    Units: "share" (0..1, written as a percentage), "seconds", "bytes", "celsius", "watts", "bool" (yes or no), "unix
    time" (a time of day), "PID". A sentence names what a plain number counts.
    """
    if unit == "share":
        return f"{number(100 * value)} %"
    if unit == "bool":
        return "yes" if value else "no"
    if unit == "unix time" and 0 <= value < YEAR_10_000:
        return clock(value)
    if unit == "PID":
        return f"{value:.0f}"
    if unit == "seconds" and value == 0:
        return f"{number(value)} s"
    scale, name = next(((scale, name) for below, scale, name in _SCALES.get(unit, ()) if abs(value) < below), (1, ""))
    return f"{number(value / scale)} {name}" if name else number(value)


def gibibytes(size: float, digits: int = 2) -> str:
    """Format bytes in GiB with a fixed number of decimals, for sizes that are compared: "79.10 GiB"."""
    return f"{size / GIB:.{digits}f} GiB"


def threshold(comparison: str, limit: float, unit: str) -> str:
    """Format a threshold: "> 90 %", "<= 4", "= yes" for a signal whose unit is bool."""
    if unit == "bool":
        return "= yes" if comparison in (">", ">=") else "= no"
    return f"{comparison} {quantity(limit, unit)}"


def flag_integer(text: str) -> float | None:
    """Parse a human-readable integer as vLLM's flags do; None if invalid: a binary suffix takes whole numbers only."""
    match = _WRITTEN.fullmatch(text)
    if not match or match[2] or match[3] not in FLAG_SUFFIXES or (match[3].isupper() and "." in match[1]):
        return None
    return float(match[1]) * FLAG_SUFFIXES[match[3]]


def resource_quantity(text: str) -> float | None:
    """Parse a quantity as Kubernetes writes it, 64Gi or 500m; None if invalid."""
    match = _WRITTEN.fullmatch(text)
    if not match or match[2] or match[3] not in QUANTITY_SUFFIXES:
        return None
    return float(match[1]) * QUANTITY_SUFFIXES[match[3]]


def parse_size(text: str) -> float | None:
    """Parse a size with a suffix as in flags or a unit of bytes: 32k, 79.1GiB; None if invalid."""
    match = _WRITTEN.fullmatch(text.strip())
    return float(match[1]) * _UNITS[match[3]] if match and match[3] in _UNITS else None
