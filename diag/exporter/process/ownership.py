"""What each process does for vLLM: its role and its rank, by titles and by who started whom."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from diag.exporter.process.table import SETTLED, ProcessEntry, ProcessTable

_CHILD = {"api_server": "engine", "engine": "worker"}
_SPAWNED = "from multiprocessing.spawn import spawn_main"
_AXES = ("PP", "PCP", "TP")
"""How vLLM numbers the workers of an engine, the last axis fastest; the others divide these workers once more."""


@dataclass(frozen=True)
class Owner:
    """What a process does for vLLM; `rank` is "" where that is not known.

    A worker's is its number in its engine, under data parallelism "1.0" for worker 0 of engine 1; an engine's is its
    data-parallel rank, an API server's its number.
    """

    role: str
    rank: str


def axis_sizes(members: ProcessTable, last: Mapping[str, int]) -> Mapping[str, int]:
    """The size of every axis: the largest number seen; kept, for a worker that ends must not change other ranks."""
    sizes = dict(last)
    for entry in members.values():
        for axis, number in entry.index.items():
            sizes[axis] = max(sizes.get(axis, 0), number + 1)
    return sizes


def owners_of(
    members: ProcessTable, server: int, sizes: Mapping[str, int], last: Mapping[int, Owner]
) -> Mapping[int, Owner]:
    """Role and rank of the members that have a role; `last` is what they were at the look before."""
    roles = _roles(members, server, last)
    parents = {pid: members[pid].parent for pid in roles}
    groups = {pid: (role, parents[pid] if parents[pid] in members else pid) for pid, role in roles.items()}
    count = Counter(groups.values())
    owners = {}
    for pid, role in roles.items():
        only = count[groups[pid]] == 1 and last.get(pid) != Owner(role, "")  # one that is left over is not the only one
        parent = members.get(parents[pid])
        rank = _worker_rank(members[pid], parent, only, sizes) if role == "worker" else _rank(members[pid], only)
        owners[pid] = Owner(role, rank)
    return owners


def _roles(members: ProcessTable, server: int, last: Mapping[int, Owner]) -> Mapping[int, str]:
    roles: dict[int, str] = {}
    parents_first = sorted(members.items(), key=lambda member: (member[1].created, member[0]))
    for pid, entry in parents_first:
        if pid == server:
            roles[pid] = "api_server"
        elif entry.parent in members:
            roles[pid] = role_of(entry, members[entry.parent], roles[entry.parent])
        else:
            roles[pid] = last[pid].role if pid in last else entry.role
    return {pid: role for pid, role in roles.items() if role}


def role_of(entry: ProcessEntry, parent: ProcessEntry, parent_role: str) -> str:
    """By the title; a child that has none, or that of the parent it was forked from, is what its parent starts."""
    forked = parent.argv == entry.argv
    if entry.role and not forked:
        return entry.role
    spawned = any(word.startswith(_SPAWNED) for word in entry.argv)
    return _CHILD.get(parent_role, "") if (forked or spawned) and entry.age > SETTLED else ""


def _rank(entry: ProcessEntry, only: bool) -> str:
    return str(entry.index.get("DP", entry.index.get("", "0" if only else "")))


def _worker_rank(entry: ProcessEntry, engine: ProcessEntry | None, only: bool, sizes: Mapping[str, int]) -> str:
    if not only and entry.index.keys().isdisjoint(_AXES):
        return ""
    rank = 0
    for axis in _AXES:
        rank = rank * sizes.get(axis, 1) + entry.index.get(axis, 0)
    of_engine = engine.index if engine else {}
    replica = entry.index.get("DP", of_engine.get("DP"))
    return str(rank) if replica is None else f"{replica}.{rank}"
