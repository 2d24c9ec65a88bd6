"""The log lines that show an incident."""

import re
import shlex
from typing import NamedTuple

from diag.core.subjects import label_value
from diag.diagnosis.diagnose import Diagnosis, culprit_series
from diag.diagnosis.query_cache import QueryCache


class Quote(NamedTuple):
    """A line of a log: `file` is "" and `line` None if unknown.

    `process` is the process of vLLM that wrote it, `cause` the exception that it was raised from, and `frames` the
    innermost frames of its traceback; "" for none.
    """

    text: str
    file: str
    line: int | None
    process: str
    cause: str
    frames: str = ""

    @property
    def place(self) -> str:
        """File and line: "server.log:71"; "" if unknown."""
        return f"{self.file}:{self.line}" if self.line is not None else self.file

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Values for a command that reads the file, as a shell takes them.

        Empty if the place is unknown. The tilde of a home folder, which is not named, has to stand outside of quotes.
        """
        if not self.file or self.line is None:
            return ()
        home, rest = re.match(r"((?:~/)?)(.*)", self.file, re.DOTALL).groups()  # type: ignore[union-attr]
        return (("log", f"{home}{shlex.quote(rest)}"),)


def quotes(diagnosis: Diagnosis, queries: QueryCache) -> tuple[Quote, ...]:
    """Return the newest line that the server logged about a present incident, as it was when it was last present."""
    signal = diagnosis.incident.quotes
    if signal is None or diagnosis.state != "present":
        return ()
    series = culprit_series(signal, diagnosis, queries)
    newest = max(series, key=lambda pair: pair[1], default=None)
    if newest is None:
        return ()
    labels = newest[0]
    number = label_value(labels, "line")
    line = int(number) if number.isdecimal() and len(number) < 12 else None
    text, file, process, cause, frames = (
        label_value(labels, name) for name in ("text", "file", "process", "cause", "frames")
    )
    return (Quote(text, file, line, process, cause, frames),)
