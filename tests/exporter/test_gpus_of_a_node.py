"""`diag gpus` over the scripted driver: each GPU's verdict, the host's, the exit status, one screen, JSON."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support import scripted_nvml
from support.cli import installed
from support.schemas import validator
from support.scripted_nvml import GIB, H100, LOST

from diag import report
from diag.commands import gpus
from diag.core.errors import BadUsage, Unreachable
from diag.core.formatting import listed
from diag.report.gpus import DOCUMENT, STATUS, NodeGpus, render

SCHEMA = validator(Path(report.__file__).with_name("diag.gpus.schema.json"))
IDLE = {**H100, "utilization": 0, "memory_busy": 0, "power": 70_000, "used": GIB // 2, "free": 78 * GIB, "reasons": 1}
BUSY = {**IDLE, "utilization": 100, "power": 690_000, "reasons": 4}
Gpu = Mapping[str, object]


class Clock:
    """A time that passes only while `run` sleeps; the GPUs then become what they are at that second."""

    def __init__(self, play: Callable[[float], None]) -> None:
        self._play, self._now = play, 1_800_000_000.0

    def time(self) -> float:
        return self._now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self._play(self._now - 1_800_000_000.0)


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., NodeGpus]:
    script = scripted_nvml.loaded(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run(*of: Gpu | Callable[[float], Gpu], seconds: float = 30, select: tuple[str, ...] = ()) -> NodeGpus:
        def play(at: float) -> None:
            scripted_nvml.write(script, [gpu(at) if callable(gpu) else gpu for gpu in of])

        play(0)
        monkeypatch.setattr(gpus, "time", Clock(play))
        return gpus.run(select, seconds, 1.0, None, None)

    return run


def hot(seconds: float) -> Gpu:
    return {**BUSY, "reasons": 0x40, "throttled_hw_thermal": int(seconds * 1e9), "clock_sm": 900}


def braked(seconds: float) -> Gpu:
    return {**BUSY, "reasons": 0x80, "throttled_hw_power_brake": int(seconds * 1e9), "clock_sm": 900}


def held(by: int, **more: object) -> Gpu:
    return {**IDLE, "used": 40 * GIB, "free": 39 * GIB, "processes": {by: 40 * GIB}, **more}


@pytest.mark.parametrize(
    ("gpu", "verdict", "ids"),
    [
        (IDLE, "healthy", set()),
        (BUSY, "no_incident", set()),  # its power cap is no fault; who computes on it, the driver does not tell
        (hot, "critical", {"gpu_thermal_throttling"}),
        (braked, "warning", {"gpu_power_brake"}),
        (held(os.getpid()), "warning", {"gpu_memory_contended"}),
        (held(os.getpid(), process_utilization={os.getpid(): 90}), "warning", None),
        (held(2**22 + 1), "no_incident", set()),  # a process of another container may be anybody's
        (LOST, "critical", {"gpu_fault"}),
        ({**IDLE, "remapped": "0 1 0 1"}, "critical", {"gpu_fault", "memory_errors"}),
        ({**IDLE, "remapped": "0 1 1 0"}, "warning", {"memory_errors"}),
        ({**IDLE, "width": 8}, "warning", {"pcie_width"}),
        ({**IDLE, "limit": 350_000}, "warning", {"power_limit"}),
    ],
)
def test_each_gpu_has_its_verdict_beside_a_healthy_one(
    judged: Callable[..., NodeGpus], gpu: Gpu, verdict: str, ids: set[str] | None
) -> None:
    seen = judged(IDLE, gpu)
    well, other = seen.gpus
    assert (well.verdict, other.verdict) == ("healthy", verdict)
    found = {finding.id for finding in other.findings}
    assert found == ids if ids is not None else {"gpu_compute_contended", "gpu_memory_contended"} <= found
    assert seen.verdict == verdict
    text = render(seen)
    assert len(text.splitlines()) <= 24
    assert all(f"GPU {other.gpu}: " in text and finding.message.split(" (")[0] in text for finding in other.findings)
    document = json.loads(DOCUMENT.text(seen))
    SCHEMA.validate(document)
    assert document["exit_status"] == STATUS[verdict]


def test_a_short_look_calls_no_gpu_healthy_but_tells_what_it_saw(judged: Callable[..., NodeGpus]) -> None:
    seen = judged(IDLE, LOST, seconds=4)
    assert [gpu.verdict for gpu in seen.gpus] == ["unknown", "critical"]
    assert "too short: 30 s are needed" in " ".join(render(seen).split())


def test_eight_gpus_with_one_fault_take_one_screen(judged: Callable[..., NodeGpus]) -> None:
    text = render(judged(*[held(os.getpid())] * 8))
    assert len(text.splitlines()) <= 40
    assert f"GPU {listed(list('01234567'))}: GPU memory shared with other processes" in text


def test_a_host_without_a_gpu_or_a_wrong_number_is_refused(judged: Callable[..., NodeGpus]) -> None:
    assert [gpu.gpu for gpu in judged(IDLE, IDLE, select=("1",)).gpus] == ["1"]
    with pytest.raises(BadUsage, match="--gpus 7 names no GPU of this host"):
        judged(IDLE, select=("7",))
    with pytest.raises(Unreachable, match="no GPU to judge"):
        judged()


def test_the_command_prints_and_exits_as_the_doctor(tmp_path: Path) -> None:
    library, script = scripted_nvml.build(tmp_path), tmp_path / "script"
    scripted_nvml.write(script, [IDLE, {**IDLE, "remapped": "0 1 0 1"}])
    done = installed("gpus", "--for", "0", "--json", **scripted_nvml.environment(library.parent, script))
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (2, "critical")
