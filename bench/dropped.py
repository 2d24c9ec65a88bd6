"""Drop each family of telemetry from each ill recording and judge what is left; writes dropped.md.

`bench/dropped.py [NAME ...]` takes these recordings alone.
"""

import os
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import dropping  # noqa: E402
from support.thinning import truth  # noqa: E402

from diag.commands.observe import judge_observation, site  # noqa: E402
from diag.sources.recording.reader import read  # noqa: E402

HEAD = """# Dropped telemetry

`python bench/dropped.py [NAME ...]` takes each family of telemetry (all series of one metric) out of the ill recordings
of `tests/recordings`, one at a time, and judges what is left. A verdict may become unknown. It is wrong if it is
healthy although a sign of the incident is still measured and holds, or if another incident is claimed.

- **stays**: the incidents are found all the same. **cannot tell which**: a warning, because users are affected and the
  family is missing that would tell the incident. **no incident**: nothing was found, and the report names what was not
  seen. **cannot tell**: forward progress is unknown. **healthy**: nothing that remains shows the incident: a normal
  server has no such family.

"""
COLUMNS = ("stays", "cannot tell which", "no incident", "cannot tell", "healthy", "wrong")


class Dropped(NamedTuple):
    """One family dropped from one recording, and what became of the verdict: one of the columns."""

    recording: str
    family: str
    became: str


def dropped(folder: Path) -> list[Dropped]:
    """Judge a recording without each of its families."""
    warnings.simplefilter("ignore")
    seen, (contract, incidents) = read(folder), site(None, None)
    full = judge_observation(seen, contract, incidents).report
    found = {finding.diagnosis.incident.id for finding in full.present}
    rows = []
    for family in dropping.families(seen):
        report = judge_observation(dropping.without_family(seen, family), contract, incidents).report
        words = {"warning": "cannot tell which", "no_incident": "no incident", "unknown": "cannot tell"}
        became = words.get(report.verdict, report.verdict)
        if {finding.diagnosis.incident.id for finding in report.present if finding.diagnosis.primary} & found:
            became = "stays"
        if dropping.change(full, report).is_wrong:
            became = "wrong"
        rows.append(Dropped(folder.name, family, became))
    return rows


def counts(rows: list[Dropped]) -> str:
    count = Counter(row.became for row in rows)
    return " | ".join(str(count[column] or "") for column in COLUMNS)


def page(rows: list[Dropped]) -> str:
    """The whole page: the sum, by recording, and each family that changes a verdict."""
    head = f"| {{}} | families | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}\n"
    by_recording = {
        name: [row for row in rows if row.recording == name] for name in sorted({r.recording for r in rows})
    }
    text = HEAD + head.format("recording")
    text += "".join(f"| {name} | {len(own)} | {counts(own)} |\n" for name, own in by_recording.items())
    text += f"| all | {len(rows)} | {counts(rows)} |\n"
    text += "\nFamilies whose absence changes a verdict:\n\n" + head.format("family").replace("families", "recordings")
    changing = sorted({row.family for row in rows if row.became != "stays"})
    for family in changing:
        own = [row for row in rows if row.family == family]
        text += f"| `{family}` | {len(own)} | {counts(own)} |\n"
    return text


if __name__ == "__main__":
    folders = [file.parent for file in sorted((ROOT / "tests" / "recordings").glob("*/recording.toml"))]
    wanted = sys.argv[1:]
    ill = [each for each in folders if each.name in wanted or (not wanted and truth(each)["verdict"] == "ill")]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [row for rows in pool.map(dropped, ill) for row in rows]
    table.write("dropped.md", page(found))
    sys.exit(1 if any(row.became == "wrong" for row in found) else 0)
