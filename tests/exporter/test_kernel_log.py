"""The kernel's log says when it killed a process of vLLM; nobody else is believed about it."""

import time
from pathlib import Path

import pytest

from diag.exporter.process.kernel import last_vllm_kill

KILLED = "Memory cgroup out of memory: Killed process 4748 (VLLM::Worker) total-vm:3505860kB, anon-rss:1799584kB"


def record(text: str, seconds: float = 60.0, priority: int = 3) -> str:
    """Return a record of /dev/kmsg: priority, number, microseconds since the boot, flags."""
    return f"{priority},1339,{seconds * 1e6:.0f},-;{text}\n SUBSYSTEM=memory\n"


@pytest.mark.parametrize(
    ("records", "seconds"),
    [
        (record("usb 1-1: new device") + record(KILLED, 60), 60),
        (record(KILLED, 60) + record(KILLED, 90), 90),
        (record("Out of memory: Killed process 7 (VLLM::EngineCor) total-vm:1kB", 30), 30),
        (record("Memory cgroup out of memory: Killed process 7 (python) total-vm:1kB"), None),
        (record(KILLED, priority=12), None),
        (record(f"vllm: {KILLED}"), None),
        ("", None),
        (record(KILLED).replace("60000000", "9" * 400) + record(KILLED, 90), 90),
        (record(KILLED).replace("60000000", "9" * 5000), None),
        (record(KILLED, priority=10**400), None),
    ],
    ids=[
        *("one", "the last", "of the host", "of another program", "of a program's own record", "quoted", "none"),
        *("400 digits", "5000 digits", "facility of 400 digits"),
    ],
)
def test_the_last_kill_of_a_vllm_process_is_found(tmp_path: Path, records: str, seconds: float | None) -> None:
    (tmp_path / "kmsg").write_text(records)
    found = last_vllm_kill(tmp_path / "kmsg")
    boot = time.time() - time.monotonic()
    assert found == (0.0 if seconds is None else pytest.approx(boot + seconds, abs=1))


def test_unreadable_kernel_log_is_ignored(tmp_path: Path) -> None:
    assert last_vllm_kill(tmp_path / "kmsg") == 0.0
