"""How values are written for people: numbers with their units, moments, lists, and text from elsewhere."""

from datetime import UTC, datetime

from diag.core.sizes import GIB, MIB

MOST_SHOWN = 4_000
"""Characters of one text from elsewhere: a label may be megabytes long."""
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {chr(code) for code in range(0xFE00, 0xFE10)}
"""What Unicode calls printable, and nobody sees."""


def escaped(text: str, most: int = MOST_SHOWN) -> str:
    """The text with control characters, terminal escapes, line breaks and what is invisible or turns the direction of
    writing made visible, and with at most so many of its characters: a label may hold anything.
    """
    text = text if len(text) <= most else text[: most - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char.isprintable() and char not in _BLANK else char.encode("unicode_escape").decode() for char in text
    )


def printable(text: str, most: int = 160) -> str:
    """The same, shorter: for text from elsewhere within a sentence."""
    return escaped(text, most)


def pasted(text: str) -> str:
    """A command to be pasted, in one line and whole: half of one is another one."""
    return escaped(text, len(text))


def clock(unix: float) -> str:
    """A time of day, "02:16:07 UTC", from unix seconds."""
    return datetime.fromtimestamp(unix, UTC).strftime("%H:%M:%S UTC")


def moment(unix: float) -> str:
    """A date and a time of day, "2026-07-14 02:16:07 UTC", from unix seconds."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(count: int, noun: str, nouns: str = "") -> str:
    """A count in words: "1 scrape", "2 scrapes", "3 queries"."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def listed(names: list[str], separator: str = ", ", most: int = 3) -> str:
    """The first few of many names: "a, b, c and 7 more"."""
    rest = len(names) - most
    return separator.join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def number(value: float) -> str:
    """A number with three significant digits and as few characters as possible, never with an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{'-' if value < 0 else ''}<0.001" if 0 < abs(value) < 0.001 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """A value of a signal with its unit: "7.4 %", "85 ms", "2.5 min", "17.9 GiB"; a plain number for any other unit.

    Units: "share" (0..1, written as a percentage), "seconds", "bytes", "celsius", "watts", "bool" (yes or no). A
    sentence names what a plain number counts.
    """
    if unit == "share":
        return f"{number(100 * value)} %"
    if unit == "bool":
        return "yes" if value else "no"
    scale, name = _scaled(abs(value), unit)
    return f"{number(value / scale)} {name}" if name else number(value)


def gibibytes(size: float, digits: int = 2) -> str:
    """Bytes in GiB with a fixed number of decimals, for sizes that are compared with each other: "79.10 GiB"."""
    return f"{size / GIB:.{digits}f} GiB"


def threshold(comparison: str, limit: float, unit: str) -> str:
    """A threshold as it is printed beside a value: "> 90 %", "<= 4", "= yes" for a signal that says yes or no."""
    if unit == "bool":
        return "= yes" if comparison in (">", ">=") else "= no"
    return f"{comparison} {quantity(limit, unit)}"


_SCALES: dict[str, tuple[tuple[float, float, str], ...]] = {
    "seconds": ((1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min"), (float("inf"), 3600, "h")),
    "bytes": ((MIB, 1, "bytes"), (GIB, MIB, "MiB"), (float("inf"), GIB, "GiB")),
    "celsius": ((float("inf"), 1, "°C"),),
    "watts": ((float("inf"), 1, "W"),),
}
"""For values below a bound: what to divide by, and the unit to write."""


def _scaled(value: float, unit: str) -> tuple[float, str]:
    """What to divide a value of this unit by, and what to write after it."""
    if unit == "seconds" and value == 0:
        return 1, "s"
    return next(((scale, name) for below, scale, name in _SCALES.get(unit, ()) if value < below), (1, ""))
