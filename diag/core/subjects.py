"""Subjects of a report, and rows of values of each, indexed by instance."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Subject = tuple[tuple[str, str], ...]
"""Sorted pairs of label and value, for example (("engine", "0"), ("instance", "host:8000"))."""
Floats = NDArray[np.float64]
Instants = NDArray[np.int64]
T = TypeVar("T")
LARGEST = 1e30
"""The largest reading: a larger one is no measurement, and the product of two would be infinite."""
UNKNOWN = "?"
"""Text in the place of a label that is missing."""


def median(values: NDArray[Any]) -> float:
    """Return the median of numbers, of which none is NaN; np.median would load numpy.ma for it."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def label_value(labels: Subject | Mapping[str, str], name: str) -> str:
    """Return the value of a label; "" if it is missing: PromQL does not tell a missing label from an empty one."""
    return (dict(labels) if isinstance(labels, tuple) else labels).get(name, "")


def instance_name(subject: Subject) -> str:
    """Return the server of a subject, "" if it has none."""
    return label_value(subject, "instance")


def in_words(subject: Subject) -> str:
    """Return a subject in words: "host:8000 engine 0"."""
    rest = (f"{name} {value}" for name, value in subject if name != "instance" and value)
    return " ".join([instance_name(subject) or UNKNOWN, *rest])


def filled(text: str, labels: Mapping[str, str], **others: str) -> str:
    """Fill labels into a text such as "{role} {rank} takes {value}"; "" if the labels have nothing to name in it."""
    named = {name: value for name, value in labels.items() if value}
    if not named.keys() & set(re.findall(r"\{(\w+)", text)):
        return ""
    return text.format_map(defaultdict(lambda: UNKNOWN, named | others))


class SubjectIndex(Generic[T]):
    """Values indexed by the instance of their subject, so that the few that may agree are found at once in a fleet."""

    def __init__(self, pairs: Iterable[tuple[Subject, T]] = ()) -> None:
        self._by_instance: dict[str, list[tuple[Subject, T]]] = {}
        for subject, value in pairs:
            self.add(subject, value)

    def add(self, subject: Subject, value: T) -> None:
        self._by_instance.setdefault(instance_name(subject), []).append((subject, value))

    def like(self, subject: Subject) -> Iterator[tuple[Subject, T]]:
        """Yield the pairs whose subject agrees with this one, in the order in which they were added."""
        instance = instance_name(subject)
        near = [instance, ""] if instance else self._by_instance
        return (pair for name in near for pair in self._by_instance.get(name, ()) if agree(pair[0], subject))


class Rows(dict[Subject, Floats]):
    """One row of values per subject."""

    @cached_property
    def _index(self) -> SubjectIndex[Floats]:
        return SubjectIndex(self.items())

    def like(self, subject: Subject) -> Iterator[tuple[Subject, Floats]]:
        """Yield the rows whose subject is the same on the labels that both have."""
        return self._index.like(subject)

    def of(self, subject: Subject) -> Floats | None:
        """Return the subject's own row, else the first that agrees with it."""
        row = self.get(subject)
        return row if row is not None else next((row for _, row in self.like(subject)), None)


def agree(one: Subject, other: Subject) -> bool:
    """Return True if two subjects are the same on the labels that both have."""
    left, right = dict(one), dict(other)
    return all(left[name] == right[name] for name in left.keys() & right.keys())
