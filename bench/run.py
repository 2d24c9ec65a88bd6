"""Measures diag against a peer and against the pages themselves, and writes bench/results.md.

Every figure is the median of several runs of whole processes, ours and the peer's in turn, of CPU the least.
`VLLM_DOCTOR` names the peer's executable (PyPI vllm-doctor 0.6.0, in an environment of its own); without it that row is
left out.
"""

import gzip
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import table

ROOT = Path(__file__).parent.parent
DIAG = str(Path(sys.executable).parent / "diag")
RECORDING = ROOT / "tests" / "recordings" / "kv_cascade"
PAGES = 45
RUNS = 21
PARSER = """
import gzip, sys
from prometheus_client.parser import text_string_to_metric_families as parse
for page in gzip.open(sys.argv[1], "rt").read().split("# scrape ")[1:]:
    list(parse(page.partition("\\n")[2]))
"""
# As an installed program has it: compiled files are kept.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True)
class Cost:
    """What one run of a command took; `cpu` is user and system time, which other programs disturb less."""

    seconds: float
    cpu: float
    mebibytes: float


def measured(command: list[str]) -> Cost:
    """One run of a command."""
    start = time.perf_counter()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=ENVIRONMENT, **quiet) as process:
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    return Cost(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def in_turn(*commands: list[str]) -> list[list[Cost]]:
    """The costs of each command, run in turn so that a slow moment hits all of them."""
    runs = [[measured(command) for command in commands] for _ in range(RUNS)]
    return [list(costs) for costs in zip(*runs, strict=True)]


def medians(*commands: list[str]) -> list[Cost]:
    """The median cost of each command."""
    return [_median(costs) for costs in in_turn(*commands)]


def _median(costs: list[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.seconds for cost in costs),
        statistics.median(cost.cpu for cost in costs),
        statistics.median(cost.mebibytes for cost in costs),
    )


def recording(folder: Path, pages: int, targets: int = 1) -> Path:
    """The real recording cut (or repeated, with later times) to so many pages of so many targets."""
    parts = gzip.decompress((RECORDING / "metrics.prom.gz").read_bytes()).decode().split("# scrape ")[1:]
    bodies = [part.partition("\n")[2] for part in parts]
    start = float(parts[0].split()[0])
    folder.mkdir()
    with gzip.open(folder / "metrics.prom.gz", "wt", compresslevel=1) as out:
        for page in range(pages):
            for target in range(targets):
                stamp = f"{start + page + target / 1000:.3f} host{target}:8000"
                out.write(f"# scrape {stamp}\n{bodies[page % len(bodies)]}")
    return folder


def row(what: str, ours: float, theirs: float, bound: str) -> str:
    """A line of the table of ratios."""
    return f"| {what} | {ours:.2f} / {theirs:.2f} | {ours / theirs:.2f} | {bound} |"


def help_rows() -> list[str]:
    """`--help` beside the peer's."""
    peer = os.environ.get("VLLM_DOCTOR", "")
    if not peer:
        return []
    ours, theirs = medians([DIAG, "--help"], [peer, "--help"])
    return [
        row("`diag --help` / `vllm-doctor --help`, seconds", ours.seconds, theirs.seconds, "<= 0.35"),
        row("the same, MiB", ours.mebibytes, theirs.mebibytes, "< 1"),
    ]


def judging_rows(work: Path) -> list[str]:
    """Judging 45 pages from start to exit beside what prometheus_client's parser takes for them, its start left out.

    By CPU, the least of the runs: other programs only add to it.
    """
    folder = recording(work / "pages", PAGES)
    doctor = [DIAG, "doctor", str(folder)]
    parse = [sys.executable, "-c", PARSER, str(folder / "metrics.prom.gz")]
    start = [sys.executable, "-c", "import gzip, prometheus_client.parser"]
    costs = in_turn([*doctor, "--json"], doctor, parse, start)
    as_json, printed, theirs, started = (min(cost.cpu for cost in of_one) for of_one in costs)
    what = f"judging {PAGES} pages, start to exit / parsing them, CPU seconds"
    return [
        row(f"{what}, `--json`", as_json, theirs - started, "<= 0.6"),
        row("the same, the report of 20 lines", printed, theirs - started, "<= 0.6"),
    ]


def growth_rows(work: Path) -> list[str]:
    """Time and memory by number of pages and of targets."""
    sizes = [(pages, 1) for pages in (45, 450, 4500)] + [(PAGES, targets) for targets in (1, 10, 100)]
    rows = []
    for at, (pages, targets) in enumerate(sizes):
        cost = measured([DIAG, "doctor", "--json", str(recording(work / f"size{at}", pages, targets))])
        millis = 1000 * cost.seconds / (pages * targets)
        rows.append(f"| {pages} | {targets} | {cost.seconds:.2f} | {cost.mebibytes:.0f} | {millis:.2f} |")
    return rows


def main() -> None:
    """Measure everything and write the page."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        ratios = [*help_rows(), *judging_rows(work)]
        growth = growth_rows(work)
    lines = [
        "# Results",
        "",
        f"Python {platform.python_version()}, {os.cpu_count()} cores, median of {RUNS} runs in turn.",
        "",
        "| what | ours / theirs | ratio | bound |",
        "|---|---|---|---|",
        *ratios,
        "",
        "| pages | targets | seconds | MiB | ms a page |",
        "|---|---|---|---|---|",
        *growth,
    ]
    table.write("results.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
