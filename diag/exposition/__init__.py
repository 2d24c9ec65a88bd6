"""A /metrics page in the text format 0.0.4: its lines here, whole pages as samples in `scrapes`.

The lines are read without numpy, which the exporter does not load.
"""

import re

MOST_BYTES, MOST_LINES, LONGEST_LINE = 16 * 2**20, 200_000, 64 * 2**10
"""Limits of one decoded page: vLLM's has some 50 kB and 700 lines; any page within the limits is read in 2 s."""
CUT = b"# the page was cut off here"
"""The line that replaces an incomplete last line in a recording."""

_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*"
    r'(?:\{((?:[^"}]|"(?:\\.|[^"\\])*+")*+)\}[ \t]*|[ \t])'
    r"([-+]?[0-9a-zA-Z.][-+0-9a-zA-Z.]*)"
    r"([ \t]+-?[0-9][0-9.eE+]*)?([ \t]+#.*)?\s*"
)
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:\\.|[^"\\])*+)"[ \t]*(?:,[ \t]*|$)')
_ESCAPE = re.compile(r'\\([\\"n])')


class NotMetrics(Exception):
    """A page that counts as a failed scrape; the message is the reason."""


def sample(line: bytes) -> tuple[str, dict[str, str], str, str, str]:
    """Return name, labels, value, timestamp and exemplar of a line; ValueError if it is no sample.

    Timestamp and exemplar may be "".
    """
    match = _SAMPLE.fullmatch(line.decode("utf-8", "replace"))
    if match is None:
        raise ValueError
    name, inside, value, timestamp, exemplar = match.groups(default="")
    labels: dict[str, str] = {}
    at = 0
    while at < len(inside.rstrip(" \t")):
        label = _LABEL.match(inside, at)
        if label is None or label[1] in labels or label[1] == "__name__":
            raise ValueError
        labels[label[1]] = _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], label[2])
        at = label.end()
    return name, labels, value, timestamp, exemplar


def lines_from(page: bytes, beginning: bytes) -> bytes:
    """Return the lines of a page that begin with a text; they are adjacent."""
    first = page.find(b"\n" + beginning) + 1
    if not first:
        return b""
    last = page.rfind(b"\n" + beginning) + 1
    return page[first : page.index(b"\n", last)]


def is_cut(rest: bytes) -> bool:
    """Return True if the rest after the last newline is part of a line."""
    return rest.strip() not in (b"", b"# EOF")


def refuse_other_formats(page: bytes) -> None:
    """Raise NotMetrics if a page starts as HTML or JSON does."""
    start = page[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"<"):
        raise NotMetrics("answered an HTML page, not metrics")
    if start.startswith((b"{", b"[")):
        raise NotMetrics("answered JSON, not metrics")
