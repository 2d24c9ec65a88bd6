"""Comments of a launch file that drop findings, `# diag: ignore RULE reason`, and the lines of findings."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_COMMENT = re.compile(r"(?P<own>^\s*)?(?:#|//|<!--)[ \t]*diag: ignore\b[ \t]*(?P<rules>[\w,]*)[ \t]*(?P<reason>[^\n]*)")
_SUBJECT = re.compile(r"\A(?:(--?[A-Za-z][\w-]*)|([A-Z][A-Z0-9]*_[A-Z0-9_]+)|The (\w+) (?:probe|check))")
"""What a message is about, at its beginning: a flag, a variable, or a probe."""


class LaunchText(NamedTuple):
    """The lines of a launch file, none for a command, the line of each server, 0 if it is unknown, and the comments."""

    lines: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    comments: tuple[tuple[int, re.Match[str]], ...] = ()

    @classmethod
    def of(cls, file: str, starts: Collection[int]) -> "LaunchText":
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        lines = tuple(text.splitlines())
        comments = ((at, _COMMENT.search(line)) for at, line in enumerate(lines, 1))
        return cls(lines, tuple(starts), tuple((at, comment) for at, comment in comments if comment))

    def ignored(self, server: int) -> set[str]:
        """Return the rules that comments drop for a server: within it, in the line above it, or above all servers."""
        first = min(filter(None, self.starts), default=0)
        rules = set[str]()
        for at, comment in self.comments:
            place = at + (comment["own"] is not None)  # a comment on a line of its own is about the next line
            if comment["reason"].strip("-> ") and (place < first or not first or place in self._range(server)):
                rules |= {*comment["rules"].split(",")}
        return rules

    def mistakes(self, known: Collection[str]) -> Iterator[str]:
        """Yield why a comment drops nothing."""
        for at, comment in self.comments:
            for rule in filter(None, comment["rules"].split(",")):
                if rule not in known:
                    yield f"line {at}: no rule is called '{rule[:40]}', and nothing is ignored"
                elif not comment["reason"].strip("-> "):
                    yield f"line {at}: `diag: ignore {rule}` has no reason, and ignores nothing"

    def line(self, server: int, message: str) -> int:
        """Return the line of what a message about a server begins with, 0 if no line of it has that."""
        subject = _SUBJECT.match(message)
        if not subject:
            return 0
        name = next(filter(None, subject.groups()))
        # as a flag, a keyword in Python or YAML, or in camel case
        words = "[-_]?".join(map(re.escape, re.split("[-_]", name.lstrip("-"))))
        mention = re.compile(rf"(?<![\w-])-{{0,2}}{words}(?![\w-])", re.IGNORECASE)
        return next((at for at in self._range(server) if mention.search(self.lines[at - 1])), 0)

    def _range(self, server: int) -> range:
        """Return the lines from a server to the next one."""
        start = self.starts[server] if server < len(self.starts) else 0
        end = min((other for other in self.starts if other > start > 0), default=len(self.lines) + 1)
        return range(max(1, start), end)
