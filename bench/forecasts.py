"""Lead time and false forecasts of kv_cache_filling; writes bench/forecasts.md.

Loads that fill a KV cache, loads that look so (tests/support/filling_loads.py), and the healthy loads of bench/soak.py
are simulated for an hour each and scraped every 5, 15 and 30 s; the alert's expression is evaluated every 15 s. The
recordings of cascades are judged as the doctor judges them.
"""

import argparse
import sys
import tempfile
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

from diag.commands import doctor  # noqa: E402
from diag.commands.observe import ObserveOptions  # noqa: E402
from diag.core.incident import seconds  # noqa: E402
from diag.knowledge.catalog import load  # noqa: E402

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


def row(name: str, kind: healthy_loads.Kind, seeds: int, length: float) -> str:
    """A row of the table: a kind of load at every cadence and seed."""
    found: list[Forecast] = []
    leads: list[float] = []
    hours = 0.0
    for seed in range(1, seeds + 1):
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


HEAD = """\
# Forecasts of a full KV cache

`python bench/forecasts.py`: loads are simulated for an hour (`tests/support/filling_loads.py`, and the healthy loads of
`soak.md`), scraped every 5, 15 and 30 s; the alert of `kv_cache_filling` is evaluated every 15 s and waits for {hold}.
Full is the first usage of 99 % or preemption after ten minutes without either. A forecast is false if the KV cache is
not full within {latest:.0f} s, or three times the named time if that is longer. Named / real is the median of the time
that a true forecast names, divided by the time that passed.

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
    given = parser.parse_args()
    page = HEAD.format(hold=INCIDENT.hold, latest=LATEST)
    for kinds, seeds, length in ((FILLING, given.seeds, 3600), (LEVEL, given.seeds, 3600)):
        page += "".join(row(name, kind, seeds, length) for name, kind in kinds.items())
    page += "".join(row(name, kind, 1, given.healthy_seconds) for name, kind in KINDS.items())
    page += TAIL
    for name in RECORDINGS:
        report = doctor.run(ObserveOptions([str(ROOT / "tests" / "recordings" / name)]))
        told = [found.diagnosis for found in report.present if found.diagnosis.incident.id == INCIDENT.id]
        page += f"| {name} | {f'at {told[0].since}' if told else 'none'} |\n"
    table.write("forecasts.md", page)


if __name__ == "__main__":
    main()
