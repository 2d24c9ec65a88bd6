"""An answer as a tree of labelled spans, built once and only drawn by terminal, Markdown and HTML.

A part has a label, sentences or rows, and parts below it. The words of every label are in labels.toml.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from diag.core.declarations import PACKAGE, read


class Span(str):
    """A run of text and the role by which a surface draws it: "command", "value", "history", "link", a verdict, ..."""

    role: str

    def __new__(cls, text: str, role: str) -> "Span":
        span = super().__new__(cls, text)
        span.role = role
        return span


Text = str | tuple[str, ...]
"""A text, or its spans and texts one behind another."""


def spans(text: Text) -> Iterator[tuple[str, str]]:
    """Yield each run of a text with its role, "" without one."""
    for span in (text,) if isinstance(text, str) else text:
        yield str(span), getattr(span, "role", "")


def phrases(text: str) -> tuple[str, ...]:
    """Divide a declared text where a sentence or a clause ends; where room is short, its first ones stay."""
    return tuple(re.split(r"(?<=[.;:] )", text))


def joined(text: Text) -> str:
    return "".join(span for span, _ in spans(text))


@cache
def labels() -> Mapping[str, str]:
    """Return the words of each label."""
    return read(PACKAGE / "report" / "labels.toml", dict[str, str])


@cache
def states(kind: str) -> Mapping[str, str]:
    """Return the states of this kind in words."""
    return read(PACKAGE / "report" / "states.toml", dict[str, dict[str, str]])[kind]


def label(name: str) -> Span:
    return Span(labels()[name], f"label {name}")


class ReportPart(NamedTuple):
    """A label ("" for none), and what it labels: sentences, the rows of a table below their head, further parts.

    The parts of a fix are what it costs, how to undo it and so on.
    """

    label: str = ""
    texts: Sequence[Text] = ()
    rows: Sequence[Sequence[str]] = ()
    head: Sequence[str] = ()
    parts: Sequence["ReportPart"] = ()

    @property
    def name(self) -> str:
        """The name of its label in labels.toml, "" of any other label."""
        return getattr(self.label, "role", "").removeprefix("label ")

    @property
    def sentence(self) -> str:
        """The label with its texts: "Trade-off: excess requests wait at the gateway."."""
        return f"{self.label}: {', '.join(map(joined, self.texts))}."

    @property
    def whole(self) -> Text:
        """A change and what is known about it, in sentences, without its rationale."""
        texts = (span for text in self.texts for span in ((text,) if isinstance(text, str) else text))
        return (*texts, *(f" {fact.sentence}" for fact in self.parts if fact.name != "rationale"))

    def of(self, *names: str) -> list["ReportPart"]:
        """Return its parts with these names."""
        return [part for part in self.parts if part.name in names]
