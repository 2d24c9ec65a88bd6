"""Text from elsewhere made fit to print, and moments in words."""

from datetime import UTC, datetime


def printable(text: str, most: int = 160) -> str:
    """Escape control characters (a label may hold a terminal's escapes) and shorten."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)


def clock(millis: float, day: bool = False) -> str:
    """A moment (unix milliseconds) as "12:00:05 UTC"."""
    moment = datetime.fromtimestamp(millis / 1000, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC" if day else "%H:%M:%S UTC")


def plural(count: int, noun: str) -> str:
    """A count in words: "1 scrape", "2 scrapes"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(names: list[str], most: int = 3) -> str:
    """The first few of many names: "a, b, c and 7 more"."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
