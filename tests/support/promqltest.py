"""Run Prometheus' own PromQL test scripts (promql/promqltest/testdata of prometheus/prometheus) against diag.promql.

A script loads series into a storage and asks it; each question is one `Case` with the samples of that moment.
Run as a program, it prints the refused cases of a folder: the content of promqltest_unsupported.txt.
"""

import dataclasses
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from diag.core.errors import QueryFailed, Unsupported
from diag.promql import STALE, Block, Labels, Samples, Vector, evaluate, parse
from diag.promql.data import Selector

# Whole scripts about what is not evaluated. Prometheus answers the second one so only behind two feature flags.
OUTSIDE = frozenset({"native_histograms.test", "type_and_unit.test"})
TOLERANCE = 1e-6  # relative, that of Prometheus' own runner
NATIVE = "native histograms"

_LOAD = re.compile(r"load(_with_nhcb)?\s+(\S+)$")
_INSTANT = re.compile(r"eval(?:_(\w+))?\s+instant\s+at\s+(\S+)\s+(.+)$")
_RANGE = re.compile(r"eval(?:_(\w+))?\s+range\s+from\s+(\S+)\s+to\s+(\S+)\s+step\s+(\S+)\s+(.+)$")
_SERIES = re.compile(r'((?:[a-zA-Z_:][\w:]*)?\s*(?:\{(?!\{)(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?)\s*(.*)$')
_NUMBER = r"(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|[iI]nf|[nN]a[nN])"
_VALUES = re.compile(rf"([+-]?{_NUMBER})([+-]{_NUMBER})?(?:x(\d+))?$")
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

Key = frozenset[tuple[str, str]]
Values = list[float | None]  # None: no sample


@dataclass(frozen=True)
class Case:
    """One question of a script; `expected` is empty and `expected_scalar` None where the answer is nothing."""

    place: str
    promql: str
    instants: np.ndarray
    storage: "Storage"
    fails: bool
    ordered: bool
    expected: tuple[tuple[Labels, Values], ...]
    expected_scalar: float | None
    expects_native: bool


@dataclass(frozen=True)
class Storage:
    """Loaded series: values by time. A series of native histograms has its labels only."""

    series: dict[Key, dict[int, float]] = field(default_factory=dict)
    native: set[Key] = field(default_factory=set)

    def samples(self) -> Samples:
        blocks = []
        for key, points in self.series.items():
            times = np.array(sorted(points), dtype=np.int64)
            blocks.append(Block((dict(key),), times, np.array([[points[int(time)] for time in times]], dtype=float)))
        return Samples(blocks)

    def native_samples(self) -> Samples:
        return Samples([Block((dict(key),), np.array([0]), np.array([[0.0]])) for key in self.native])

    def loaded(self, step: int, lines: list[str], with_native: bool) -> "Storage":
        """Return the storage with the series of a load command added."""
        series, native = {key: dict(points) for key, points in self.series.items()}, set(self.native)
        for line in lines:
            labels, text = _split(line)
            key = frozenset(labels.items())
            if "{{" in text:
                native.add(key)
                continue
            points = {i * step: value for i, value in enumerate(_values(text)) if value is not None}
            series.setdefault(key, {}).update(points)
            name = labels.get("__name__", "")
            if with_native and name.endswith("_bucket"):
                merged = {k: v for k, v in labels.items() if k != "le"} | {"__name__": name.removesuffix("_bucket")}
                native.add(frozenset(merged.items()))
        return Storage({k: v for k, v in series.items() if k not in native}, native)


def cases(script: Path) -> Iterator[Case]:
    """Read a script."""
    lines = ["" if line.strip().startswith("#") else line.strip() for line in script.read_text().splitlines()]
    storage = Storage()
    for number, line in enumerate(lines, start=1):
        body = _body(lines, number)
        if line == "clear":
            storage = Storage()
        elif load := _LOAD.match(line):
            storage = storage.loaded(_millis(load[2]), body, bool(load[1]))
        elif asked := _INSTANT.match(line):
            instants = np.array([_millis(asked[2])])
            yield _case(f"{script.name}:{number}", (asked[3], asked[1]), instants, storage, body)
        elif asked := _RANGE.match(line):
            start, end, step = (_millis(asked[i]) for i in (2, 3, 4))
            instants = np.arange(start, end + 1, step)
            yield _case(f"{script.name}:{number}", (asked[5], asked[1]), instants, storage, body)
        elif re.match(r"eval|load", line):
            raise ValueError(f"{script.name}:{number}: {line}")


def _body(lines: list[str], start: int) -> list[str]:
    end = start
    while end < len(lines) and lines[end]:
        end += 1
    return lines[start:end]


def _case(place: str, asked: tuple[str, str | None], instants: np.ndarray, storage: Storage, body: list[str]) -> Case:
    promql, mode = asked
    expects = [line.split()[1] for line in body if line.startswith("expect ")]
    answers = [line for line in body if not re.match(r"expect(ed)?[ _]", line)]
    scalar = None
    if len(answers) == 1 and re.fullmatch(rf"[+-]?{_NUMBER}", answers[0]):
        scalar = float(answers.pop())
    native = any("{{" in answer for answer in answers)
    expected = () if native else tuple((labels, _values(text)) for labels, text in map(_split, answers))
    fails, ordered = mode == "fail" or "fail" in expects, mode == "ordered" or "ordered" in expects
    return Case(place, promql, instants, storage, fails, ordered, expected, scalar, native)


def _split(line: str) -> tuple[Labels, str]:
    """Split a series description into its labels and its values."""
    match = _SERIES.match(line)
    assert match, line
    return _labels(match[1].strip()), match[2]


def _labels(text: str) -> Labels:
    if text in ("", "{}"):
        return {}
    node = parse(text).node
    assert isinstance(node, Selector), text
    return {matcher.label: matcher.value for matcher in node.matchers if matcher.value}


def _values(text: str) -> Values:
    values: Values = []
    for token in text.split():
        if token.startswith("_"):
            values += [None] * int(token[2:] or 1)
        elif token == "stale":
            values.append(float(STALE))
        else:
            match = _VALUES.match(token)
            assert match, token
            steps = [float(match[1]), *[float(match[2] or 0)] * int(match[3] or 0)]
            values += np.cumsum(steps).tolist()
    return values


def _millis(duration: str) -> int:
    if duration.lstrip("-").replace(".", "").isdigit():
        return int(float(duration) * 1000)
    parts = re.findall(r"(\d+)(ms|[smhd])", duration)
    assert "".join(number + unit for number, unit in parts) == duration, duration
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


def outcome(case: Case) -> str:
    """Return "agrees", "differs: ..." or why there is no answer."""
    if case.expects_native or "{{" in case.promql:
        return NATIVE
    try:
        expression = parse(case.promql)
        if any(case.storage.native_samples().select(selector.matchers) for selector in _selectors(expression.node)):
            return NATIVE
        vector = evaluate(expression, case.storage.samples(), case.instants)
    except Unsupported as refusal:
        return str(refusal).replace(f"`{case.promql}` ", "").rstrip(".")
    except QueryFailed as failure:
        return "agrees" if case.fails else f"fails: {failure}"
    return "differs: it should fail" if case.fails else _comparison(case, vector)


def _selectors(node: object) -> Iterator[Selector]:
    if isinstance(node, Selector):
        yield node
    elif isinstance(node, tuple):
        for part in node:
            yield from _selectors(part)
    elif dataclasses.is_dataclass(node):
        for item in dataclasses.fields(node):
            yield from _selectors(getattr(node, item.name))


def _comparison(case: Case, vector: Vector) -> str:
    answers = [
        (labels, [float(value) if there else None for value, there in zip(values, present, strict=True)])
        for labels, values, present in zip(vector.labels, vector.values, vector.present, strict=True)
    ]
    if case.expected_scalar is not None:
        same = vector.scalar and all(_same(value, case.expected_scalar) for value in answers[0][1])
        return "agrees" if same else f"differs: {answers}"
    length = case.instants.size
    wanted = [(labels, (values + [None] * length)[:length]) for labels, values in case.expected]
    if not case.ordered:
        answers, wanted = sorted(answers, key=_order), sorted(wanted, key=_order)
    same = len(answers) == len(wanted) and not vector.scalar
    same = same and all(
        ours[0] == theirs[0] and all(map(_same, ours[1], theirs[1]))
        for ours, theirs in zip(answers, wanted, strict=True)
    )
    return "agrees" if same else f"differs: {answers} instead of {wanted}"


def _order(series: tuple[Labels, Values]) -> list[tuple[str, str]]:
    return sorted(series[0].items())


def _same(ours: float | None, theirs: float | None) -> bool:
    """Compare as Prometheus' almost.Equal does."""
    if ours is None or theirs is None:
        return ours is theirs
    if np.isnan(ours) or np.isnan(theirs):
        return bool(np.isnan(ours) and np.isnan(theirs))
    if ours == theirs:
        return True
    if ours == 0 or theirs == 0:
        return abs(ours - theirs) < TOLERANCE * np.finfo(float).tiny
    return bool(abs(ours - theirs) < TOLERANCE * (abs(ours) + abs(theirs)))


def outcomes(folder: Path) -> dict[str, str]:
    """Run every script of a folder; return what came of each case by its place."""
    scripts = sorted(path for path in folder.glob("*.test") if path.name not in OUTSIDE)
    return {case.place: outcome(case) for script in scripts for case in cases(script)}


def refused(results: dict[str, str]) -> list[str]:
    """Return a line for each case that has no answer, but for those about native histograms."""
    return [f"{place} {result}" for place, result in results.items() if result not in ("agrees", NATIVE)]


if __name__ == "__main__":
    print("\n".join(refused(outcomes(Path(sys.argv[1])))))
