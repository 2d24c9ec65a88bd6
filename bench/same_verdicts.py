"""Compares what two checkouts of diag say of every recording: `bench/same_verdicts.py OTHER_CHECKOUT [FOLDER ...]`.

Of each recording the verdict, the states of progress, and of every diagnosis its state, severity, subject, cause,
times and all of its numbers must be the same. Texts and the names of fields may differ, and incidents that only one of
the two knows are left out. The recordings are those of this checkout and of every further FOLDER.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FIXED = ("state", "severity", "primary", "explained_by", "since", "until", "ongoing")


def report(checkout: Path, recording: Path) -> dict[str, Any]:
    """What a checkout's doctor says as JSON; a failure is its exit status and sentence."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "diag", "doctor", "--json", str(recording.resolve())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=checkout, check=False)
    return json.loads(done.stdout) if done.stdout else {"failed": [done.returncode, done.stderr]}


def numbers(value: Any) -> Iterator[float]:
    """Every number of a document, wherever it stands."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def incidents(checkout: Path) -> set[str]:
    """The ids of those that it knows: each has a runbook."""
    return {file.stem for file in (checkout / "runbooks").glob("*.md")}


def decisions(document: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """What must not differ of the known incidents, by what it is about."""
    diagnoses = [diagnosis for diagnosis in document.get("diagnoses", ()) if diagnosis["incident"] in known]
    found: dict[str, Any] = {"verdict": document.get("verdict"), "failed": document.get("failed")}
    found["progress"] = sorted((str(part["subject"]), part["state"]) for part in document.get("progress", ()))
    found["order"] = [diagnosis["incident"] for diagnosis in diagnoses]
    for diagnosis in diagnoses:
        fixed = [diagnosis[name] for name in FIXED]
        found[f"{diagnosis['incident']} {diagnosis['subject']}"] = [*fixed, sorted(numbers(diagnosis))]
    return found


def main() -> int:
    """Print each difference; 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("folders", type=Path, metavar="FOLDER", nargs="*")
    given = parser.parse_args()
    if not (given.checkout / "diag" / "__main__.py").is_file():  # Python would run an installed diag instead
        parser.error(f"{given.checkout} is no checkout of diag")
    folders = [ROOT / "tests/recordings", *given.folders]
    recordings = [file.parent for folder in folders for file in folder.glob("*/metrics*")]
    checkouts = ROOT, given.checkout.resolve()
    here, there = map(incidents, checkouts)
    if not here & there:
        parser.error(f"{given.checkout} lacks runbooks/, which name its incidents: give a whole checkout")
    different = 0
    for recording in sorted(set(recordings)):
        ours, theirs = (decisions(report(checkout, recording), here & there) for checkout in checkouts)
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                different += 1
                print(f"{recording}: {name}\n  here  {ours.get(name)}\n  there {theirs.get(name)}")
    left_out = f"; left out: {', '.join(sorted(here ^ there))}" if here != there else ""
    print(f"{len(set(recordings))} recordings, {different} differences{left_out}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
