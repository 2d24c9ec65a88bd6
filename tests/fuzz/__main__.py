"""Fuzzes one target, led by what of diag's code an input reaches (Atheris): `python -m tests.fuzz --seconds 600 page`.

What it found lies in .fuzz/TARGET/finds, each input with its traceback; .fuzz/TARGET/inputs are those that reached
something new, and where the next run begins. The last line is the run in figures.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import NamedTuple, NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    import atheris
except ImportError:
    sys.exit("Atheris is not installed: pip install -e '.[fuzz]'")

with atheris.instrument_imports(include=["diag"]):
    from fuzz import targets
from fuzz.examine import LATE, Find, examine, peak, shrunk
from fuzz.mutate import MOST_BYTES, mutated

KEPT = targets.ROOT / ".fuzz"
LIBFUZZER = ("-verbosity=0", "-timeout=300", "-rss_limit_mb=4096", "-len_control=0", f"-max_len={MOST_BYTES}")

ALONE = """import sys
from fuzz import examine, targets
examine.examine(targets.TARGETS[sys.argv[1]], sys.stdin.buffer.read())"""


class Figures(NamedTuple):
    """A run: `peak` in MiB, `slowest` and `seconds` in seconds of CPU time: other programs may have the machine."""

    target: str
    executions: int
    seconds: float
    finds: int
    peak: int
    slowest: float


class Hunt:
    """Takes inputs until the time is over."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds, self.target = name, seconds, targets.TARGETS[name]
        self.folder = KEPT / name
        self.executions, self.slowest = 0, 0.0
        self.found: set[str] = set()

    def take(self, text: bytes) -> None:
        """One input of many."""
        start, find = time.process_time(), None
        try:
            examine(self.target, text)
        except Find as error:
            find = error
        self.executions += 1
        self._time(text, time.process_time() - start)
        if find and not (LATE in find.what and self._is_quick_alone(text)):
            self._keep(text, find)
        if time.process_time() > self.seconds:
            self._end()

    def _is_quick_alone(self, text: bytes) -> bool:
        """Without instrumentation, which makes some code ten times slower."""
        words, folder = [sys.executable, "-c", ALONE, self.name], Path(__file__).parents[1]
        return not subprocess.run(words, check=False, input=text, cwd=folder, capture_output=True).returncode

    def _keep(self, text: bytes, find: Find) -> None:
        """The first of each kind, shortened, with its traceback."""
        if find.what in self.found:
            return
        self.found.add(find.what)
        print(f"{self.name}: {find.what}", flush=True)
        file = self.folder / "finds" / str(len(self.found))
        file.with_suffix(".txt").write_text(str(find), encoding="utf-8")
        file.write_bytes(shrunk(self.target, text, find.what))

    def _time(self, text: bytes, seconds: float) -> None:
        if seconds > self.slowest:
            self.slowest = seconds
            (self.folder / "slowest").write_bytes(text)

    def _end(self) -> NoReturn:
        """Atheris itself never returns."""
        seconds, slowest = round(time.process_time(), 1), round(self.slowest, 2)
        figures = Figures(self.name, self.executions, seconds, len(self.found), peak() >> 20, slowest)
        print(json.dumps(figures._asdict()), flush=True)
        os._exit(bool(self.found))


def main() -> None:
    """Fuzz one target; exits with 1 where something was found."""
    reader = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    reader.add_argument("target", choices=targets.TARGETS)
    reader.add_argument("--seconds", type=float, default=60.0)
    asked = reader.parse_args()
    hunt, seeds = Hunt(asked.target, asked.seconds), targets.seeds(asked.target)
    for folder in ("finds", "inputs"):
        (hunt.folder / folder).mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (hunt.folder / "inputs" / f"seed{number}").write_bytes(seed)

    def mutate(text: bytes, most: int, number: int) -> bytes:
        random = Random(number)
        return mutated(random, text, random.choice(seeds))[:most]

    def cross(text: bytes, other: bytes, most: int, number: int) -> bytes:
        return mutated(Random(number), text, other)[:most]

    words = [reader.prog, str(hunt.folder / "inputs"), *LIBFUZZER, f"-artifact_prefix={hunt.folder}/finds/"]
    atheris.Setup(words, hunt.take, custom_mutator=mutate, custom_crossover=cross)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
