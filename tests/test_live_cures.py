"""The doctor's first fix of a real incident on a real vLLM, applied by its relaunch line, cures it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from live import cure, server

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not server.PYTHON, reason="no vLLM: .ci/components makes one, DIAG_VLLM_PYTHON names its Python"
    ),
]


def said(*command: str) -> Any:
    return json.loads(subprocess.run([cure.DIAG, *command, "--json"], stdout=subprocess.PIPE, check=False).stdout)


@pytest.mark.parametrize("case", cure.CASES, ids=lambda case: case.incident)
def test_the_first_fix_cures(case: cure.Case, tmp_path: Path) -> None:
    with server.running(tmp_path, case.size, case.flags) as sick:
        cure.met(sick.url, sick.port, case, tmp_path / "before", 30)
    first = said("doctor", str(tmp_path / "before"))["diagnoses"][0]
    assert first["incident"] == case.incident
    with server.relaunched(first["relaunch"], sick.port, tmp_path / "relaunched.log") as well:
        cure.met(well.url, well.port, case, tmp_path / "after", 30)
    verdict = said("verify", str(tmp_path / "before"), str(tmp_path / "after"))
    assert verdict["verdict"] == "cured"
