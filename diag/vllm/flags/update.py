"""Brings flags.json up to date with the vLLM installed for a Python: `python -m diag.vllm.flags.update PYTHON`.

A release newer than the newest known extends the ranges of the flags that it accepts; a flag that it no longer has
keeps its last release. How many words a flag takes, of what kind, and its other names are those of the newest release
whose parser was read; where an older one had it otherwise, `until` says so, by the last release that is known to.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from diag.core.errors import BadUsage
from diag.vllm.flags.installed_parser import describe
from diag.vllm.flags.registry import FILE, release

Known = dict[str, Any]


def merged(known: Known, described: Known) -> Known:
    """The content of flags.json with what one release's parser says of itself."""
    own, others = described["version"], known["versions"]
    is_new = release(own) not in map(release, others)  # 0.6.3.post1 and 0.6.3 are one release
    releases = sorted([*others, own] if is_new else others, key=release)
    version = next(known for known in releases if release(known) == release(described["version"]))
    parsers = sorted({*known["parsers"], version}, key=release)
    flags = {name: dict(flag) for name, flag in known["flags"].items()}
    for name, flag in described["flags"].items():
        flags[name] = _flag(flags.get(name), flag, version, known["parsers"])
    return {
        "about": known["about"],
        "versions": releases,
        "parsers": parsers,
        "environment": sorted(described["environment"]) if version == parsers[-1] else known["environment"],
        "flags": dict(sorted(flags.items())),
    }


def _flag(known: Known | None, described: Known, version: str, parsers: Sequence[str]) -> Known:
    """A flag with what the parser of a release says of it, beside what those of other releases said."""
    first, last = known["versions"] if known else (version, version)
    used = {name: value for name, value in described.items() if value and (name, value) != ("value", "text")}
    said = _said(known, parsers) | {version: used} if known else {version: used}
    newest, *older = sorted(said, key=release, reverse=True)
    until, later = {}, said[newest]
    for at in older:
        if said[at] != later:
            until[at] = later = said[at]
    ranges = [min(first, version, key=release), max(last, version, key=release)]
    return {"versions": ranges, **said[newest], **({"until": until} if until else {})}


def _said(known: Known, parsers: Sequence[str]) -> dict[str, Known]:
    """How each release whose parser was read and that has the flag uses it."""
    first, last = map(release, known["versions"])
    base = {name: value for name, value in known.items() if name not in ("versions", "until")}
    until = sorted(known.get("until", {}).items(), key=lambda entry: release(entry[0]))
    return {
        at: next((used for end, used in until if release(at) <= release(end)), base)
        for at in parsers
        if first <= release(at) <= last
    }


def written(content: Known) -> str:
    """The file: one flag a line."""
    flags = ",\n".join(f"  {json.dumps(name)}: {json.dumps(flag)}" for name, flag in content["flags"].items())
    head = "".join(f' "{name}": {json.dumps(content[name])},\n' for name in content if name != "flags")
    return f'{{\n{head} "flags": {{\n{flags}\n }}\n}}\n'


if __name__ == "__main__":
    before = json.loads(FILE.read_text(encoding="utf-8"))
    try:
        content = merged(before, describe(sys.argv[-1]))
    except BadUsage as error:
        sys.exit(str(error))
    FILE.write_text(written(content), encoding="utf-8")
