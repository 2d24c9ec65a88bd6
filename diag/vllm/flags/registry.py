"""vLLM's command-line flags by release: which exist, how many words they take, their short names and defaults.

The data is flags.json (read from the source of 59 releases, and from the parsers of 26 by `installed_parser.py`).
"""

import json
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.core.formatting import GIB

FILE = Path(__file__).parent / "flags.json"
Takes = Literal["one", "optional", "many", "none"]
Value = Literal["integer", "size", "number", "json", "object", "text"]
"""A size is a whole number, perhaps with a suffix: 8k is 8000, 8K is 8192; an object is one of JSON."""


class Flag(NamedTuple):
    """A flag; the releases from `first` to `last` accept it, and `no` is True if it has a --no- form.

    `choices` are empty if any value is accepted, `null` is True if None is; `alias` is the flag that this is another
    name of. All this is as in the newest `described` release; `until` has the older forms, each with the last release
    that has it, the oldest first.
    """

    name: str
    first: str
    last: str
    takes: Takes
    no: bool = False
    short: tuple[str, ...] = ()
    value: Value = "text"
    choices: tuple[str, ...] = ()
    null: bool = False
    alias: str = ""
    until: tuple[tuple[str, "Flag"], ...] = ()

    def at(self, version: str) -> "Flag":
        """Return the flag as a release has it; the newest form for an unknown release."""
        at = release(version)
        return next((flag for last, flag in self.until if at and at <= release(last)), self)

    def in_release(self, version: str) -> bool:
        """Return True if a release accepts the flag, or is unknown.

        A release newer than all known ones is taken to accept the flags of the newest known one; one between two known
        ones may have the flags of either.
        """
        before, after = neighbours(version)
        ends = release(self.last)
        return not before or (release(self.first) <= after and (before <= ends or self.last == versions()[-1]))


class Option(NamedTuple):
    """The meaning of a word of a command line: its flag, on or off, and the key behind a dot."""

    flag: Flag
    on: bool = True
    key: str = ""


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def _flag(name: str, versions: list[str], until: Mapping[str, Any] | None = None, **more: Any) -> Flag:
    fields: dict[str, Any] = {
        field: tuple(value) if isinstance(value, list) else value for field, value in more.items()
    }
    forms = sorted((until or {}).items(), key=lambda form: release(form[0]))
    older = tuple((last, _flag(name, versions, **form)) for last, form in forms)
    return Flag(name, versions[0], versions[1], until=older, **fields)


@cache
def versions() -> tuple[str, ...]:
    """Return the known releases, the oldest first."""
    return tuple(_content()["versions"])


@cache
def known() -> dict[str, Flag]:
    """Return every flag of any release by its name, such as --max-num-seqs."""
    return {name: _flag(name, **entry) for name, entry in _content()["flags"].items()}


@cache
def neighbours(version: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the known releases that are not newer, and not older; the release itself beyond an end."""
    at, all_known = release(version), [release(one) for one in versions()]
    before = max((one for one in all_known if one <= at), default=at)
    return before, min((one for one in all_known if one >= at), default=at)


def described() -> str:
    """Return the newest release whose parser was read."""
    return parsers()[-1]


@cache
def parsers() -> tuple[str, ...]:
    """Return the releases whose parser was read, the oldest first."""
    return tuple(_content()["parsers"])


def nearest(version: str) -> str:
    """Return the first release with a known parser that is not older than `version`, else the newest."""
    return next((parser for parser in parsers() if release(version) <= release(parser)), described())


def is_described(version: str) -> bool:
    """Return True if the parser of this release was read."""
    return release(version) in map(release, parsers())


@cache
def environment() -> frozenset[str]:
    """Return the variables VLLM_... that the newest described release reads."""
    return frozenset(_content()["environment"])


@cache
def _short() -> dict[str, Flag]:
    """Return flags by their short names, including names that only some releases have."""
    flags = known().values()
    older = {short: flag for flag in flags for _, form in flag.until for short in form.short}
    return older | {short: flag for flag in flags for short in flag.short}


@lru_cache(maxsize=4096)
def understood(word: str, version: str = "") -> Option | None:
    """Return the flag that a release reads in a word: --max_num_seqs, -tp, --no-x, -O3, --x.key or an abbreviation."""
    name, _, key = word.partition(".")
    option: Option | None = None
    if word.startswith("-O"):
        level = known()["--optimization-level"]
        is_level = word != "-O" and level.in_release(version)
        option = Option(level) if is_level else Option(known()["--compilation-config"], key=key)
    elif not name.startswith("--"):
        option = Option(_short()[name], key=key) if name in _short() else None
    else:
        name = name.replace("_", "-")
        positive = known().get("--" + name.removeprefix("--no-"))
        if name in known():
            longer = None if known()[name].in_release(version) else _abbreviated(name, version)
            option = longer or Option(known()[name], key=key)
        elif positive and name.startswith("--no-"):
            option = Option(positive, on=False)
        else:
            option = _abbreviated(name, version)
    return option._replace(flag=option.flag.at(version)) if option else None


def _abbreviated(name: str, version: str) -> Option | None:
    """Return the flag that a unique abbreviation means to argparse."""
    able = [flag for flag in known().values() if flag.name.startswith(name) and flag.in_release(version)]
    return Option(able[0]) if len(able) == 1 and len(name) > len("--") else None


def releases(word: str, narrowed: tuple[str, str] = ("", "")) -> tuple[str, str]:
    """Return the first and the last release with a flag, "" for an open end, within the range `narrowed`."""
    option = understood(word.partition("=")[0])
    oldest, newest = versions()[0], versions()[-1]
    first, last = (option.flag.first, option.flag.last) if option else ("", "")
    ends = ("" if first == oldest else first, "" if last == newest else last)
    return max(ends[0], narrowed[0], key=release), min(filter(None, (ends[1], narrowed[1])), key=release, default="")


@lru_cache(maxsize=1024)
def release(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, (0, 32, 0); () if there are none.

    A build from a source tree without tags, mostly a fork's, is called 0.1.dev15917.
    """
    found = re.match(r"v?(?!0\.1\.dev)(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


@cache
def changes() -> Mapping[str, str]:
    """Return the first release with each change of vLLM that changes the memory of a server."""
    return read(PACKAGE / "vllm" / "changes.toml", dict[str, str])


def since(version: str, change: str) -> bool:
    """Return True if a release has a change; False if the release is unknown."""
    return release(version) >= release(changes()[change])


class _Defaults(NamedTuple):
    """The tables of defaults.toml."""

    unset: tuple[str, ...]
    numbers: Mapping[str, Mapping[str, float | Literal["open"]]]
    words: Mapping[str, str]


_TABLES = read(FILE.with_name("defaults.toml"), _Defaults)
WORD_DEFAULTS = _TABLES.words
UNSET = frozenset(_TABLES.unset)
"""Flags without a default of their own: if they are not set, there is no such bound, or it follows from other flags."""

_BIG, _HUGE = 70 * GIB, 160 * GIB
_SEQS, _TOKENS = "--max-num-seqs", "--max-num-batched-tokens"
_SMALL_BATCH: Mapping[str, float] = {_SEQS: 256.0, _TOKENS: 2048.0}
_BIG_BATCH: Mapping[str, float] = {_SEQS: 1024.0, _TOKENS: 8192.0}
_HUGE_BATCH: Mapping[str, float] = {_SEQS: 1024.0, _TOKENS: 16384.0}


def default(flag: str, version: str, gpu_bytes: float | None = None, gpu_name: str = "") -> float | None:
    """Return the default of a flag such as --max-num-seqs in a release, switches as 0 and 1.

    `gpu_bytes` and `gpu_name` are the memory and the name of one GPU in NVML. None if the release has no such flag, if
    the flag has no default of its own (`UNSET`), or if the default depends on something unknown. An unknown release
    ("") has only defaults that all releases share. vLLM lowers --max-num-seqs to --max-num-batched-tokens, and that to
    --max-num-seqs x --max-model-len; `--performance-mode throughput` doubles both.
    """
    if flag not in known() or not known()[flag].in_release(version):
        return None
    if flag == "--disable-custom-all-reduce" and gpu_bytes is None:
        return None  # vLLM for CPUs disables it itself
    if flag in _SMALL_BATCH:
        return _batch(flag, version, gpu_bytes, gpu_name.lower())
    by_release = _TABLES.numbers.get(flag, {})
    if not release(version) and len(by_release) != 1:
        return None
    reached = [value for first, value in by_release.items() if release(first) <= (release(version) or release(first))]
    return float(reached[-1]) if reached and reached[-1] != "open" else None


def _batch(flag: str, version: str, gpu_bytes: float | None, gpu_name: str) -> float | None:
    """Return a default that depends on the GPU; None without a GPU, since CPUs and TPUs have others."""
    at = release(version)
    if at < (0, 8, 0):  # as many tokens as --max-model-len, or fewer
        return _SMALL_BATCH[flag] if at and flag == _SEQS else None
    if at < (0, 8, 5):
        if flag == _SEQS:  # it is unknown if 0.8.4 has 1,024 requests on small GPUs already
            return _BIG_BATCH[flag] if at < (0, 8, 4) or (gpu_bytes is not None and gpu_bytes >= _BIG) else None
        is_hopper = "h100" in gpu_name or "h200" in gpu_name
        return (_BIG_BATCH if is_hopper else _SMALL_BATCH)[flag] if gpu_name else None
    if gpu_bytes is None:
        return None
    if gpu_bytes >= _HUGE and at >= (0, 28, 0):
        return _HUGE_BATCH[flag]
    # big, but throughput suffered on A100; on GB10 NVML has no total memory to look at (two logs of 0.27.1)
    small = ("a100",) * (at >= (0, 9, 0)) + ("gb10",)
    if gpu_bytes >= _BIG and small and not gpu_name:
        return None
    is_small = gpu_bytes < _BIG or any(name in gpu_name for name in small)
    return (_SMALL_BATCH if is_small else _BIG_BATCH)[flag]
