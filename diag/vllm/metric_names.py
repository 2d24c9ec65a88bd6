"""vLLM's metrics by release (metric_names.json); `python -m diag.vllm.metric_names PACKAGE RELEASE` adds a release.

PACKAGE is the folder `vllm` of a wheel, an sdist or an installation. A name counts where the source has it as a whole
string: as an argument, a constant or a field, wherever the metric is made.
"""

import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from diag.vllm.flags.registry import release

FILE = Path(__file__).parent / "metric_names.json"
SUFFIX = re.compile(r"(?:_(?:total|bucket|sum|count|created))+$")
_NAME = re.compile(r"""["'](vllm:\w+)["']""")
_BEGINNINGS = {"vllm:spec_decode", "vllm:diffusion"}
"""Strings that select metrics by how their names begin."""
Releases = tuple[str, str]


@cache
def known() -> Mapping[str, Releases]:
    """Return every metric of vLLM without its suffix, with the first and the last release that exports it."""
    metrics: dict[str, Releases] = {}
    for name, releases in _read().items():
        bare = SUFFIX.sub("", name)
        metrics[bare] = _joined(metrics.get(bare, releases), releases)
    return metrics


def in_source(package: Path) -> set[str]:
    """Return the metrics that a source of vLLM names."""
    texts = (file.read_text(encoding="utf-8") for file in package.rglob("*.py"))
    return {name for text in texts for name in _NAME.findall(text)} - _BEGINNINGS


def with_release(names: set[str], version: str) -> dict[str, Releases]:
    """Return the content of the file with the metrics of one more release."""
    content = _read()
    for name in names:
        content[name] = _joined(content.get(name, (version, version)), (version, version))
    return dict(sorted(content.items()))


def _read() -> dict[str, Releases]:
    content = json.loads(FILE.read_text(encoding="utf-8"))["metrics"]
    return {name: (first, last) for name, (first, last) in content.items()}


def _joined(one: Releases, other: Releases) -> Releases:
    return min(one[0], other[0], key=release), max(one[1], other[1], key=release)


def written(content: Mapping[str, Releases]) -> str:
    """Return the text of the file: a line per metric."""
    about = (
        "Every metric in vLLM's source with its first and last release from 0.6.0 on, counters with or without _total."
    )
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(list(releases))}" for name, releases in content.items())
    return f'{{\n "about": {json.dumps(about)},\n "metrics": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    FILE.write_text(written(with_release(in_source(Path(sys.argv[1])), sys.argv[2])), encoding="utf-8")
