"""vLLM's command-line flags by release: which exist, how many words they take, what they are called for short.

The data is flags.json (read from the source of 59 releases, and from an installed parser by `diag.vllm.update`).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

FILE = Path(__file__).parent / "flags.json"
Takes = Literal["one", "optional", "many", "none"]


@dataclass(frozen=True)
class Flag:
    """`first` and `last` are the releases whose parser accepts it; `no` whether it has a --no- form."""

    name: str
    first: str
    last: str
    takes: Takes
    no: bool = False
    short: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Its releases in words: ">= 0.24.0", "0.7.3 - 0.26.0", "" for all that are known."""
        oldest, newest = versions()[0], versions()[-1]
        if self.last == newest:
            return "" if self.first == oldest else f">= {self.first}"
        return f"<= {self.last}" if self.first == oldest else f"{self.first} - {self.last}"

    def in_release(self, version: str) -> bool:
        """Whether that release accepts it; yes for an unknown one, and for one newer than all known that keeps it."""
        at = release(version)
        ends = release(self.last)
        return not at or (release(self.first) <= at and (at <= ends or self.last == versions()[-1]))


@dataclass(frozen=True)
class Option:
    """A word of a command line understood: its flag, whether it is switched on, and the key behind a dot."""

    flag: Flag
    on: bool = True
    key: str = ""


@cache
def _file() -> tuple[tuple[str, ...], dict[str, Flag]]:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(content["versions"]), {name: _flag(name, **each) for name, each in content["flags"].items()}


def _flag(name: str, versions: list[str], takes: Takes, no: bool = False, short: Sequence[str] = ()) -> Flag:
    return Flag(name, versions[0], versions[1], takes, no, tuple(short))


def versions() -> tuple[str, ...]:
    """The releases that are known, the oldest first."""
    return _file()[0]


def known() -> dict[str, Flag]:
    """Every flag of any release by its name, --max-num-seqs for one."""
    return _file()[1]


@cache
def _short() -> dict[str, Flag]:
    return {short: each for each in known().values() for short in each.short}


@lru_cache(maxsize=4096)
def understood(word: str, version: str = "") -> Option | None:
    """The flag that a word such as --max_num_seqs, -tp, --no-x, -O3, --x.key or an abbreviation means to a release."""
    if word.startswith("-O") and not word.startswith("--"):
        return Option(known()["--compilation-config" if word == "-O" else "--optimization-level"])
    name, _, key = word.partition(".")
    if not name.startswith("--"):
        return Option(_short()[name], key=key) if name in _short() else None
    name = name.replace("_", "-")
    if name in known():
        return Option(known()[name], key=key)
    positive = known().get("--" + name.removeprefix("--no-"))
    if positive and name.startswith("--no-"):
        return Option(positive, on=False)
    return _abbreviated(name, version)


def _abbreviated(name: str, version: str) -> Option | None:
    """What argparse makes of a unique beginning."""
    able = [each for each in known().values() if each.name.startswith(name) and each.in_release(version)]
    return Option(able[0]) if len(able) == 1 and len(name) > len("--") else None


def release(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, (0, 32, 0); empty where there are none."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else ()
