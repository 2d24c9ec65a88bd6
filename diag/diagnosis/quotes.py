"""The lines of a server's log that decide what a present incident is, as they were when it was last present."""

import re
import shlex
from typing import NamedTuple

import numpy as np

from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.query_cache import QueryCache

LINES_BEFORE = 40
"""What led to a quoted line: a traceback is that long."""


class Quote(NamedTuple):
    """A line of a log: `file` is "" and `line` None where they are not known.

    `process` is the process of vLLM that wrote it, and `cause` the exception that it was raised from; "" for none.
    """

    text: str
    file: str
    line: int | None
    process: str
    cause: str

    @property
    def place(self) -> str:
        """Where it stands: "server.log:71"; "" where that is not known."""
        return f"{self.file}:{self.line}" if self.line is not None else self.file

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """What a command calls the file and its lines up to this one; nothing where the place is not known."""
        if not self.file or self.line is None:
            return ()
        first = max(1, self.line - LINES_BEFORE)
        return ("log", _word(self.file)), ("log_from", str(first)), ("log_to", str(self.line))


def quotes(diagnosis: Diagnosis, queries: QueryCache) -> tuple[Quote, ...]:
    """The newest line that the incident's server logged of its end; nothing where there is none."""
    signal = diagnosis.incident.quotes
    if signal is None or diagnosis.state != "present":
        return ()
    rows = queries.ask(signal.culprit_promql, diagnosis.incident.per, queries.window(diagnosis.incident))
    values = ((float(row[diagnosis.reported]), dict(labels)) for labels, row in rows.like(diagnosis.subject))
    found = max((pair for pair in values if not np.isnan(pair[0])), key=lambda pair: pair[0], default=None)
    return (_quote(found[1]),) if found else ()


def _quote(labels: dict[str, str]) -> Quote:
    """From labels that may be another exporter's: any may be missing."""
    number = labels.get("line", "")
    return Quote(
        text=labels.get("text", ""),
        file=labels.get("file", ""),
        line=int(number) if number.isdecimal() and len(number) < 12 else None,
        process=labels.get("process", ""),
        cause=labels.get("cause", ""),
    )


def _word(file: str) -> str:
    """A file as a shell takes it; of a home folder, which is not named, the tilde has to stand outside of quotes."""
    home, rest = re.match(r"((?:~/)?)(.*)", file, re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{home}{shlex.quote(rest)}"
