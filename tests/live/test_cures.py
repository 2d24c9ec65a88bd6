"""A real vLLM on the CPU falls ill under load, is named, and is cured by the doctor's own relaunch line."""

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.live import cure, load, server

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not server.PYTHON, reason="no vLLM: .ci/components makes one, DIAG_VLLM_PYTHON names its Python"
    ),
]
LOOK = ("--for", "30", "--every", "1")


def said(*command: str) -> dict[str, Any]:
    done = subprocess.run([cure.DIAG, *command, "--json"], stdout=subprocess.PIPE, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def present(report: dict[str, Any]) -> dict[str, Any]:
    """The one primary incident of a report."""
    (found,) = (each for each in report["diagnoses"] if each["primary"])
    return dict(found)


def fixes(found: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each["to"] for each in found["fixes"] if each["name"]}


@pytest.mark.parametrize("case", cure.CASES, ids=lambda case: case.incident)
def test_it_is_named_while_it_lasts_and_cured_by_the_first_fix(case: cure.Case, tmp_path: Path) -> None:
    before = tmp_path / "before"
    with (
        server.running(tmp_path, case.size, case.flags) as sick,
        load.running(sick.port, *case.clients),
        ThreadPoolExecutor(1) as meanwhile,
    ):
        begun = time.time()
        time.sleep(case.settles)
        kept = meanwhile.submit(cure.recorded, sick.url, before, 30)
        report = said("doctor", sick.url, *LOOK)
        kept.result()
    found = present(report)
    assert found["incident"] == case.incident
    since = found["since"] or report["observed"]["from"]
    assert since - begun < 60  # by the scrapes: two busy cores start our process late, and have it watch on
    low, high = case.bounds
    assert low <= fixes(found)[case.flag] <= high
    line = present(said("doctor", str(before)))["relaunch"]
    log = tmp_path / "relaunched.log"
    with server.relaunched(line, sick.port, log) as well, load.running(well.port, *case.clients):
        time.sleep(cure.WARM_UP)
        verdict = said("verify", str(before), well.url, *LOOK)
    assert verdict["verdict"] == "cured", json.dumps(verdict, indent=1)
    (one,) = verdict["servers"]
    assert one["incidents"][0]["incident"] == case.incident
    changed = {each["name"]: (each["before"], each["after"]) for each in one["changes"] if not each["follows"]}
    assert list(changed) == [case.changed]
