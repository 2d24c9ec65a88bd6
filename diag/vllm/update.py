"""Brings flags.json up to date with an installed vLLM: `python -m diag.vllm.update PYTHON`, of the one that has it.

A release newer than the newest known extends the ranges of the flags that it accepts; of a known one only how many
words each flag takes, its --no- form and its short names are read.
"""

import json
import sys
from typing import Any

from diag.vllm.ask import describe
from diag.vllm.flags import FILE, release

Known = dict[str, Any]


def merged(known: Known, described: Known) -> Known:
    """The content of flags.json with what one release's parser says of itself."""
    version = described["version"]
    versions = sorted({*known["versions"], version}, key=release)
    flags = {name: dict(each) for name, each in known["flags"].items()}
    for name, said in described["flags"].items():
        flags[name] = _flag(flags.get(name), said, version)
    return {**known, "versions": versions, "flags": dict(sorted(flags.items()))}


def _flag(known: Known | None, said: Known, version: str) -> Known:
    first, last = known["versions"] if known else (version, version)
    flag = {"versions": [min(first, version, key=release), max(last, version, key=release)], "takes": said["takes"]}
    return flag | ({"no": True} if said["no"] else {}) | ({"short": said["short"]} if said["short"] else {})


def written(content: Known) -> str:
    """The file: one flag a line."""
    flags = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in content["flags"].items())
    about, versions = (json.dumps(content[name]) for name in ("about", "versions"))
    return f'{{\n "about": {about},\n "versions": {versions},\n "flags": {{\n{flags}\n }}\n}}\n'


if __name__ == "__main__":
    before = json.loads(FILE.read_text(encoding="utf-8"))
    FILE.write_text(written(merged(before, describe(sys.argv[1]))), encoding="utf-8")
