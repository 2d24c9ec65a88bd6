"""Lead time and false forecasts of kv_cache_filling, pools by length as foretold and as played; writes forecasts.md.

Loads that fill a KV cache, loads that look so (tests/support/filling_loads.py), and the healthy loads of bench/soak.py
are simulated for an hour each and scraped every 5, 15 and 30 s; the alert's expression is evaluated every 15 s. The
recordings of cascades are judged as the doctor judges them. Pools by length are foretold from the recording of random
loads (tests/support/mixed_lengths.py), and played with other requests of these loads.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import healthy_loads, rewriting  # noqa: E402
from support.filling_loads import FILLING, LEVEL, filling  # noqa: E402
from support.healthy_loads import KINDS, scraped_kind  # noqa: E402
from support.mixed_lengths import MixedLoad, Played, play, record, unseen  # noqa: E402

from diag.commands import doctor  # noqa: E402
from diag.commands.observe import ObserveOptions  # noqa: E402
from diag.core.contract import Contract  # noqa: E402
from diag.core.incident import seconds  # noqa: E402
from diag.diagnosis.pool_model import TimeToFirstToken  # noqa: E402
from diag.diagnosis.pools import Pools, find_pools  # noqa: E402
from diag.diagnosis.query_cache import QueryCache  # noqa: E402
from diag.knowledge.catalog import load  # noqa: E402
from diag.sources.recording.reader import read  # noqa: E402

CADENCES = (5, 15, 30)
BEGUN = 1_795_000_000.0
INCIDENT = next(incident for incident in load() if incident.id == "kv_cache_filling")
LATEST = 300.0
"""Seconds within which a KV cache has to be full after a forecast, or three times the named time if that is longer."""
RECORDINGS = ("kv_cascade", "kv_cascade_base", "cascade_vllm_0_20_2", "engine_died_in_cascade_vllm_0_11_0")


class Forecast(NamedTuple):
    """A forecast of a recording: the time that it names, and the seconds until the KV cache was full."""

    named: float
    real: float

    @property
    def is_true(self) -> bool:
        """True if the KV cache was full within the bound."""
        return self.real <= max(LATEST, 3 * self.named)


def forecasts(folder: Path) -> Iterator[tuple[list[Forecast], list[float]]]:
    """Yield the forecasts of each engine of a recording, and the lead before each time that its KV cache fills up."""
    for at, holds, named, full in filling(folder, INCIDENT):
        hold = seconds(INCIDENT.hold)
        fires = [place for place in np.flatnonzero(holds) if holds[max(0, place - int(hold // 15)) : place + 1].all()]
        begins = [place for place in fires if not {place - step for step in range(1, 13)} & set(fires)]
        fills = [place for place in np.flatnonzero(full) if not full[max(0, place - 40) : place].any()]
        after = {begin: [at[place] - at[begin] for place in np.flatnonzero(full) if place >= begin] for begin in begins}
        found = [Forecast(named[begin], min(after[begin], default=np.inf)) for begin in begins]
        leads = [max((at[fill] - at[b] for b in begins if 0 <= at[fill] - at[b] <= 900), default=0.0) for fill in fills]
        yield found, leads


def row(name: str, kind: healthy_loads.Kind, seeds: range, length: float) -> str:
    """A row of the table: a kind of load at every cadence and seed."""
    found: list[Forecast] = []
    leads: list[float] = []
    hours = 0.0
    for seed in seeds:
        times = [*np.arange(2.0, length, CADENCES[0])]
        scrapes = [(s.at, s.instance, s.page) for s in scraped_kind(kind, name, seed, times, BEGUN, length)]
        for every in CADENCES:
            with tempfile.TemporaryDirectory() as folder:
                servers = {instance for _, instance, _ in scrapes}
                thin = [
                    s
                    for server in sorted(servers)
                    for s in rewriting.thinned((s for s in scrapes if s[1] == server), every)
                ]
                for forecast, lead in forecasts(rewriting.write(Path(folder), sorted(thin))):
                    found += forecast
                    leads += lead
                hours += length / 3600 * len(servers)
    true = [forecast for forecast in found if forecast.is_true]
    foreseen = [lead for lead in leads if lead > 0]
    named = [forecast.named / max(forecast.real, 15.0) for forecast in true]
    cells = [f"{hours:.0f}", str(len(leads)), str(len(foreseen)), f"{np.median(foreseen):.0f} s" if foreseen else "-"]
    cells += [f"{np.median(named):.2g}" if named else "-", str(len(found) - len(true))]
    line = f"| {name} | {' | '.join(cells)} |\n"
    print(line, end="", flush=True)
    return line


RECORDED, PLAYED = 1800.0, 3600.0
"""Seconds of a load that are recorded, and that are played."""
SLO = Contract(ttft_seconds=30.0, stated=frozenset({"ttft_seconds"}))
POOLS_HEAD = """\
## Pools by length

`python bench/forecasts.py --only pools --pool-seeds {first} {last}`: {count} random loads of one to three servers
(`tests/support/mixed_lengths.py`), which were not used to build the model, are recorded for half an hour; every second
one has an SLO for TTFT of 30 s. Where pools are proposed, the simulator plays an hour of other requests of the load on
the servers as they are, on as many servers as the pools have that share all requests, and in the pools. Foretold /
played is the median, and the range of nine in ten. A pool is overloaded if more than 1 % of its requests are preempted,
if more than ten requests wait at the end, or if the TTFT p90 of long prompts is more than 1.5 times the larger of that
of today and the foretold one.

"""


class PlayedPools(NamedTuple):
    """A load: its shape, the reason of no proposal, or the pools with what was played now, shared and in pools."""

    shape: str
    reason: str
    pools: Pools | None = None
    played: tuple[Played, ...] = ()

    @property
    def overloads(self) -> bool:
        """True if a pool was overloaded."""
        if self.pools is None:
            return False
        now, _, split = self.played
        most = max(np.quantile(now.long, 0.9), self.pools.split[1].percentile(0.9, long=True))
        return bool(split.preemptions > 0.01 or split.waiting > 10 or np.quantile(split.long, 0.9) > 1.5 * most)

    def ratios(self, which: int, share: float, *, long: bool) -> float:
        """Return foretold / played of a percentile of TTFT: now (0), shared (1) or in pools (2)."""
        pools = self.pools
        assert pools is not None
        foretold: TimeToFirstToken = (pools.now, pools.shared, pools.split[long])[which]
        real = self.played[which].long if long else self.played[which].short
        return foretold.percentile(share, long=long) / float(np.quantile(real, share))


def play_pools(seed: int, shape: str, mixed: MixedLoad) -> PlayedPools:
    """Propose pools for a load, and play them."""
    with tempfile.TemporaryDirectory() as folder:
        recorded = read(record(Path(folder), mixed, RECORDED, 5, seed))
    queries = QueryCache(recorded, SLO if seed % 2 else Contract())
    subject = (("instance", "h0:1"), ("engine", "0"))
    limits = mixed.limits
    found = find_pools(
        subject, recorded.instants[-1] / 1000, queries, limits.max_num_batched_tokens, limits.max_num_seqs
    )
    if isinstance(found, str):
        return PlayedPools(shape, found)
    servers = ((mixed.servers, 0), (found.short + found.long, 0), (found.short, found.long))
    return PlayedPools(
        shape, "", found, tuple(play(mixed, found.edge, each, PLAYED, 10_000 + seed) for each in servers)
    )


def pools_section(seeds: range) -> str:
    """Play random loads, and return the section about pools."""
    loads = []
    for load_of_seed in unseen(seeds):
        loads.append(play_pools(*load_of_seed))
        print(
            load_of_seed[:2],
            loads[-1].reason or (loads[-1].pools and loads[-1].pools.text),
            loads[-1].overloads,
            flush=True,
        )
    proposed = [each for each in loads if each.pools]
    section = POOLS_HEAD.format(first=seeds[0], last=seeds[-1], count=len(loads))
    same = sum(each.pools is not None and each.pools.short + each.pools.long == each.pools.seen for each in proposed)
    section += f"- loads: {len(loads)}; pools proposed: {len(proposed)}, {same} of them without a further server\n"
    section += f"- proposals that overload a pool: {sum(each.overloads for each in proposed)}\n"
    gains = [np.quantile(each.played[1].short, 0.9) / np.quantile(each.played[2].short, 0.9) for each in proposed]
    section += (
        f"- TTFT p90 of short prompts, servers that share all / pools, played: median {np.median(gains):.1f}, "
        f"least {min(gains):.1f}\n"
    )
    worse = [np.quantile(each.played[2].long, 0.9) / np.quantile(each.played[0].long, 0.9) for each in proposed]
    section += (
        f"- TTFT p90 of long prompts, pools / today, played: median {np.median(worse):.2f}, most {max(worse):.2f}\n"
    )
    section += "\n| TTFT, foretold / played | today | shared | pools |\n|---|---|---|---|\n"
    for long in (False, True):
        for share in (0.5, 0.9):
            cells = []
            for which in range(3):
                ratios = [each.ratios(which, share, long=long) for each in proposed]
                low, middle, high = np.quantile(ratios, [0.05, 0.5, 0.95])
                cells.append(f"{middle:.2f} ({low:.2f} - {high:.2f})")
            section += f"| {'long' if long else 'short'} prompts, p{100 * share:.0f} | {' | '.join(cells)} |\n"
    reasons = Counter((each.shape, each.reason or "pools proposed") for each in loads)
    section += "\n| load | answer | loads |\n|---|---|---:|\n"
    return section + "".join(
        f"| {shape} | {reason} | {count} |\n" for (shape, reason), count in sorted(reasons.items())
    )


HEAD = """\
# Forecasts of a full KV cache

`python bench/forecasts.py`: loads are simulated for an hour (`tests/support/filling_loads.py`, and the healthy loads of
`soak.md`), scraped every 5, 15 and 30 s; the alert of `kv_cache_filling` is evaluated every 15 s and waits for {hold}.
Full is the first usage of 99 % or preemption after ten minutes without either. A forecast is false if the KV cache is
not full within {latest:.0f} s, or three times the named time if that is longer. Named / real is the median of the time
that a true forecast names, divided by the time that passed. The loads of the first fourteen rows have seeds that were
not used to build the forecast.

| load | hours | times full | foreseen | lead (median) | named / real | false |
|---|---:|---:|---:|---:|---:|---:|
"""
TAIL = """
Short requests that come and go within seconds fill the KV cache in a fluctuation, which no rate foretells. Foreseen are
requests that grow for minutes and would not fit at their full length. The lead is bounded by the 15 % of the KV cache
that are left when a forecast may begin. A load is neither foreseen nor false where the cache never fills.

## Recordings of cascades

Each begins with preemptions or is full within half a minute of its first request.

| recording | forecast |
|---|---|
"""


def main() -> None:
    """Simulate, count, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--healthy-seconds", type=float, default=3600, help="length of each healthy simulation")
    parser.add_argument("--only", choices=("pools",), help="leave the other sections as they are")
    parser.add_argument(
        "--pool-seeds", type=int, nargs=2, default=(273, 350), help="first and last random load of pools"
    )
    given = parser.parse_args()
    if not given.only:
        table.write("forecasts.md", forecasts_page(given.seeds, given.healthy_seconds))
    table.put_section("forecasts.md", pools_section(range(given.pool_seeds[0], given.pool_seeds[1] + 1)))


def forecasts_page(seeds: int, healthy_seconds: float) -> str:
    """Return the sections about a KV cache that fills up."""
    page = HEAD.format(hold=INCIDENT.hold, latest=LATEST)
    unused = range(7, 7 + seeds)
    for kinds in (FILLING, LEVEL):
        page += "".join(row(name, kind, unused, 3600) for name, kind in kinds.items())
    page += "".join(row(name, kind, range(1, 2), healthy_seconds) for name, kind in KINDS.items())
    page += TAIL
    for name in RECORDINGS:
        report = doctor.run(ObserveOptions([str(ROOT / "tests" / "recordings" / name)]))
        told = [found.diagnosis for found in report.present if found.diagnosis.incident.id == INCIDENT.id]
        page += f"| {name} | {f'at {told[0].since}' if told else 'none'} |\n"
    return page


if __name__ == "__main__":
    main()
