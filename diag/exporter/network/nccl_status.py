"""The status that NCCL's RAS service reports: which ranks of which communicator are behind the others or are missing.

Since 2.28.7 NCCL writes JSON, since 2.24 text (nccl/src/ras/client_support.cc). A count is the number of collectives of
one kind that a rank has launched. NCCL 2.24 and 2.25 count captured CUDA graphs on some ranks only, so that the counts
of a healthy server differ: they are not read. Later releases leave graphs out: a rank that hangs in a graph is not
behind. Send and receive are not counted.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

MOST_COMMUNICATORS, MOST_RANKS = 256, 65_536
"""Parts of a status that are read: a vLLM server has about ten communicators, and each has its ranks once."""
_LEAST_VERSION = (2, 26)
_HASH = re.compile(r"(?:0x)?([0-9a-f]{1,16})", re.ASCII)
_COLLECTIVE = re.compile(r"[A-Za-z]{1,24}", re.ASCII)
_HOST = re.compile(r"[\w.:%-]{1,64}", re.ASCII)
_RELEASE = re.compile(r"(\d{1,3})\.(\d{1,3})(?!\d)", re.ASCII)


class NotRas(ValueError):
    """An answer that is no status of NCCL's RAS service."""


class NcclRank(NamedTuple):
    """One rank of a communicator; `host` is the address of its node as NCCL names it, "" if unknown, `pid` 0."""

    communicator: str
    rank: int
    host: str
    pid: int


class BehindRank(NamedTuple):
    """A rank that has launched fewer collectives of a kind than its peers.

    `launched` is its own count, `most` the highest of the communicator, `size` the ranks that have answered.
    """

    who: NcclRank
    collective: str
    launched: int
    most: int
    size: int


class NcclStatus(NamedTuple):
    """One status: the processes that answer (0 if unknown), ranks behind, and ranks without an answer, True if dead."""

    answering: int
    behind: Sequence[BehindRank]
    missing: Mapping[NcclRank, bool]


class _Launches(NamedTuple):
    """The counts of a communicator: those of named ranks, and how many ranks have which count."""

    collective: str
    named: Mapping[NcclRank, int]
    ranks: Mapping[int, int]


def read_status(text: str) -> NcclStatus:
    """Read a status, as JSON or as text; NotRas for anything else."""
    return _read_json(text) if text.lstrip().startswith("{") else _read_text(text)


def _behind(communicators: Iterable[_Launches]) -> Iterator[BehindRank]:
    """Yield the ranks with the lowest count, if they are at most half: of a majority it is not known who is missing."""
    for collective, named, ranks in communicators:
        least, most, size = min(ranks, default=0), max(ranks, default=0), sum(ranks.values())
        if least < most and 2 * ranks[least] <= size:
            for who, launched in named.items():
                if launched == least:
                    yield BehindRank(who, collective, launched, most, size)


# -- JSON --------------------------------------------------------------------------------------------------------------


def _read_json(text: str) -> NcclStatus:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotRas("it is no JSON document") from error
    launches: list[_Launches] = []
    missing: dict[NcclRank, bool] = {}
    answered: set[tuple[str, int]] = set()
    comparable = _release(document.get("nccl_version"))
    left = MOST_RANKS
    for communicator in islice(_list(document, "communicators"), MOST_COMMUNICATORS):
        name, ranks = _hash(communicator), _list(communicator, "ranks")[:left]
        left -= len(ranks)
        for rank in _list(communicator, "missing_ranks")[:MOST_RANKS]:
            status = _dict(rank, "status")
            if status.get("unresponsive") is True:  # others have answered: they have left the communicator
                missing[_rank(name, rank)] = status.get("considered_dead") is True
        counts = {}
        for rank in ranks:
            who = _rank(name, rank)
            counts[who] = {
                kind: _whole(count, "collective_counts")
                for kind, count in _dict(rank, "collective_counts").items()
                if _COLLECTIVE.fullmatch(kind)
            }
            answered.add((who.host, who.pid))
        if comparable and all(map(_is_running, ranks)):
            for kind in dict.fromkeys(kind for each in counts.values() for kind in each):
                named = {who: each[kind] for who, each in counts.items() if kind in each}
                launches.append(_Launches(kind, named, Counter(named.values())))
    return NcclStatus(len(answered), tuple(_behind(launches)), missing)


def _is_running(rank: object) -> bool:
    """Return False while a rank joins or leaves its communicator: the counts of the others differ meanwhile."""
    status = _dict(rank, "status")
    leaves = any(status.get(flag) is not False for flag in ("finalize_called", "destroy_flag", "abort_flag"))
    return status.get("init_state") == 0 and not leaves


def _rank(communicator: str, rank: object) -> NcclRank:
    found = _dict(rank)
    host = found.get("host")
    known = isinstance(host, str) and host != "unknown" and _HOST.fullmatch(host)
    pid = found.get("pid")
    return NcclRank(
        communicator,
        _whole(found.get("rank"), "rank"),
        str(host) if known else "",
        pid if isinstance(pid, int) and 0 < pid < 2**31 else 0,
    )


def _hash(communicator: object) -> str:
    found = _HASH.fullmatch(str(_dict(communicator).get("hash")))
    if not found:
        raise NotRas("a communicator has no hash")
    return found[1].zfill(16)


def _whole(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise NotRas(f"{name} is no whole number")
    return value


def _dict(value: object, name: str = "") -> Mapping[str, object]:
    found = value.get(name) if name and isinstance(value, dict) else value
    if not isinstance(found, dict):
        raise NotRas(f"{name or 'an entry'} is no object")
    return found


def _list(value: object, name: str) -> Sequence[object]:
    found = _dict(value).get(name)
    if not isinstance(found, list):
        raise NotRas(f"{name} is no list")
    return found


def _release(version: object) -> bool:
    """Return True if the counts of this release of NCCL can be compared; NotRas if it is none."""
    found = _RELEASE.match(version) if isinstance(version, str) else None
    if not found:
        raise NotRas("it names no release of NCCL")
    return (int(found[1]), int(found[2])) >= _LEAST_VERSION


# -- text --------------------------------------------------------------------------------------------------------------

_PLACE = r"(?: -- GPU .{1,40}? managed by process (?P<pid>\d{1,10}) on node (?P<host>\S{1,64})| -- \[.{1,60}\])"
_LINE = re.compile(
    r"#\d{1,9}-\d{1,9} \((?P<hash>[0-9a-f]{1,16})\) (?P<section>[A-Z]{1,16})"
    r"|  Communicator ranks have different (?P<kind>[A-Za-z]{1,24}) operation counts"
    r"|  (?P<ranks>\d{1,9}) ranks have (?:launched up to operation (?P<count>\d{1,20})|not launched any operations)"
    rf"|  Rank (?P<rank>\d{{1,9}})(?P<alone> has (?:launched up to operation (?P<own>\d{{1,20}})"
    rf"|not launched any operations))?{_PLACE}"
    r"|  Process (?P<process>\d{1,10}) on node (?P<node>\S{1,64}) managing GPU.*"
    r"|(?P<part>DEAD|INCOMPLETE)"
    r"|  Communicator ranks have different (?P<other>status)"
    r"| *\d{1,9}  +\d{1,9}  +\d{1,9}  +(?P<processes>\d{1,9})  +\d{1,9}",
    re.ASCII,
)
_VERSION = re.compile(r"^NCCL version (\S{1,40})", re.MULTILINE | re.ASCII)


def _read_text(text: str) -> NcclStatus:
    """Read the text of VERBOSE STATUS: it lists the ranks of every group that is smaller than half of the ranks."""
    version = _VERSION.search(text)
    if "\nWarnings\n========\n" not in text or not text.endswith("\n"):  # its last part, also without any
        raise NotRas("the status is incomplete")
    comparable = _release(version[1] if version else None)
    launches: list[_Launches] = []
    missing: dict[NcclRank, bool] = {}
    dead: set[tuple[str, int]] = set()
    named: dict[NcclRank, int] = {}
    ranks: Counter[int] = Counter()
    communicator, section, part, group, processes = "", "", "", None, 0
    for line in text.splitlines():
        found = _LINE.fullmatch(line.rstrip())
        if not found:
            continue
        if found["hash"]:
            communicator, section, part, group = found["hash"].zfill(16), found["section"], "", None
        elif found["part"]:
            part = found["part"]
        elif found["process"] and part == "DEAD":
            dead.add((found["node"], int(found["process"])))
        elif found["processes"]:
            processes = int(found["processes"])
        elif found["kind"] and communicator:
            named, ranks, group = {}, Counter(), 0
            if comparable and found["kind"] != "collective":
                launches.append(_Launches(found["kind"], named, ranks))
        elif found["other"]:
            group = None
        elif found["ranks"] and group is not None:
            group = int(found["count"] or 0)
            ranks[group] += int(found["ranks"])
        elif found["rank"] and len(named) + len(missing) < MOST_RANKS:
            host = found["host"] if found["host"] and _HOST.fullmatch(found["host"]) else ""
            who = NcclRank(communicator, int(found["rank"]), host, int(found["pid"] or 0))
            if section == "INCOMPLETE":
                missing[who] = False
            elif section == "MISMATCH" and group is not None:
                if found["alone"]:
                    group = int(found["own"] or 0)
                    ranks[group] += 1
                named[who] = group
    gone = {who: (who.host, who.pid) in dead for who in missing}
    return NcclStatus(processes, tuple(_behind(launches)), gone)
