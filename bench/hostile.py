"""What hostile input does to diag; writes bench/hostile.md.

Each target of tests/fuzz for --seconds, and the suites of hostile input with their generated cases. `bench/hostile.py
--seconds 600 page log` runs these targets alone and keeps the other rows of the table; with --jobs several run at a
time and share the cores. What stands below "## Further figures" is kept. Exits with 1 where something was found. Needs
Atheris: pip install -e '.[fuzz]'.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fuzz.targets import TARGETS  # noqa: E402

PAGE = ROOT / "bench" / "hostile.md"
SUITES = {
    "what clients write into the log": "tests/exporter/test_log_injection.py",
    "secrets in launch commands": "tests/unit/test_nothing_leaks.py tests/unit/test_shown.py",
    "secrets in free text": "tests/unit/test_free_text.py",
    "labels in every output": "tests/recordings/test_hostile_labels.py",
    "files that are none or never end": "tests/unit/test_odd_files.py",
    "vLLM servers that misbehave": "tests/unit/test_live_scrape.py",
    "Prometheus servers that misbehave": "tests/prometheus/test_bad_servers.py",
    "writers that are stopped": "tests/unit/test_writing.py tests/cli/test_record.py",
    "clients of the exporter": "tests/exporter/test_http_server.py",
}
HEAD = """\
# Hostile input

`python bench/hostile.py` on {cores} cores. A target of `tests/fuzz` takes mutated inputs, guided by code coverage; up
to ten run at a time. A find is an exception that is not diag's own error, an input that takes more than 5 s of CPU
time (a Prometheus, labels, calls of an agent: 20 s) or 200 MB of memory, or a secret in the output. The peak is the
peak memory of the whole process, with instrumented code and all inputs.

"""
COLUMNS = """\
| target | executions | per second | seconds | finds | peak (MiB) | slowest input (s) | commit |
|---|---|---|---|---|---|---|---|
"""
SUITE_COLUMNS = """
The test suites of hostile input, with the number of cases that hypothesis generated.

| suite | tests | passed | cases | commit |
|---|---|---|---|---|
"""
LEAK_CASES = {"DIAG_LEAK_CASES": "10000"}
FURTHER = "\n## Further figures\n"


def fuzzed(target: str, seconds: float) -> str:
    """A row of the first table."""
    words = [sys.executable, "-m", "tests.fuzz", "--seconds", str(seconds), target]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    print(said.stdout, end="", flush=True)
    try:
        run = json.loads(said.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        sys.exit(f"{target} ended by itself: {said.stderr[-2000:]}")
    pace = run["executions"] / run["seconds"]
    cells = (f"{run['executions']:,}", f"{pace:.0f}" if pace >= 10 else f"{pace:.1f}", f"{run['seconds']:.0f}")
    finds = "0" if run["finds"] == 0 else f"**{run['finds']}**"
    cells = (target, *cells, finds, str(run["peak"]), f"{run['slowest']:.2f}", table.commit())
    return f"| {' | '.join(cells)} |\n"


def tested(suite: str) -> str:
    """A row of the second table."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-m",
        "not live",
        "--timeout",
        "0",
        "--hypothesis-show-statistics",
    ]
    said = subprocess.run(
        [*words, *SUITES[suite].split()], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", said[-300:])}
    cases = sum(map(int, re.findall(r"(\d+) passing", said)))
    passed = counts.get("passed", 0)
    shown = str(passed) if passed == sum(counts.values()) else f"**{passed}**"
    return f"| {suite} | {sum(counts.values())} | {shown} | {cases or '-'} | {table.commit()} |\n"


def earlier() -> dict[str, str]:
    """The rows of the page as it is, by what they are about."""
    lines = PAGE.read_text(encoding="utf-8").splitlines(keepends=True) if PAGE.exists() else []
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}


def further() -> str:
    """What others measured, and stands at the end of the page."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return "".join(text.partition(FURTHER)[1:])


def main() -> int:
    """Run the targets and the suites, and write the page."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("names", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)}, or suites")
    reader.add_argument("--seconds", type=float, default=600.0, help="for each target")
    reader.add_argument("--jobs", type=int, default=1, help="targets that run at a time")
    asked = reader.parse_args()
    if not {*TARGETS, "suites"} >= set(asked.names):
        reader.error(f"the targets are {', '.join(TARGETS)}; or suites")
    names = asked.names or [*TARGETS, "suites"]
    chosen = [name for name in names if name != "suites"]
    with ThreadPoolExecutor(asked.jobs) as side_by_side:
        found = dict(zip(chosen, side_by_side.map(partial(fuzzed, seconds=asked.seconds), chosen), strict=True))
    rows = earlier() | found  # another run may have written meanwhile
    rows |= {suite: tested(suite) for suite in SUITES} if "suites" in names else {}
    first, second = ("".join(rows[name] for name in part if name in rows) for part in (TARGETS, SUITES))
    head = HEAD.format(cores=os.cpu_count())
    table.write(PAGE.name, head + COLUMNS + first + SUITE_COLUMNS + second + further())
    return int("**" in first + second)


if __name__ == "__main__":
    sys.exit(main())
