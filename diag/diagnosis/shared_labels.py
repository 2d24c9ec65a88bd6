"""The label that ill servers share and healthy ones lack: node pool, GPU, release, flag, model, or the hour of the day.

A label is reported only if nearly all ill servers have it, few healthy ones do, and chance does not explain it. Missing
telemetry counts against a label: an ill server whose value is unknown lacks it, a healthy one has it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.core.incident import RANK, seconds
from diag.diagnosis.diagnose import Diagnosis
from diag.sources.prometheus.properties import HOUR, Properties, Property

FEWEST = 3
"""Ill servers with one incident; two servers of any fleet have some label in common."""
NEARLY_ALL, FEW = 0.9, 0.1
"""Least share of the ill servers, and largest share of the healthy ones, that have the label."""
CHANCE = 0.01
"""Largest probability that chance alone gives a report any label, all labels and incidents together."""
DAY = 22 * 3600.0
"""Seconds that have to be judged before an hour of the day means anything; the first window is not judged."""
MOST_HOURS = 3


class IllGroup(NamedTuple):
    """The servers with one incident, and the healthy ones to compare with: those on which the incident is absent.

    `began` has the hours of the day (UTC) in which the incident began on a server, none if that is not known.
    """

    incident: str
    ill: tuple[str, ...]
    healthy: tuple[str, ...]
    began: Mapping[str, frozenset[int]]


class SharedLabel(NamedTuple):
    """A value of a property that separates the servers with an incident from the healthy ones.

    `servers` are the ill ones that have it; `also` are other properties of exactly the same servers. Hours of the day
    are compared with no healthy servers.
    """

    incident: str
    property: Property
    value: str
    ill_with: int
    ill: int
    healthy_with: int | None
    healthy: int | None
    servers: tuple[str, ...]
    also: tuple[tuple[Property, str], ...] = ()


def ill_groups(
    diagnoses: Sequence[Diagnosis],
    gone: frozenset[str] = frozenset(),
    cleared: Callable[[str], frozenset[str]] = lambda _: frozenset(),
) -> tuple[IllGroup, ...]:
    """Return a group for each incident that several servers have and nothing explains, in the order of diagnoses.

    An incident that has ended counts like one that goes on, since its servers still share the label of its
    cause. `cleared` are the servers without a diagnosis on which an incident is absent.
    """
    by_incident: dict[str, dict[str, list[Diagnosis]]] = defaultdict(lambda: defaultdict(list))
    ill_or_gone: set[str] = {*gone}
    for diagnosis in diagnoses:
        if diagnosis.state == "present" and RANK[diagnosis.incident.severity]:
            ill_or_gone.add(diagnosis.server)
            if diagnosis.explained_by is None:
                by_incident[diagnosis.incident.id][diagnosis.server].append(diagnosis)
    groups = {incident: servers for incident, servers in by_incident.items() if len(servers) >= FEWEST}
    absent: dict[str, dict[str, bool]] = {incident: {} for incident in groups}
    for diagnosis in diagnoses if groups else ():
        states = absent.get(diagnosis.incident.id)
        if states is not None and (name := diagnosis.server) not in ill_or_gone:
            states[name] = states.get(name, True) and diagnosis.state == "absent"
    return tuple(
        IllGroup(
            incident,
            tuple(servers),
            (
                *(name for name, is_absent in absent[incident].items() if is_absent),
                *sorted(cleared(incident) - ill_or_gone),
            ),
            {name: _hours(several) for name, several in servers.items()},
        )
        for incident, servers in groups.items()
    )


def shared_labels(groups: Sequence[IllGroup], properties: Properties) -> tuple[SharedLabel, ...]:
    """Return the label that separates each group best, if any does, and the hours in which its incident began."""
    many = len(groups)
    pairs = ((_separating_label(group, properties, many), _shared_hours(group, many)) for group in groups)
    return tuple(shared for pair in pairs for shared in pair if shared)


def holders(groups: Sequence[IllGroup]) -> tuple[int, int]:
    """Return on how many servers a value has to be at least and may be at most to separate one of the groups."""
    ranges = [_range(group) for group in groups]
    return min(least for least, _ in ranges), max(most for _, most in ranges)


def _range(group: IllGroup) -> tuple[int, int]:
    return math.ceil(NEARLY_ALL * len(group.ill)), len(group.ill) + math.floor(FEW * len(group.healthy))


def _separating_label(group: IllGroup, properties: Properties, groups: int) -> SharedLabel | None:
    """Find the value with the largest difference between ill and healthy servers; Fisher's exact test, one-sided.

    Candidates are chosen by how many servers have them, ill or not, so that the test stays valid; values that exactly
    the same servers have are one candidate.
    """
    ill, healthy = frozenset(group.ill), frozenset(group.healthy)
    least, most = _range(group)
    candidates: dict[tuple[frozenset[str], int], list[tuple[Property, str]]] = defaultdict(list)
    for item, values in properties.items():
        unknown = sum(name not in values for name in healthy)
        by_value: dict[str, set[str]] = defaultdict(set)
        for name in (*group.ill, *group.healthy):
            for value in filter(None, values.get(name, ())):
                by_value[value].add(name)
        for value, having in by_value.items():
            if least <= len(having) <= most:
                candidates[frozenset(having), unknown].append((item, value))
    ranked = []
    for (names, unknown), items in candidates.items():
        with_it, counted = len(names & ill), len(names & healthy) + unknown
        if with_it < NEARLY_ALL * len(ill) or counted > FEW * len(healthy):
            continue
        # hypergeometric: at least so many of the servers that have the value are ill
        marked, others = with_it + counted, len(ill) + len(healthy) - with_it - counted
        amounts = range(max(with_it, len(ill) - others), min(marked, len(ill)) + 1)
        ways = sum(math.comb(marked, some) * math.comb(others, len(ill) - some) for some in amounts)
        chance = ways / math.comb(marked + others, len(ill))
        if chance * len(candidates) * groups <= CHANCE:
            items.sort(key=lambda pair: _preference(*pair))
            rank = counted / len(healthy) - with_it / len(ill), _preference(*items[0])
            ranked.append((rank, items, names, len(healthy) - unknown))
    if not ranked:
        return None
    _, items, names, healthy_known = min(ranked, key=itemgetter(0))
    return SharedLabel(
        group.incident,
        *items[0],
        ill_with=len(names & ill),
        ill=len(ill),
        healthy_with=len(names & healthy),
        healthy=healthy_known,
        servers=tuple(name for name in group.ill if name in names),
        also=tuple(items[1:]),
    )


@cache
def _specific() -> tuple[tuple[str, ...], ...]:
    return read(PACKAGE / "diagnosis" / "properties.toml", tuple[tuple[str, ...], ...], "order")


def _preference(item: Property, value: str) -> tuple[int, Property, str]:
    """Return the sort key of values that the same servers have: the place of the first kind that fits."""
    rows = {place: ends for place, (kind, *ends) in enumerate(_specific()) if kind == item.kind}
    name = f"_{item.name.lower()}"
    named = (place for place, ends in rows.items() if name.endswith(tuple(f"_{end}" for end in ends)))
    return next(named, next(place for place, ends in rows.items() if not ends)), item, value


# -- the hour of the day ----------------------------------------------------------------------------------------------


def _hours(diagnoses: Sequence[Diagnosis]) -> frozenset[int]:
    """Return the hours of the day (UTC) in which episodes may have begun; none if a start or another hour is unknown.

    An incident shows up to one window after its onset, and up to one instant later.
    """
    hours: set[int] = set()
    for diagnosis in diagnoses:
        instants = diagnosis.instants
        if instants[-1] - instants[0] < DAY or any(since is None for since, _ in diagnosis.episodes):
            return frozenset()
        late = instants[1] - instants[0] + seconds(diagnosis.incident.window)
        for since, _ in diagnosis.episodes:
            first, last = (math.floor(unix / 3600) for unix in ((since or 0.0) - late, since or 0.0))
            hours.update(hour % 24 for hour in range(first, last + 1))
    return frozenset(hours)


def _shared_hours(group: IllGroup, groups: int) -> SharedLabel | None:
    """Find the fewest hours of the day, three at most, in which the incident began on nearly all ill servers."""
    if not any(group.began.values()):
        return None
    for length in range(1, MOST_HOURS + 1):
        windows = {start: frozenset((start + hour) % 24 for hour in range(length)) for start in range(24)}
        inside = {
            start: [name for name in group.ill if group.began[name] and group.began[name] <= hours]
            for start, hours in windows.items()
        }
        start = max(inside, key=lambda start: len(inside[start]))
        servers, ill, share = inside[start], len(group.ill), length / 24
        chance = sum(
            math.exp(math.log(math.comb(ill, some)) + some * math.log(share) + (ill - some) * math.log1p(-share))
            for some in range(len(servers), ill + 1)
        )
        if len(servers) >= NEARLY_ALL * ill and chance * 24 * MOST_HOURS * groups <= CHANCE:
            value = f"{start:02}:00-{(start + length) % 24:02}:00"
            return SharedLabel(group.incident, HOUR, value, len(servers), ill, None, None, tuple(servers))
    return None
