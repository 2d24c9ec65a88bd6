"""Parts of a report, built once and drawn as plain text or as Markdown: a label with sentences, or with a table."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from diag.report import markdown
from diag.report.layout import LABEL, labelled, table


class LabelledPart(NamedTuple):
    """A label with sentences, or with the rows of a table and their head."""

    label: str
    texts: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    head: Sequence[str] = ()


def plain(parts: Iterable[LabelledPart], width: int = LABEL) -> list[str]:
    """Draw parts as lines, their labels in a column of this width; a head that begins with the label is left out."""
    lines = []
    for part in parts:
        head = [part.head] if part.head and part.head[0] != part.label else []
        if part.rows:
            lines += table([*head, *part.rows], label=part.label, width=width)
        else:
            lines += labelled(part.label, part.texts, width)
    return lines


def in_markdown(parts: Iterable[LabelledPart]) -> list[str]:
    """Draw parts as tables and lists of Markdown, without empty ones."""
    blocks = []
    for part in parts:
        if part.rows:
            blocks.append(markdown.table(part.head, [tuple(map(markdown.escape, row)) for row in part.rows]))
        elif part.texts:
            blocks.append(markdown.bullets(part.label[:1].upper() + part.label[1:], part.texts))
    return blocks
