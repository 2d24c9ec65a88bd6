"""How often diag is right about the recordings, at their own cadence and at rarer ones; writes bench/accuracy.md.

Of every recording the truth stands in its recording.toml: what was present, what was absent, and what may be said
either way, which is not counted. FOLDERs of further recordings are judged beside those of the repository:
`bench/accuracy.py [FOLDER ...]`.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.thinning import CADENCES, offsets, thinned, truth  # noqa: E402

from diag.commands.observe import judge_observation, site  # noqa: E402
from diag.diagnosis.report import Report  # noqa: E402
from diag.sources.recording.reader import read  # noqa: E402

RECORDED = 0
"""The cadence of a recording itself."""
MOST_OFFSETS = 3
HEAD = """# Accuracy

`python bench/accuracy.py` diagnoses every recording of `tests/recordings` from its pages and its log, and compares the
diagnosis with the truth in its recording.toml. Recordings of real servers were made on the CPU; recordings that need a
GPU, several hosts or other hardware are scripted in the exporter's format, as their recording.toml states. The
incidents were written with these recordings at hand: the figures show that known cases work, not the accuracy on unseen
servers.

- **found**: the incident was present and is named. **unknown**: the incident was present, and the answer is "cannot
  tell" or missing telemetry. **missed**: the incident was present and is called absent. **claimed**: the incident was
  absent and is named.
- **precision**: found / (found + claimed). **recall**: found / cases.
- **false alarm**: a healthy server is called warning or critical; **cannot tell** counts "no incident found" as well.
- **first is right**: the first incident of the answer was really present.

"""


@dataclass(frozen=True)
class Look:
    """What was said of one recording at one cadence and offset; `answers` has a word for each incident with a truth."""

    every: int
    healthy: bool
    verdict: str
    first_is_right: bool | None
    answers: tuple[tuple[str, str], ...]


def looks(folder: Path) -> list[Look]:
    """Every look at a recording."""
    warnings.simplefilter("ignore")
    seen, known = read(folder), site(None, None)
    thin = ((every, thinned(seen, every, at)) for every in CADENCES for at in offsets(seen, every, MOST_OFFSETS))
    judged = partial(judge_observation, contract=known[0], incidents=known[1])
    return [_look(every, judged(observation).report, truth(folder)) for every, observation in ((RECORDED, seen), *thin)]


def _look(every: int, report: Report, truth: dict[str, Sequence[str]]) -> Look:
    states = {name: _state(report, name) for name in (*truth["present"], *truth["absent"])}
    first = next((found.diagnosis.incident.id for found in report.present if found.diagnosis.primary), None)
    answers = {name: _answer(state, name in truth["present"]) for name, state in states.items()}
    right = None if first is None or not truth["present"] else first in truth["present"]
    return Look(every, truth["verdict"] == "healthy", report.verdict, right, tuple(answers.items()))


def _state(report: Report, incident: str) -> str:
    states = {found.diagnosis.state for found in report.findings if found.diagnosis.incident.id == incident}
    return next((state for state in ("present", "unknown", "absent") if state in states), "unknown")


def _answer(state: str, happened: bool) -> str:
    if state == "present":
        return "found" if happened else "claimed"
    return {"unknown": "unknown", "absent": "missed"}[state] if happened else "right"


def by_incident(every: Iterable[Look]) -> Iterator[str]:
    """A line for each incident that any recording shows or excludes, at the recorded cadence."""
    counts: dict[str, Counter[str]] = {}
    for look in every:
        for incident, answer in look.answers:
            counts.setdefault(incident, Counter())[answer] += 1
    for incident in sorted(counts):
        yield f"| {incident} | {_cells(counts[incident])} |\n"


def _cells(count: Counter[str]) -> str:
    cases = count["found"] + count["unknown"] + count["missed"]
    words = ("found", "unknown", "missed", "claimed")
    cells = [cases, *(count[word] for word in words), count["right"] + count["claimed"]]
    shares = [_share(count["found"], count["found"] + count["claimed"]), _share(count["found"], cases)]
    return " | ".join(map(str, (*cells, *shares)))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def by_cadence(every: int, seen: Sequence[Look]) -> str:
    """The line of one cadence."""
    healthy = [look.verdict for look in seen if look.healthy]
    alarms = sum(word in ("warning", "critical") for word in healthy)
    unsure = sum(word in ("unknown", "no_incident") for word in healthy)
    answers = Counter(answer for look in seen for _, answer in look.answers)
    first = [look.first_is_right for look in seen if look.first_is_right is not None]
    name = f"{every} s" if every else "as recorded"
    cells = (name, len(seen), len(healthy), alarms, unsure, _cells(answers), f"{sum(first)} of {len(first)}")
    return f"| {' | '.join(map(str, cells))} |\n"


def page(all_looks: Sequence[Look]) -> str:
    """The whole page."""
    cadences = {every: [look for look in all_looks if look.every == every] for every in (RECORDED, *CADENCES)}
    columns = "cases | found | unknown | missed | claimed | cases without the incident | precision | recall"
    title = (
        f"| scraped every | looks | at healthy servers | false alarms | cannot tell | {columns} | first is right |\n"
    )
    incidents = f"\nAs recorded, by incident:\n\n| incident | {columns} |\n|{'---|' * 9}\n"
    rare = "".join(by_cadence(every, seen) for every, seen in cadences.items())
    return HEAD + title + f"|{'---|' * 14}\n" + rare + incidents + "".join(by_incident(cadences[RECORDED]))


if __name__ == "__main__":
    parents = (ROOT / "tests" / "recordings", *map(Path, sys.argv[1:]))
    folders = sorted(file.parent for parent in parents for file in parent.glob("*/recording.toml"))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(chain.from_iterable(pool.map(looks, folders)))
    table.write("accuracy.md", page(found))
