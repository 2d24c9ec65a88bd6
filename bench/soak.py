"""What diag says of healthy servers, hour after hour; writes bench/soak.md.

Kinds of load of tests/support/healthy_loads.py are simulated and scraped every 5 to 60 s. The doctor judges each hour
as a range, and looks of 30 s at random moments as it looks at a live server; the alerts of alerts/diag.rules.yaml are
evaluated every 15 s. `--results FILE` continues earlier runs, `--only KIND --every S --seed N --keep FOLDER` keeps the
recordings of an hour, `--live SECONDS --keep FOLDER` records a real vLLM (DIAG_VLLM_PYTHON), `--recording FOLDER`
judges such a recording as one more row.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import healthy_loads, rewriting  # noqa: E402
from support.alert_rules import RULES  # noqa: E402
from support.firing import alerts  # noqa: E402
from support.live import healthy_hour  # noqa: E402

from diag import promql  # noqa: E402
from diag.commands import doctor  # noqa: E402
from diag.commands.observe import ObserveOptions  # noqa: E402
from diag.core.incident import seconds  # noqa: E402
from diag.diagnosis.report import Report  # noqa: E402
from diag.promql import Block  # noqa: E402
from diag.sources.recording.reader import read  # noqa: E402

CADENCES = (5, 10, 15, 30, 60)
BEGUN = 1_795_000_000.0
LOOK, LOOK_EVERY = 30.0, 2.0
EVALUATED_EVERY = 15
SEVERITIES = ("critical", "warning", "info")
Result = dict[str, Any]


def hour(kind: str, seed: int, cadences: Sequence[int], looks: int, folder: Path) -> Iterator[Result]:
    """Simulate an hour; judge it as scraped at each of these cadences, and so many looks at it beside the first one."""
    chance = random.Random(f"{kind} {seed}")
    moments = iter(lambda: chance.uniform(120, healthy_loads.HOUR - LOOK), None)
    begins = [*islice((at for at in moments if not healthy_loads.is_down(kind, at, at + LOOK)), looks)]
    parts = [[begin + LOOK_EVERY * k for k in range(int(LOOK / LOOK_EVERY) + 1)] for begin in begins]
    phase = chance.uniform(0, CADENCES[0])
    grid = [phase + CADENCES[0] * k for k in range(int(healthy_loads.HOUR / CADENCES[0]))]
    scrapes = [*healthy_loads.scraped(kind, seed, sorted({*grid, *chain(*parts)}), BEGUN)]
    looked: list[list[Any]] = []
    for part in parts:
        report = doctor.run(ObserveOptions([str(_written(folder / f"look_{part[0]:.0f}", scrapes, part))]))
        looked += [[f"look at {part[0]:.0f} s", *each] for each in findings(report)]
    for every in cadences:
        apart = every // CADENCES[0]
        found = judged(_written(folder / f"every_{every}", scrapes, grid[chance.randrange(apart) :: apart]))
        found["findings"] += looked
        yield {"kind": kind, "every": every, "seed": seed, "looks": looks, **found}
        looks, looked = 0, []


def _written(folder: Path, scrapes: Iterable[healthy_loads.Scrape], times: Sequence[float]) -> Path:
    wanted = {BEGUN + t for t in times}
    return rewriting.write(folder, ((s.at, s.instance, s.page) for s in scrapes if s.at in wanted))


def judged(recording: Path) -> Result:
    """Judge a recording as a range, and its alerts."""
    report = doctor.run(ObserveOptions([str(recording)]))
    servers = len(report.observed.servers)
    hours = servers * (report.observed.end - report.observed.start) / 3600
    told = [["range", *each] for each in findings(report)]
    return {"hours": hours, "findings": told, "flaps": flaps(report), "alerts": [*fired(recording)]}


def findings(report: Report) -> list[list[Any]]:
    """Incidents: severity, id, subject, seconds since the start, and the decisive numbers; ended ones as they were."""
    return [
        [
            each.diagnosis.severity if each.diagnosis.ongoing else each.diagnosis.incident.severity,
            each.diagnosis.incident.id,
            " ".join(value for _, value in each.diagnosis.subject),
            round(max(0.0, (each.diagnosis.since or 0.0) - report.observed.start)),
            "; ".join(f"{reading.condition.signal.name} {reading.shown}" for reading in each.diagnosis.symptoms),
        ]
        for each in report.present
    ]


def flaps(report: Report) -> int:
    """How often an info came back."""
    infos = (each.diagnosis for each in report.present if each.diagnosis.severity == "info")
    return sum(max(0, len(diagnosis.episodes) - 1) for diagnosis in infos)


def fired(recording: Path) -> Iterator[list[Any]]:
    """Alerts that fire over a recording: severity, incident, subject, seconds until the first time."""
    observation = read(recording)
    blocks = [
        Block(tuple({"job": "vllm", **labels} for labels in block.labels), block.times, block.values)
        for block in observation.samples.select([])
    ]
    held = promql.Evaluator(promql.Samples(blocks))
    first, last = int(observation.instants[0]), int(observation.instants[-1])
    instants = np.arange(first, last, EVALUATED_EVERY * 1000, dtype=np.int64)
    for alert, expression in alerts(RULES):
        vector = held.evaluate(expression, instants)
        hold = round(seconds(alert.get("for", "0s"))) // EVALUATED_EVERY
        at = np.arange(instants.size)
        for labels, row in zip(vector.labels, vector.present, strict=True):
            absent = np.maximum.accumulate(np.where(row, -1, at))
            firing = np.flatnonzero(row & (at - absent > hold))
            if firing.size:
                subject = " ".join(value for name, value in labels.items() if name in ("instance", "engine", "gpu"))
                name = alert["labels"].get("incident") or alert["alert"]
                yield [alert["labels"]["severity"], name, subject, int(firing[0]) * EVALUATED_EVERY]


# -- the page ----------------------------------------------------------------------------------------------------------

HEAD = """\
# What diag says of healthy servers

`python bench/soak.py`: a simulated vLLM 0.32 (`tests/support/simulated_vllm.py`: its scheduler, its KV blocks, and the
page that it would show) under kinds of load that its capacity suffices for (`tests/support/healthy_loads.py`). Every
critical or warning is false; infos may be true. Each of {runs} hours is simulated once, and judged as scraped at each
cadence: by the doctor as a range, in which an incident that ended counts too, and in {looks} looks of 30 s outside of
planned restarts; the alerts of `alerts/diag.rules.yaml` are evaluated every 15 s. The hours are those of servers. A
flap is an info that came back. The real vLLM runs on the CPU.

| | hours | critical | warning | info | flaps |
|---|---:|---:|---:|---:|---:|
"""
BY_KIND = """
| load | hours | doctor: critical | warning | info | flaps | looks: crit. | warn. | alerts: crit. | warn. | info |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
"""


def written(results: Sequence[Result]) -> str:
    """The page."""
    simulated = [each for each in results if each["every"]]
    runs = len({(each["kind"], each["seed"]) for each in simulated})
    page = HEAD.format(runs=runs, looks=sum(each["looks"] for each in results))
    page += _total("simulated: doctor, per 1,000 h", simulated, "range") + _total(
        "simulated: alerts, per 1,000 h", simulated, "alerts"
    )
    page += f"| simulated: looks, of {sum(r['looks'] for r in simulated)} | "
    page += f"- | {' | '.join(str(count(simulated, 'look', severity)) for severity in SEVERITIES)} | - |\n"
    for every in CADENCES:
        some = [each for each in simulated if each["every"] == every]
        page += _total(f"every {every} s: doctor, per 1,000 h", some, "range")
        page += _total(f"every {every} s: alerts, per 1,000 h", some, "alerts")
    page += BY_KIND + "".join(_row(kind, [r for r in results if r["kind"] == kind]) for kind in _kinds(results))
    serious = [*_serious(results)]
    page += "\n## False findings\n\n" + ("".join(f"- {line}\n" for line in serious) or "None above info.\n")
    return page + _infos(results)


def _kinds(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(each["kind"] for each in results))


def _told(result: Result, where: str) -> list[list[Any]]:
    """What was told in one way, each beginning with its severity."""
    if where == "alerts":
        return list(result["alerts"])
    return [rest for place, *rest in result["findings"] if place.startswith(where)]


def count(results: Iterable[Result], where: str, severity: str) -> int:
    """How often that severity was told."""
    return sum(told[0] == severity for result in results for told in _told(result, where))


def _total(title: str, results: Sequence[Result], where: str) -> str:
    hours = sum(each["hours"] for each in results)
    each = [count(results, where, severity) / max(hours, 1e-9) * 1000 for severity in SEVERITIES]
    more = sum(each["flaps"] for each in results) / max(hours, 1e-9) * 1000 if where == "range" else None
    cells = [*(f"{number:.3g}" for number in each), "-" if more is None else f"{more:.3g}"]
    return f"| {title} | {hours:.0f} | {' | '.join(cells)} |\n"


def _row(kind: str, results: Sequence[Result]) -> str:
    cells = [f"{sum(each['hours'] for each in results):.1f}"]
    cells += [str(count(results, "range", severity)) for severity in SEVERITIES]
    cells += [str(sum(each["flaps"] for each in results))]
    cells += [str(count(results, "look", severity)) for severity in SEVERITIES[:2]]
    cells += [str(count(results, "alerts", severity)) for severity in SEVERITIES]
    return f"| {kind} | {' | '.join(cells)} |\n"


def _serious(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        scraped = f", every {result['every']} s, seed {result['seed']}" if result["every"] else ""
        of = f"{result['kind']}{scraped}"
        for place, severity, incident, subject, at, *numbers in result["findings"]:
            if severity != "info":
                yield f"{of}: {place}: {severity} {incident} of {subject} from {at} s on ({', '.join(numbers)})"
        for severity, name, subject, at in result["alerts"]:
            if severity != "info":
                yield f"{of}: alert {severity} {name} of {subject} at {at} s"


def _infos(results: Sequence[Result]) -> str:
    counts: Mapping[tuple[str, str], int] = Counter(
        (told[1], result["kind"]) for result in results for told in _told(result, "range") if told[0] == "info"
    )
    lines = [f"| {incident} | {kind} | {number} |\n" for (incident, kind), number in sorted(counts.items())]
    return "\n## Infos\n\n| incident | kind of load | ranges |\n|---|---|---:|\n" + "".join(lines) if lines else ""


def main() -> None:
    """Simulate what is asked for and not in the results yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="KIND", action="append", choices=list(healthy_loads.KINDS))
    parser.add_argument("--every", metavar="SECONDS", type=int, action="append")
    parser.add_argument("--seed", metavar="N", type=int, action="append")
    parser.add_argument("--looks", type=int, default=3, help="for each simulated hour")
    parser.add_argument("--keep", metavar="FOLDER", type=Path)
    parser.add_argument("--results", metavar="FILE", type=Path)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no hour after so many")
    parser.add_argument("--live", metavar="SECONDS", type=float)
    parser.add_argument("--recording", metavar="FOLDER", type=Path, action="append", default=[])
    given = parser.parse_args()
    if given.live:
        given.recording.append(healthy_hour.record(given.keep or Path(tempfile.mkdtemp()), given.live))
    file = given.results or Path(tempfile.mkdtemp()) / "results.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(each["kind"], each["every"], each["seed"]) for each in results}
    end = time.monotonic() + 60 * given.minutes
    for seed, kind in product(given.seed or (1, 2), given.only or healthy_loads.KINDS):
        cadences = [every for every in given.every or CADENCES if (kind, every, seed) not in known]
        if not cadences or time.monotonic() > end:
            continue
        with tempfile.TemporaryDirectory() as folder, file.open("a", encoding="utf-8") as out:
            for result in hour(kind, seed, cadences, given.looks, given.keep or Path(folder)):
                results.append(result)
                print(json.dumps(result), file=out, flush=True)
                for line in _serious([result]):
                    print(line, flush=True)
    for folder in given.recording:
        results.append({"kind": "real vLLM", "every": 0, "seed": 0, "looks": 0, **judged(folder)})
    if not given.only:
        table.write("soak.md", written(results))


if __name__ == "__main__":
    main()
