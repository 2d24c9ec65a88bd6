"""vLLM's metrics and variables by release; `python -m diag.vllm.metric_names PACKAGE RELEASE` adds a release.

PACKAGE is the folder `vllm` of a wheel, an sdist or an installation. A metric counts where the source has it as a whole
string: as an argument, a constant or a field, wherever the metric is made. A variable counts where it is read, or
declared in envs.py.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from diag.core.declarations import read
from diag.vllm.flags.registry import release

SUFFIX = re.compile(r"(?:_(?:total|bucket|sum|count|created))+$")
_BEGINNINGS = {"vllm:spec_decode", "vllm:diffusion"}
"""Strings that select metrics by how their names begin."""
Releases = tuple[str, str]
_OLDEST = "0.6.0"


class Names(NamedTuple):
    """A file with names of one kind, each with the first and the last release that has it.

    `name` finds them anywhere in a source, `declared` in its envs.py.
    """

    file: Path
    kind: str
    name: re.Pattern[str]
    about: str
    declared: re.Pattern[str] = re.compile(r"$.")


METRICS = Names(
    Path(__file__).parent / "metric_names.json",
    "metrics",
    re.compile(r"""["'](vllm:\w+)["']"""),
    "Every metric in vLLM's source with its first and last release from 0.6.0 on, counters with or without _total.",
)
VARIABLES = Names(
    Path(__file__).parent / "flags" / "variables.json",
    "variables",
    re.compile(r"""(?:environ(?:\.\w+)?\s*[\[(]|getenv\s*\()\s*["'](VLLM_\w+)["']"""),
    "Every variable VLLM_... that vLLM's source reads, with its first and last release from 0.6.0 on (all but 0.15).",
    re.compile(r"""^[ ]+["'](VLLM_\w+)["']:""", re.MULTILINE),
)


@cache
def known() -> Mapping[str, Releases]:
    """Return every metric of vLLM without its suffix, with the first and the last release that exports it."""
    metrics: dict[str, Releases] = {}
    for name, releases in _read(METRICS).items():
        bare = SUFFIX.sub("", name)
        metrics[bare] = _joined(metrics.get(bare, releases), releases)
    return metrics


def exported_by(metrics: Iterable[str]) -> Releases:
    """Return the first and the last release that export all of these metrics; "" for an open end, or if none does."""
    bare = {SUFFIX.sub("", metric) for metric in metrics}
    first, last = _OLDEST, newest()
    for begin, end in (known()[metric] for metric in bare if metric in known()):
        first, last = max(first, begin, key=release), min(last, end, key=release)
    if release(first) > release(last):
        return "", ""
    return "" if first == _OLDEST else first, "" if last == newest() else last


@cache
def variables() -> Mapping[str, Releases]:
    """Return every variable VLLM_... with the first and the last release that reads it."""
    return _read(VARIABLES)


@cache
def newest() -> str:
    """Return the newest release whose variables are known; it stands for later ones."""
    return max((last for _, last in variables().values()), key=release)


def reads(version: str, name: str) -> bool:
    """Return True if a release reads a variable."""
    first, last = variables().get(name, ("", ""))
    is_from = release(first) <= max(release(version), release(_OLDEST))
    return bool(first) and is_from and (last == newest() or release(version) <= release(last))


@cache
def unread() -> Mapping[str, str]:
    """Return why no incident reads a metric, by a pattern of its name without "vllm:" and suffix."""
    return read(Path(__file__).parent / "unread_metrics.toml", dict[str, str], "why")


def why_unread(metric: str) -> str:
    """Return why no incident reads a metric; "" if one does."""
    name = SUFFIX.sub("", metric).removeprefix("vllm:")
    return next((why for pattern, why in unread().items() if re.fullmatch(pattern, name)), "")


def in_source(package: Path, names: Names = METRICS) -> set[str]:
    """Return the metrics, or the variables, that a source of vLLM names."""
    found = set[str]()
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        found |= {*names.name.findall(text), *(names.declared.findall(text) if file.name == "envs.py" else ())}
    return found - _BEGINNINGS


def with_release(found: set[str], version: str, names: Names = METRICS) -> dict[str, Releases]:
    """Return the content of the file with the names of one more release."""
    content = _read(names)
    for name in found:
        content[name] = _joined(content.get(name, (version, version)), (version, version))
    return dict(sorted(content.items()))


def _read(names: Names) -> dict[str, Releases]:
    content = json.loads(names.file.read_text(encoding="utf-8"))[names.kind]
    return {name: (first, last) for name, (first, last) in content.items()}


def _joined(one: Releases, other: Releases) -> Releases:
    return min(one[0], other[0], key=release), max(one[1], other[1], key=release)


def written(content: Mapping[str, Releases], names: Names = METRICS) -> str:
    """Return the text of the file: a line per name."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(list(releases))}" for name, releases in content.items())
    return f'{{\n "about": {json.dumps(names.about)},\n "{names.kind}": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    for each in (METRICS, VARIABLES):
        found_in = with_release(in_source(Path(sys.argv[1]), each), sys.argv[2], each)
        each.file.write_text(written(found_in, each), encoding="utf-8")
