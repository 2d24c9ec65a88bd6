"""Formulas of the declared expressions: placeholders filled in, and each part as the series that a rule records.

A recorded series is named by Prometheus' convention, level:metric:operations: the labels of a subject, the name of the
part, and its range function and window, as in `instance_engine:preemptions:increase5m`.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from diag.core.contract import Contract
from diag.core.incident import Condition, Incident, Part, Signal
from diag.knowledge.signals import DECLARED
from diag.promql import Formula

PLACEHOLDER = re.compile(r"\$\$|\$(\w+)(?:\[(\w+)\])?(?: offset (\w+))?(?: by \(([^()]*)\))?")
"""A dollar sign, or a name with the window, the offset and the labels that replace those of the surrounding text."""
_GROUPING = re.compile(r"\bby \(([^()]*)\)|\$(?!by\b|window\b)(\w+)(?:\[\w+\])?(?: offset \w+)?(?: by \(([^()]*)\))?")
_RANGE_FUNCTION = re.compile(r"(\w+?)(?:_over_time)?\([^()]*\[")
_Values = tuple[tuple[str, float], ...]


def formula(asked: Part | Signal | str, per: tuple[str, ...], window: str, contract: Contract) -> Formula:
    """Return the formula of a signal, a part or an expression for subjects with the labels `per`.

    KeyError names an unknown placeholder.
    """
    return _filled(asked, per, window, "", tuple(contract.values().items()))


def conjunction(incident: Incident, window: str, contract: Contract) -> Formula:
    """Return the whole incident as one PromQL conjunction: one sample per affected subject."""
    parts, terms = {}, []
    for condition in incident.conditions:
        part = formula(condition.signal, incident.per, window, contract)
        parts[part.name] = part
        terms.append(comparison(part.name, condition, contract))
    return Formula("", " and ".join(terms), parts)


def parts_first(formulas: Iterable[Formula]) -> dict[str, Formula]:
    """Return formulas and all their parts by name, each after those that it reads."""
    found: dict[str, Formula] = {}

    def add(reader: Formula) -> None:
        if reader.name not in found:
            for part in reader.parts.values():
                add(part)
            found[reader.name] = reader

    for reader in formulas:
        add(reader)
    return found


def comparison(series: str, condition: Condition, contract: Contract) -> str:
    return f"{series} {condition.op} {contract.limit(condition.limit):g}"


@lru_cache(maxsize=4096)
def expanded(promql: str) -> str:
    """Return an expression with its parts written out; `$window`, `$by` and entries of the contract stay."""

    def put(found: re.Match[str]) -> str:
        part = DECLARED.get(found[1] or "")
        if part is None:
            return found[0]
        text = expanded(part.promql)
        text = text.replace("$window", found[2]) if found[2] else text
        text = re.sub(r"(\[[$\w]+\])", rf"\1 offset {found[3]}", text) if found[3] else text
        return f"({text.replace('$by', found[4]) if found[4] else text})"

    return PLACEHOLDER.sub(put, promql)


@lru_cache(maxsize=4096)  # a catalogue over one window takes 600
def _filled(asked: Part | Signal | str, per: tuple[str, ...], window: str, ago: str, values: _Values) -> Formula:
    entries = {name: f"{value:g}" for name, value in values} | {"window": window, "by": ", ".join(per)}
    parts: dict[str, Formula] = {}

    def put(found: re.Match[str]) -> str:
        name, own_window, own_offset, by = found.groups()
        if name is None:
            return "$"
        if name in entries:
            return entries[name] + found[0][len(name) + 1 :]
        own_per = per if by is None else _labels(by, per)
        part = _filled(DECLARED[name], own_per, own_window or window, own_offset or ago, values)
        parts[part.name] = part
        return part.name

    promql = asked if isinstance(asked, str) else asked.promql
    if ago:
        promql = promql.replace("[$window]", f"[$window] offset {ago}")
    text = PLACEHOLDER.sub(put, promql)
    if isinstance(asked, str):
        return Formula("", text, parts)

    # the name of the series that a rule records
    is_leaf = expanded(asked.promql) == asked.promql and asked.promql.count("[") == 1
    operations = _RANGE_FUNCTION.findall(asked.promql) if is_leaf else []
    over = f"{window}{f'_offset{ago}' if ago else ''}" if "$window" in expanded(asked.promql) else ""
    labels = _level(asked.promql, per)
    if "histogram_quantile(" in expanded(asked.promql):  # it takes the buckets away
        labels = tuple(label for label in labels if label != "le")
    level = "_".join(labels) or "series"
    return Formula(":".join(filter(None, (level, asked.id, f"{''.join(operations)}{over}"))), text, parts)


def _level(promql: str, per: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of the result: those of its first aggregation, or of its first part."""
    found = _GROUPING.search(promql)
    if found is None:
        return ()
    if found[2] is not None:
        if found[2] not in DECLARED:
            return _level(promql[found.end() :], per)
        return _level(DECLARED[found[2]].promql, _labels(found[3], per) if found[3] else per)
    return _labels(found[1], per)


def _labels(written: str, per: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of a grouping clause, `per` in the place of `$by`."""
    labels = (label.strip() for label in written.split(","))
    return tuple(name for label in labels for name in (per if label == "$by" else (label,)))
