"""The ranks that NCCL's RAS service reports as behind or missing, as samples (`diag exporter --nccl-ras ADDRESS`).

Every process of an NCCL job (2.24 and later) listens on `localhost:28028` (NCCL_RAS_ADDR); each of them answers for the
ranks of all hosts. A query is a message to every process of the job: it is sent at most every five seconds and only
while vLLM's own page answers, because some releases of NCCL crash if they are asked while a communicator is set up
(NVIDIA/nccl#1669, #2346). The page never waits for an answer: it shows the last one.

Since 2.28.7 NCCL writes a status as JSON, since 2.24 as text (nccl/src/ras/client_support.cc). A count is the number of
collectives of one kind that a rank has launched. NCCL 2.24 and 2.25 count captured CUDA graphs on some ranks only, so
that the counts of a healthy server differ: they are not read. Later releases leave graphs out: a rank that hangs in a
graph is not behind. Send and receive are not counted.
"""

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import NamedTuple

from diag.core.errors import BadUsage
from diag.core.files import parse_json
from diag.core.formatting import printable
from diag.core.metric_families import Collected, Sample

# -- a status ----------------------------------------------------------------------------------------------------------

MOST_COMMUNICATORS, MOST_RANKS = 256, 65_536
"""Parts of a status that are read: a vLLM server has about ten communicators, and each has its ranks once."""
_LEAST_VERSION = (2, 26)
_HASH = re.compile(r"(?:0x)?([0-9a-f]{1,16})", re.ASCII)
_COLLECTIVE = re.compile(r"[A-Za-z]{1,24}", re.ASCII)
_NODE = re.compile(r"[\w.:%-]{1,64}", re.ASCII)
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
        document = parse_json(text)
    except ValueError as error:
        raise NotRas("it is no JSON document") from error
    launches: list[_Launches] = []
    missing: dict[NcclRank, bool] = {}
    answered: set[tuple[str, int]] = set()
    comparable = _release(document.get("nccl_version"))
    left = MOST_RANKS
    for communicator in islice(_list(document, "communicators"), MOST_COMMUNICATORS):
        hashed = _HASH.fullmatch(str(_dict(communicator).get("hash")))
        if not hashed:
            raise NotRas("a communicator has no hash")
        name, ranks = hashed[1].zfill(16), _list(communicator, "ranks")[:left]
        left -= len(ranks)
        for rank in _list(communicator, "missing_ranks")[:MOST_RANKS]:
            status = _dict(rank, "status")
            if status.get("unresponsive") is True:  # others have answered: they have left the communicator
                missing[_rank(name, rank)] = status.get("considered_dead") is True
        counts: dict[str, dict[NcclRank, int]] = {}  # by kind of collective
        for rank in ranks:
            who = _rank(name, rank)
            for kind, count in _dict(rank, "collective_counts").items():
                if _COLLECTIVE.fullmatch(kind):
                    counts.setdefault(kind, {})[who] = _whole(count, "collective_counts")
            answered.add((who.host, who.pid))
        states = (_dict(rank, "status") for rank in ranks)
        running = (  # while a rank joins or leaves its communicator, the counts of the others differ
            state.get("init_state") == 0
            and all(state.get(flag) is False for flag in ("finalize_called", "destroy_flag", "abort_flag"))
            for state in states
        )
        if comparable and all(running):
            launches += [_Launches(kind, named, Counter(named.values())) for kind, named in counts.items()]
    return NcclStatus(len(answered), tuple(_behind(launches)), missing)


def _rank(communicator: str, rank: object) -> NcclRank:
    entry = _dict(rank)
    host, pid = entry.get("host"), entry.get("pid")
    is_named = isinstance(host, str) and host != "unknown" and _NODE.fullmatch(host)
    process = pid if isinstance(pid, int) and 0 < pid < 2**31 else 0
    return NcclRank(communicator, _whole(entry.get("rank"), "rank"), str(host) if is_named else "", process)


def _whole(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise NotRas(f"{name} is no whole number")
    return value


def _dict(value: object, name: str = "") -> Mapping[str, object]:
    entry = value.get(name) if name and isinstance(value, dict) else value
    if not isinstance(entry, dict):
        raise NotRas(f"{name or 'an entry'} is no object")
    return entry


def _list(value: object, name: str) -> Sequence[object]:
    entries = _dict(value).get(name)
    if not isinstance(entries, list):
        raise NotRas(f"{name} is no list")
    return entries


def _release(version: object) -> bool:
    """Return True if the counts of this release of NCCL can be compared; NotRas if it is none."""
    release = _RELEASE.match(version) if isinstance(version, str) else None
    if not release:
        raise NotRas("it names no release of NCCL")
    return (int(release[1]), int(release[2])) >= _LEAST_VERSION


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
        words = _LINE.fullmatch(line.rstrip())
        if not words:
            continue
        if words["hash"]:
            communicator, section, part, group = words["hash"].zfill(16), words["section"], "", None
        elif words["part"]:
            part = words["part"]
        elif words["process"] and part == "DEAD":
            dead.add((words["node"], int(words["process"])))
        elif words["processes"]:
            processes = int(words["processes"])
        elif words["kind"] and communicator:
            named, ranks, group = {}, Counter(), 0
            if comparable and words["kind"] != "collective":
                launches.append(_Launches(words["kind"], named, ranks))
        elif words["other"]:
            group = None
        elif words["ranks"] and group is not None:
            group = int(words["count"] or 0)
            ranks[group] += int(words["ranks"])
        elif words["rank"] and len(named) + len(missing) < MOST_RANKS:
            host = words["host"] if words["host"] and _NODE.fullmatch(words["host"]) else ""
            who = NcclRank(communicator, int(words["rank"]), host, int(words["pid"] or 0))
            if section == "INCOMPLETE":
                missing[who] = False
            elif section == "MISMATCH" and group is not None:
                if words["alone"]:
                    group = int(words["own"] or 0)
                    ranks[group] += 1
                named[who] = group
    gone = {who: (who.host, who.pid) in dead for who in missing}
    return NcclStatus(processes, tuple(_behind(launches)), gone)


# -- the service -------------------------------------------------------------------------------------------------------

QUERY_EVERY, TOO_OLD, LISTENERS_EVERY = 5.0, 60.0, 60.0
"""Seconds between two queries, after which a status is no longer shown, and between two searches of the listeners."""
LEG_SECONDS = 2
"""Seconds for which NCCL waits for its other processes; it adds five (RAS_COLLECTIVE_EXTRA_TIMEOUT_SEC)."""
ANSWER_SECONDS = 10.0
MOST_BYTES = 2**24
"""A status of 1,024 ranks in ten communicators has about 7 MB."""
MOST_NAMED = 16
"""Ranks that are named: a stall has one culprit, and every name is a series."""
_Missing = tuple[NcclRank, str, str, int, int]
"""A rank, how it is missing, the collective and the number of the operation that it has not launched, and its lag."""
_LONGEST_LINE = 256
_HOST = re.compile(r"[\w.-]{1,63}|\[[\w:.%]{1,60}\]", re.ASCII)
_HANDSHAKE = "SERVER PROTOCOL "


def parse_address(text: str) -> tuple[str, int] | None:
    """Parse "host:port" or "[::1]:port", as NCCL_RAS_ADDR has it; None for "", BadUsage for any other text."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not (colon and _HOST.fullmatch(host) and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
        raise BadUsage(f"--nccl-ras takes host:port (NCCL's default is localhost:28028), not {text[:100]!r}")
    return host.strip("[]"), int(port)


def query(address: tuple[str, int], seconds: float) -> str:
    """Return the status of the job that listens at an address, as JSON if it can; OSError or NotRas without one."""
    deadline = time.monotonic() + seconds
    with closing(socket.create_connection(address, min(seconds, 1.0))) as connection:

        def receive(most: int) -> bytes:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no complete status within {seconds:g} s")
            connection.settimeout(left)
            return connection.recv(most)

        def ask(command: str) -> str:
            connection.sendall(f"{command}\n".encode())
            line = b""
            while not line.endswith(b"\n"):
                part = receive(_LONGEST_LINE - len(line))
                line += part
                if not part or (len(line) >= _LONGEST_LINE and not line.endswith(b"\n")):
                    raise NotRas("it does not speak NCCL's protocol")
            return line.decode(errors="replace").strip()

        if not ask("CLIENT PROTOCOL 2").upper().startswith(_HANDSHAKE):
            raise NotRas("it does not speak NCCL's protocol")
        if ask(f"TIMEOUT {LEG_SECONDS}").upper() != "OK":
            raise NotRas("it does not take a timeout")
        as_json = ask("SET FORMAT json").upper() == "OK"  # an error before 2.28.7
        connection.sendall(b"STATUS\n" if as_json else b"VERBOSE STATUS\n")
        parts: list[bytes] = []
        size = 0
        while part := receive(2**16):  # NCCL closes the connection after the status
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                raise NotRas(f"a status of more than {MOST_BYTES >> 20} MiB")
        return b"".join(parts).decode(errors="replace")


class NcclCollector:
    """Asks NCCL's RAS service in a thread of its own, and compares each status with the one before.

    A rank is behind if its count is below that of its peers and unchanged since the last status: in a server at work,
    ranks differ by a few operations for an instant. A rank is missing if two statuses in a row lack it.
    `is_others` returns True if a process that listens at the address is not of this server: the kernel then gives the
    connection to any one of them.
    """

    name = "nccl"

    def __init__(self, address: tuple[str, int], is_others: Callable[[int], bool] = lambda _: False) -> None:
        self._address = address
        self._is_others = is_others
        self._serving = self._is_shared = False
        self._asking: threading.Thread | None = None
        self._asked_at = self._searched_at = float("-inf")
        self._status: tuple[float, NcclStatus, NcclStatus | None] | None = None
        self._problem = ""

    def page_answered(self, answered: bool) -> None:
        """Receive whether vLLM's page answers: it does once all communicators are set up."""
        self._serving = answered

    def collect(self) -> Collected:
        """Return what the last two statuses show, and begin the next query if it is due."""
        now = time.monotonic()
        idle = self._asking is None or not self._asking.is_alive()
        if self._serving and idle and now - self._asked_at >= QUERY_EVERY:
            self._asked_at = now
            self._asking = threading.Thread(target=self._ask, name="diag-nccl-ras", daemon=True)
            self._asking.start()
        status = self._status
        if status is None or now - status[0] > TOO_OLD:
            return Collected((), self._problem)
        return Collected(list(nccl_samples(status[1], status[2])), self._problem)

    def wait(self, seconds: float) -> None:
        """Wait for the query under way, at most so many seconds."""
        if self._asking:
            self._asking.join(seconds)

    def _ask(self) -> None:
        try:
            if time.monotonic() - self._searched_at >= LISTENERS_EVERY:
                self._is_shared, self._searched_at = self._is_others(self._address[1]), time.monotonic()
            if self._is_shared:
                raise NotRas("another NCCL job listens there too: start each with a NCCL_RAS_ADDR of its own")
            status = read_status(query(self._address, ANSWER_SECONDS))
        except (OSError, ValueError) as error:
            host, port = self._address
            self._problem = f"NCCL's RAS service at {host}:{port}: {printable(str(error), 200)}"
            return
        self._status = time.monotonic(), status, self._status[1] if self._status else None
        self._problem = ""


def nccl_samples(now: NcclStatus, before: NcclStatus | None) -> Iterator[Sample]:
    """Yield what two statuses in a row show; nothing for a single one."""
    if before is None:
        return

    def one_for_each_process(ranks: Iterable[_Missing]) -> list[_Missing]:
        """Return the first one of each process: it hangs once, and is missing in all of its communicators."""
        first: dict[object, _Missing] = {}
        for rank in ranks:
            first.setdefault((rank[0].host, rank[0].pid) if rank[0].pid else rank[0], rank)
        return list(first.values())

    still = {rank[:3] for rank in before.behind}
    behind = one_for_each_process(
        (rank.who, "behind", rank.collective, rank.launched + 1, rank.most - rank.launched)
        for rank in sorted(now.behind, key=lambda rank: (-rank.size, rank))
        if rank[:3] in still
    )
    missing = one_for_each_process(
        (who, "dead" if now.missing[who] else "unresponsive", "", 0, 0)
        for who in sorted(now.missing.keys() & before.missing.keys())
    )
    count = Counter(state for _, state, *_ in (*behind, *missing))
    yield "diag_nccl_processes", ("answering",), float(now.answering)
    for state in ("behind", "unresponsive", "dead"):
        yield "diag_nccl_processes", (state,), float(count[state])
    for who, state, collective, operation, lag in (*behind[:MOST_NAMED], *missing[:MOST_NAMED]):
        labels = (who.communicator, str(who.rank), who.host, state, collective, str(operation or ""))
        yield "diag_nccl_missing_rank_operations", labels, float(lag)
