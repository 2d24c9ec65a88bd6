"""Brings flags.json up to date with the vLLM installed for a Python: `python -m diag.vllm.flags.update PYTHON`.

A release newer than the newest known extends the ranges of the flags that it accepts; a flag that it no longer has
keeps its last release. How many words a flag takes, of what kind, and its other names are those of the newest release
whose parser was read.
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
    """The content of flags.json with what one release's parser says of itself.

    How flags are used, and the environment, are those of the newest release that was ever described.
    """
    version, before = described["version"], known.get("described", "0")
    newest = release(version) >= release(before)
    flags = {name: dict(flag) for name, flag in known["flags"].items()}
    for name, flag in described["flags"].items():
        flags[name] = _flag(flags.get(name), flag, version, newest)
    return {
        "about": known["about"],
        "versions": _releases(known["versions"], version),
        "described": version if newest else before,
        "environment": sorted(described["environment"]) if newest else known["environment"],
        "flags": dict(sorted(flags.items())),
    }


def _releases(known: Sequence[str], version: str) -> list[str]:
    """0.6.3.post1 and 0.6.3 are one release."""
    return sorted([*known, *([] if release(version) in map(release, known) else [version])], key=release)


def _flag(known: Known | None, described: Known, version: str, newest: bool) -> Known:
    first, last = known["versions"] if known else (version, version)
    ranges = [min(first, version, key=release), max(last, version, key=release)]
    used = {name: value for name, value in described.items() if value and (name, value) != ("value", "text")}
    return {"versions": ranges, **(used if newest or not known else {**known, "versions": ranges})}


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
