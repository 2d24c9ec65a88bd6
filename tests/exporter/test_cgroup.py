"""The memory and the CPU that a server may use: on this host, and in the trees that kernels and containers show."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from support.processes import TP2, serving

from diag.core.metric_families import families
from diag.exporter.process import table
from diag.exporter.process.collector import ProcessCollector
from diag.exporter.process.kernel import control_group

MEMINFO = "MemTotal:       65536000 kB\nMemFree:         1024000 kB\nMemAvailable:   49152000 kB\n"
HOST = 65536000 * 1024.0
GIB = 2**30
V2 = {
    "memory.max": f"{8 * GIB}\n",
    "memory.current": f"{7 * GIB}\n",
    "memory.stat": f"anon {4 * GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB // 2}\n"
    f"slab_reclaimable {GIB // 2}\n",
    "memory.events": "low 0\nhigh 3\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n",
    "cpu.max": "150000 100000\n",
    "cpu.stat": "usage_usec 900\nnr_periods 10\nnr_throttled 5\nthrottled_usec 2500000\n",
    "cpu.pressure": "some avg10=42.50 avg60=1.00 avg300=0.00 total=7\nfull avg10=9.00 avg60=0.00 avg300=0.00 total=0\n",
}
V1 = {
    "memory/memory.limit_in_bytes": f"{8 * GIB}\n",
    "memory/memory.usage_in_bytes": f"{7 * GIB}\n",
    "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\ntotal_active_file {GIB}\n",
    "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    "memory/memory.failcnt": "12\n",
    "cpu/cpu.cfs_quota_us": "150000\n",
    "cpu/cpu.cfs_period_us": "100000\n",
    "cpu/cpu.stat": "nr_periods 10\nnr_throttled 5\nthrottled_time 2500000000\n",
}


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def found(folder: Path, groups: str, ours: str = "0::/elsewhere\n", pressure: str = "") -> dict[str, float]:
    """The samples of process 7, whose /proc and /sys/fs/cgroup are in that folder."""
    proc = {"meminfo": MEMINFO, "7/cgroup": groups, "self/cgroup": ours}
    write(folder / "proc", proc | ({"pressure/cpu": pressure} if pressure else {}))
    group = control_group(7, folder / "proc", folder / "sys")
    samples = list(group.samples())
    assert all(len(labels) == len(families()[name].labels) for name, labels, _ in samples)
    return {" ".join([name.removeprefix("diag_host_"), *labels]): value for name, labels, value in samples}


def v2(folder: Path, path: str, changes: Mapping[str, str] | None = None) -> None:
    write(folder / "sys", {"cgroup.controllers": "cpu memory\n"})
    write(folder / "sys" / path, {**V2, **(changes or {})})


def test_version_2_without_page_cache(tmp_path: Path) -> None:
    v2(tmp_path, "kubepods/pod1/vllm")
    assert found(tmp_path, "0::/kubepods/pod1/vllm\n") == {
        "memory_limit_bytes": 8 * GIB,
        "memory_used_bytes": 4 * GIB,
        "memory_events_total high": 3,
        "memory_events_total max": 12,
        "memory_events_total oom": 2,
        "memory_events_total oom_kill": 1,
        "cpu_limit_cores": 1.5,
        "cpu_throttled_seconds_total": 2.5,
        "cpu_periods_total": 10,
        "cpu_throttled_periods_total": 5,
        "pressure_ratio cpu": 0.425,
    }


def test_version_1_has_other_names_and_no_pressure_of_a_group(tmp_path: Path) -> None:
    files = {str(Path(name).parent / "docker" / "x" / Path(name).name): text for name, text in V1.items()}
    write(tmp_path / "sys", files)
    groups = "5:cpuacct,cpu:/docker/x\n4:memory:/docker/x\n0::/\n"
    assert found(tmp_path, groups, pressure="some avg10=30.00 avg60=0 avg300=0 total=1\n") == {
        "memory_limit_bytes": 8 * GIB,
        "memory_used_bytes": 4 * GIB,
        "memory_events_total max": 12,
        "memory_events_total oom_kill": 1,
        "cpu_limit_cores": 1.5,
        "cpu_throttled_seconds_total": 2.5,
        "cpu_periods_total": 10,
        "cpu_throttled_periods_total": 5,
        "pressure_ratio cpu": 0.3,
    }


def test_without_a_cgroup_only_host_values_are_published(tmp_path: Path) -> None:
    assert found(tmp_path, "") == {"memory_limit_bytes": HOST, "memory_used_bytes": 16384000 * 1024.0}


@pytest.mark.parametrize(
    ("group", "pod", "limit"),
    [
        ({}, {"memory.max": f"{6 * GIB}\n", "memory.current": f"{7 * GIB}\n"}, 6 * GIB),
        ({}, {"memory.max": f"{40 * GIB}\n"}, 8 * GIB),
        ({"memory.max": "max\n"}, {"memory.max": "max\n"}, HOST),
        ({"memory.max": f"{500 * GIB}\n"}, {"memory.max": "max\n"}, HOST),
    ],
    ids=["the pod's", "the container's", "the host's", "a limit above the host's memory"],
)
def test_the_limit_is_the_one_that_leaves_the_least_room(
    tmp_path: Path, group: Mapping[str, str], pod: Mapping[str, str], limit: float
) -> None:
    v2(tmp_path, "pod1", pod)
    v2(tmp_path, "pod1/vllm", group)
    assert found(tmp_path, "0::/pod1/vllm\n")["memory_limit_bytes"] == limit


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    """A tree that is mounted from there on, under a path that counts from the host's top."""
    v2(tmp_path, ".")
    path = "0::/kubepods/pod1/vllm\n"
    assert found(tmp_path, path, ours=path)["memory_limit_bytes"] == 8 * GIB
    assert found(tmp_path, path, ours="0::/kubepods/pod1/exporter\n")["memory_limit_bytes"] == HOST


def test_the_group_of_a_container_beside_ours_is_read_through_its_own_mount(tmp_path: Path) -> None:
    v2(tmp_path, ".", {"memory.max": f"{GIB}\n"})  # that of the exporter's own container
    theirs = tmp_path / "proc" / "7" / "root" / (tmp_path / "sys").relative_to("/")
    write(theirs, V2)
    assert found(tmp_path, "0::/../vllm\n", ours="0::/\n")["memory_limit_bytes"] == 8 * GIB


def test_a_group_without_a_quota_has_no_limit_of_cores(tmp_path: Path) -> None:
    v2(tmp_path, "vllm", {"cpu.max": "max 100000\n"})
    assert "cpu_limit_cores" not in found(tmp_path, "0::/vllm\n")


def test_missing_or_broken_cgroup_file_has_no_sample(tmp_path: Path) -> None:
    broken = {"memory.max": "", "memory.events": "oom_kill\n", "cpu.stat": "x\n", "cpu.max": "", "cpu.pressure": "some"}
    v2(tmp_path, "vllm", broken)
    assert set(found(tmp_path, "0::/vllm\n")) == {"memory_limit_bytes", "memory_used_bytes"}


def test_this_hosts_own_files_are_read_for_a_real_server(tmp_path: Path) -> None:
    with serving(tmp_path, TP2) as fake:
        processes = ProcessCollector(fake.port)
        samples = {(name, *labels): value for name, labels, value in processes.collect().samples}
    used, limit = samples["diag_host_memory_used_bytes",], samples["diag_host_memory_limit_bytes",]
    assert 0 < used < limit <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for family, most in (
        ("resident_memory_bytes", used),
        ("cpu_wait_seconds_total", 3600),
        ("read_bytes_total", 2**40),
    ):
        values = [value for (name, *_), value in samples.items() if name == f"diag_vllm_process_{family}"]
        assert len(values) == len(processes.owners())
        assert all(0 <= value < most for value in values)


ODD = ("\u00b2", "9" * 5000, "abc", "-1", "1 2 3", "\0", "1e5", "0 0", "avg10=", "oom_kill \u00b2")


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("name", [*V2, "memory.high"])
def test_odd_number_in_a_cgroup_file_has_no_sample_and_the_others_stay(name: str, text: str, tmp_path: Path) -> None:
    v2(tmp_path, "vllm", {name: text})
    samples = found(tmp_path, "0::/vllm\n")
    assert all(math.isfinite(value) for value in samples.values())
    assert "memory_limit_bytes" in samples and len(samples) >= 4


@pytest.mark.parametrize("name", [*V1])
def test_odd_number_in_a_cgroup_file_of_version_1_has_no_sample(name: str, tmp_path: Path) -> None:
    write(tmp_path / "sys", {**V1, name: "\u00b2"})
    assert "memory_limit_bytes" in found(tmp_path, "3:memory:/\n2:cpu:/\n")


def test_pipe_in_the_place_of_a_cgroup_file_is_passed_over(tmp_path: Path) -> None:
    v2(tmp_path, "vllm")
    (tmp_path / "sys/vllm/memory.max").unlink()
    os.mkfifo(tmp_path / "sys/vllm/memory.max")
    assert found(tmp_path, "0::/vllm\n")["memory_limit_bytes"] == HOST


def test_odd_numbers_of_a_process_are_missing(tmp_path: Path) -> None:
    process, pid = psutil.Process(), os.getpid()
    stat = "1 (x) S" + " \u00b2" * 40
    write(tmp_path, {f"{pid}/schedstat": "1 x", f"{pid}/io": "read_bytes:", f"{pid}/task/{pid}/stat": stat})
    write(tmp_path, {"vmstat": f"oom_kill {'9' * 5000}\n"})
    entry = table.ProcessEntry(process, 1, 0.0, (f"VLLM::Worker_TP{'9' * 5000}",))
    assert entry.index == {}
    words = entry._words
    table.read_from(str(tmp_path))
    try:
        assert table.oom_kills() is None
        assert (table.whole(words("schedstat"), 1), table.whole(words("io"), 1)) == (None, None)
        assert table.whole(words(f"task/{pid}/stat", after=")"), 7) is None
    finally:
        table.read_from("/proc")
