"""vLLM's processes: real ones, played by `fake_vllm.py`, and those of a real vLLM."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.live import server as live
from support.processes import TP2, engine, serving
from support.sampling import THOROUGH

from diag.core.metric_families import families
from diag.exporter.process import collector, table
from diag.exporter.process.collector import ProcessCollector, children
from diag.exporter.process.server import Owner, find_server
from diag.exporter.process.table import ProcessEntry
from diag.exposition import render

CPU = "diag_vllm_process_cpu_seconds_total"
CHILDREN = "diag_vllm_process_children_cpu_seconds_total"
FAULTS = "diag_vllm_process_page_faults_total"
STOPPED = "diag_vllm_process_stopped"
PROCESSES = "diag_vllm_processes"
RESIDENT = "diag_vllm_process_resident_memory_bytes"
READS = "diag_vllm_process_read_bytes_total"


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def seen(processes: ProcessCollector, *expected: tuple[str, str]) -> dict[tuple[str, str], int]:
    """Look until these are the roles and ranks; their PIDs."""

    def holds() -> bool:
        found.extend(((owner.role, owner.rank), pid) for pid, owner in looked(processes).items())
        return sorted(each for each, _ in found) == sorted(expected) or found.clear()

    found: list[tuple[tuple[str, str], int]] = []
    try:
        until(lambda: bool(holds()))
    except AssertionError:
        assert sorted((each.role, each.rank) for each in looked(processes).values()) == sorted(expected)
    return dict(found)


def looked(processes: ProcessCollector) -> dict[int, Owner]:
    processes.collect()
    return dict(processes.owners())


def values(processes: ProcessCollector, family: str) -> dict[int, float]:
    return {int(labels[0]): value for name, labels, value in processes.collect().samples if name == family}


@pytest.fixture
def _searching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search all processes at every look."""
    monkeypatch.setattr(collector, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(collector, "SEARCH_SHARE", float("inf"))


SERVER, ENGINE = ("api_server", "0"), ("engine", "0")
RANKS = [("worker", "0"), ("worker", "1")]
WHOLE = [SERVER, ENGINE, *RANKS]


# Which processes


def test_roles_are_derived_from_process_titles(tmp_path: Path) -> None:
    with serving(tmp_path, TP2) as fake:
        processes = ProcessCollector(fake.port)
        pids = seen(processes, *WHOLE)
        assert pids[SERVER] == processes.server_pid() == fake.process.pid
        assert psutil.Process(pids["worker", "1"]).cmdline()[0] == "VLLM::Worker_TP1"


def test_the_samples_are_those_of_the_contract(tmp_path: Path) -> None:
    with serving(tmp_path, engine("VLLM::Worker")) as fake:
        processes = ProcessCollector(fake.port)
        pids = seen(processes, SERVER, ENGINE, ("worker", "0"))
        collected = processes.collect()
        assert collected.problem == ""
        assert all(len(labels) == len(families()[name].labels) for name, labels, _ in collected.samples)
        page = render(collected.samples).decode()
        assert f'{STOPPED}{{pid="{pids["worker", "0"]}",rank="0",role="worker"}} 0.0' in page
        assert page.count(f"\n{CPU}{{") == page.count(f"\n{STOPPED}{{") == 3


@pytest.mark.parametrize(
    ("titles", "ranks"),
    [
        (["Worker"], ["0"]),
        (["Worker", "Worker"], ["", ""]),  # before they know their groups
        (["Worker_TP0_EP0", "Worker_TP1_EP1"], ["0", "1"]),
        (["Worker_TP1"], ["1"]),  # of an engine on two hosts
        (["Worker_PP0", "Worker_PP1"], ["0", "1"]),
        (["Worker_PP0_TP0", "Worker_PP0_TP1", "Worker_PP1_TP0", "Worker_PP1_TP1"], ["0", "1", "2", "3"]),
        (["Worker_PP1_PCP1_TP1_DCP1", "Worker_PP0_PCP0_TP0_DCP0"], ["7", "0"]),
    ],
)
def test_a_rank_is_the_number_of_the_worker_in_its_engine(tmp_path: Path, titles: list[str], ranks: list[str]) -> None:
    with serving(tmp_path, engine(*(f"VLLM::{each}" for each in titles))) as fake:
        processes = ProcessCollector(fake.port)
        seen(processes, SERVER, ENGINE, *(("worker", rank) for rank in ranks))
        owners = processes.owners().items()
        named = [(psutil.Process(pid).cmdline()[0], owner.rank) for pid, owner in owners if owner.role == "worker"]
        assert sorted(named) == sorted(zip((f"VLLM::{each}" for each in titles), ranks, strict=True))


def test_rank_includes_the_engine_with_data_parallelism(tmp_path: Path) -> None:
    engines = [
        engine("VLLM::Worker_DP0_TP0_EP0", "VLLM::Worker_DP0_TP1_EP1", title="VLLM::EngineCore_DP0"),
        engine("VLLM::Worker_TP0", "VLLM::Worker_TP1", title="VLLM::EngineCore_DP1"),
    ]
    with serving(tmp_path, *engines, {"title": "VLLM::DPCoordinator"}) as fake:
        workers = [("worker", rank) for rank in ("0.0", "0.1", "1.0", "1.1")]
        seen(ProcessCollector(fake.port), SERVER, ("engine", "0"), ("engine", "1"), *workers)


def test_several_api_servers_belong_to_the_process_that_started_them(tmp_path: Path) -> None:
    children = [{"title": "VLLM::APIServer_0"}, {"title": "VLLM::APIServer_1"}, engine("VLLM::Worker")]
    with serving(tmp_path, *children, method="fork") as fake:  # which all have the socket
        processes = ProcessCollector(fake.port)
        seen(processes, ("api_server", ""), SERVER, ("api_server", "1"), ENGINE, ("worker", "0"))
        assert processes.server_pid() == fake.process.pid


def test_an_engine_that_does_its_work_itself_is_no_worker(tmp_path: Path) -> None:
    with serving(tmp_path, engine(title="VLLM::EngineCore_0")) as fake:
        seen(ProcessCollector(fake.port), SERVER, ENGINE)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_roles_without_titles_are_derived_from_depth(tmp_path: Path, method: str) -> None:
    with serving(tmp_path, {"children": [{}, {}], "reap": True}, method=method) as fake:
        processes = ProcessCollector(fake.port)
        pids = seen(processes, SERVER, ENGINE, ("worker", ""), ("worker", ""))
        os.kill(pids["worker", ""], signal.SIGKILL)
        seen(processes, SERVER, ENGINE, ("worker", ""))  # and does not become the only one


def test_other_child_processes_have_no_role(tmp_path: Path) -> None:
    with serving(tmp_path, {"title": "VLLM::EngineCore", "children": [{"title": "/usr/bin/ptxas"}]}) as fake:
        processes = ProcessCollector(fake.port)
        seen(processes, SERVER, ENGINE)
        until(lambda: len(fake.pids()) == 4)  # with the tracker of multiprocessing's resources
        seen(processes, SERVER, ENGINE)


def test_cpu_time_of_a_compiler_is_attributed_to_its_engine(tmp_path: Path) -> None:
    compiler = {"title": "/usr/bin/ptxas", "spin": True}
    with serving(tmp_path, {"title": "VLLM::EngineCore", "children": [compiler], "reap": True}) as fake:
        processes = ProcessCollector(fake.port)
        pid = seen(processes, SERVER, ENGINE)[ENGINE]
        until(lambda: values(processes, CHILDREN)[pid] > 0.5)
        for child in psutil.Process(pid).children():
            child.kill()
        until(lambda: not psutil.Process(pid).children())
        assert values(processes, CHILDREN)[pid] > 0.5
        assert values(processes, FAULTS)[pid] > 0


def test_a_title_that_is_set_later_is_read(tmp_path: Path) -> None:
    with serving(tmp_path, TP2, ready=False) as fake:
        processes = ProcessCollector(fake.port)
        seen(processes, SERVER, ENGINE, ("worker", ""), ("worker", ""))
        fake.wait.touch()
        seen(processes, *WHOLE)


def test_title_of_a_known_process_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, TP2, ready=False) as fake:
        processes = ProcessCollector(fake.port)
        seen(processes, SERVER, ENGINE, ("worker", ""), ("worker", ""))
        monkeypatch.setattr(table, "YOUNG", 0.0)
        fake.wait.touch()
        until(lambda: {psutil.Process(pid).cmdline()[0] for pid in fake.pids()} >= {"VLLM::Worker_TP0"})
        assert sorted(each.rank for each in looked(processes).values()) == ["", "", "0", "0"]


# Which server


def test_each_of_two_servers_has_its_own_processes(tmp_path: Path) -> None:
    with serving(tmp_path, TP2) as one, serving(tmp_path, engine("VLLM::Worker")) as other:
        first, second = ProcessCollector(one.port), ProcessCollector(other.port)
        assert seen(first, *WHOLE)[SERVER] == one.process.pid
        assert seen(second, SERVER, ENGINE, ("worker", "0"))[SERVER] == other.process.pid
        assert not first.owners().keys() & second.owners().keys()


def test_before_the_port_is_open_the_command_line_tells(tmp_path: Path) -> None:
    with serving(tmp_path, TP2, ready=False) as fake, serving(tmp_path, TP2) as other:
        processes, started = ProcessCollector(fake.port), psutil.Process(fake.process.pid).create_time()
        seen(processes, SERVER, ENGINE, ("worker", ""), ("worker", ""))
        assert (processes.server_pid(), processes.started()) == (fake.process.pid, started)
        assert other.process.pid not in processes.owners()


LISTENS = "import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(flush=True); time.sleep(600)"


@contextmanager
def another_program(port: int) -> Iterator[None]:
    """Listens there, and is no ancestor of the server as the tests' own process is."""
    command = [sys.executable, "-c", LISTENS.format(port=port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout and program.stdout.readline()
        yield
        program.kill()


def test_another_program_in_front_of_the_port_is_not_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, TP2, port=0) as fake, another_program(fake.port):
        assert seen(ProcessCollector(fake.port), *WHOLE)[SERVER] == fake.process.pid


def test_server_with_its_port_in_a_config_file_is_found_by_its_open_port(tmp_path: Path) -> None:
    with serving(tmp_path, TP2, flags=["--config", "vllm.yaml"]) as fake:
        until(lambda: bool(table.listeners(fake.port)))
        seen(ProcessCollector(fake.port), *WHOLE)


@pytest.mark.usefixtures("_searching")
def test_a_program_that_embeds_vllm_is_found_by_its_port_and_its_engine(tmp_path: Path) -> None:
    with serving(tmp_path, TP2, title="python my_own_server.py") as fake:
        until(lambda: bool(table.listeners(fake.port)))
        pids = seen(ProcessCollector(fake.port), *WHOLE)
        assert pids[SERVER] == fake.process.pid


@pytest.mark.usefixtures("_searching")
def test_one_of_several_servers_under_a_supervisor_is_left_once_its_port_is_open(tmp_path: Path) -> None:
    ports = [live.free_port(), live.free_port()]
    servers = [
        {"title": f"VLLM::APIServer_DP{i}", "port": port, "children": [engine(f"VLLM::Worker_DP{i}")]}
        for i, port in enumerate(ports)
    ]
    with serving(tmp_path, *servers, ready=False, flags=["--port", str(ports[0])], port=0) as fake:
        processes = ProcessCollector(ports[0])
        until(lambda: len(looked(processes)) == 5)
        fake.wait.touch()
        seen(processes, SERVER, ENGINE, ("worker", "0.0"))
        assert processes.server_pid() != fake.process.pid
        assert processes.launch().endswith(f"serve model --port {ports[0]}")


def test_a_server_that_was_seen_before_it_ran_vllm_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between fork and exec a process has another command line, and all processes are searched only now and then."""
    monkeypatch.setattr(collector, "SEARCH_SECONDS", float("inf"))
    port = live.free_port()
    processes = ProcessCollector(port)
    assert not looked(processes)
    shell = ("bash", "-c", 'sleep 0.5; exec "$@"', "-")
    with serving(tmp_path, TP2, flags=["--port", str(port)], port=port, before=shell) as fake:
        assert not looked(processes)
        seen(processes, *WHOLE)
        assert processes.server_pid() == fake.process.pid


@pytest.mark.parametrize("buried", [True, False])
def test_a_server_that_starts_again_is_found_and_what_outlived_the_first_is_kept(tmp_path: Path, buried: bool) -> None:
    with serving(tmp_path, TP2) as first:
        processes = ProcessCollector(first.port)
        old = seen(processes, *WHOLE)
        first.process.kill()
        if buried:
            first.process.wait()
            seen(processes, ENGINE, *RANKS)
        until(lambda: not looked(processes) or processes.server_pid() is None)
        assert (processes.launch(), processes.collect().problem) == ("", "")
        with serving(tmp_path, TP2, flags=["--port", str(first.port)], port=first.port) as second:
            until(lambda: len(looked(processes)) == 8 - buried)
            assert processes.server_pid() == second.process.pid
            new = {owner for pid, owner in processes.owners().items() if pid in second.pids()}
            assert new == {Owner(*each) for each in WHOLE}
            assert set(old.values()) - {old[SERVER]} < processes.owners().keys()


ORPHANED = "diag_vllm_process_orphaned"


@pytest.mark.usefixtures("_searching")
@pytest.mark.parametrize("buried", [True, False])
def test_an_engine_that_outlives_its_api_server_is_an_orphan(tmp_path: Path, buried: bool) -> None:
    with serving(tmp_path, TP2) as fake:
        before = ProcessCollector(fake.port)
        pid = seen(before, *WHOLE)[ENGINE]
        assert values(before, ORPHANED) == {pid: 0} and not before.serves_nobody()
        fake.process.kill()
        if buried:
            fake.process.wait()
        until(lambda: values(before, ORPHANED) == {pid: 1})
        assert before.serves_nobody()
        counted = {labels[0]: value for name, labels, value in before.collect().samples if name == PROCESSES}
        assert (counted["api_server"], counted["engine"]) == (0, 0)
        afterwards = ProcessCollector(live.free_port())  # has never seen the server, so it may be any other's
        assert pid not in values(afterwards, ORPHANED)
        with serving(tmp_path, TP2, flags=["--port", str(fake.port)], port=fake.port) as again:
            until(lambda: sorted(values(before, ORPHANED).values()) == [0, 1])
            assert before.server_pid() == again.process.pid and not before.serves_nobody()


@pytest.mark.usefixtures("_searching")
def test_the_engine_of_a_script_or_of_another_server_is_no_orphan(tmp_path: Path) -> None:
    with serving(tmp_path, TP2, flags=["--port", "1"], title="python batch.py") as script, serving(tmp_path, TP2) as it:
        processes = ProcessCollector(live.free_port())
        engines = {pid for fake in (script, it) for pid in fake.pids()}
        until(lambda: all(len(fake.pids()) >= 4 for fake in (script, it)))
        assert not engines & values(processes, ORPHANED).keys()


def test_surviving_child_is_not_taken_for_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, {"children": [{}]}, method="fork") as fake:  # all with the command line of the server
        processes = ProcessCollector(fake.port)
        seen(processes, SERVER, ENGINE, ("worker", "0"))
        fake.process.kill()
        fake.process.wait()
        seen(processes, ENGINE, ("worker", "0"))
        assert processes.server_pid() is None


def test_a_parent_is_older_than_its_child() -> None:
    server, stranger = ProcessEntry(psutil.Process(), 1, 10.0, ()), ProcessEntry(psutil.Process(), 4, 9.0, ())
    child = ProcessEntry(psutil.Process(), 4, 10.0, ())
    assert children({4: server, 5: stranger, 6: child}, {4: server}) == {6: child}


COMMANDS = [
    ("/usr/bin/python3 /usr/local/bin/vllm serve model", 8000),
    ("python3 -m vllm.entrypoints.openai.api_server --model m", 8000),
    ("/venv/bin/python3.12 -u -X faulthandler -m vllm.entrypoints.openai.api_server --port=81 --port 9001", 9001),
    ("python -O -W ignore -m vllm.entrypoints.cli.main serve model --port=9001", 9001),
    ("python /opt/vllm/entrypoints/openai/api_server.py --port 9001", 9001),
    ("vllm serve model --port 9001 --config c.yaml", 9001),
    ("vllm serve model --config=c.yaml", None),
    ("vllm serve model --config-format hf", 8000),
    ("vllm bench serve --port 8000", None),
    ("vllm serve model --port", None),
    ("docker run vllm/vllm-openai vllm serve model", None),
    ("uv run vllm serve model", None),
    ("python -c print() vllm serve", None),
    ("python client.py vllm serve", None),
    ("grep vllm.entrypoints.openai.api_server", None),
]


@pytest.mark.parametrize(("command", "port"), COMMANDS)
def test_a_command_line_tells_the_port(command: str, port: int | None) -> None:
    processes = {4: ProcessEntry(psutil.Process(), 1, 0.0, tuple(command.split()))}
    found = [asked for asked in (8000, 9001) if find_server(processes, asked, {}, ())[0]]
    assert found == ([port] if port else [])


def test_two_that_claim_the_same_port_are_not_guessed_between() -> None:
    one = ProcessEntry(psutil.Process(), 1, 0.0, ("vllm", "serve", "model"))
    found, problem = find_server({4: one, 5: one}, 8000, {}, ())
    assert found is None
    assert problem.startswith("more than one vLLM process serves port 8000")
    child = ProcessEntry(psutil.Process(), 4, 0.0, ("vllm", "serve", "model"))
    assert getattr(find_server({4: one, 5: child}, 8000, {}, ())[0], "pid", 0) == 4


def test_without_a_port_the_only_server_is_meant() -> None:
    one = ProcessEntry(psutil.Process(), 1, 0.0, ("vllm", "serve", "model", "--port", "1"))
    assert find_server({4: one}, None, {}, ())[0]
    assert find_server({}, None, {}, ())[1].startswith("no vLLM process is visible that serves: in a container")


def test_no_server_process_is_found() -> None:
    port = live.free_port()
    processes = ProcessCollector(port)
    told = f"no vLLM process is visible that serves port {port}: in a container share the PID namespace "
    for _ in range(2):
        collected = processes.collect()
        assert not [name for name, *_ in collected.samples if not name.startswith(("diag_host_", "diag_vllm_stray"))]
        assert collected.problem == told + "(shareProcessNamespace, --pid=host)"
    assert (processes.owners(), processes.launch(), processes.visible(), processes.started()) == ({}, "", None, None)


def test_alternative_proc_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", "/proc")  # which is put back in the end
    proc = tmp_path / "proc"
    proc.mkdir()
    for each in ("1", "stat", "net"):
        (proc / each).symlink_to(f"/proc/{each}")
    with serving(tmp_path, TP2) as fake:
        seen(ProcessCollector(fake.port), *WHOLE)
        assert ProcessCollector(fake.port, proc=str(proc)).collect().problem.startswith("no vLLM process is visible")


# Who is stopped, who computes, who ends


def test_a_stopped_worker_stands_still_while_its_peer_spins(tmp_path: Path) -> None:
    with serving(tmp_path, engine("VLLM::Worker_TP0", "VLLM::Worker_TP1", spin=True)) as fake:
        processes = ProcessCollector(fake.port)
        pids = seen(processes, *WHOLE)
        spinning, stopped = pids["worker", "0"], pids["worker", "1"]
        until(lambda: min(psutil.Process(stopped).cpu_times()[:2]) > 0)
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: values(processes, STOPPED)[stopped] == 1)
        before = values(processes, CPU)
        until(lambda: values(processes, CPU)[spinning] > before[spinning] + 0.3)
        times = psutil.Process(stopped).cpu_times()
        assert values(processes, CPU)[stopped] == before[stopped] == times.user + times.system
        assert [pid for pid, value in values(processes, STOPPED).items() if value] == [stopped]
        os.kill(stopped, signal.SIGCONT)
        until(lambda: values(processes, CPU)[stopped] > before[stopped] and not values(processes, STOPPED)[stopped])


def test_zombie_worker_counts_as_stopped(tmp_path: Path) -> None:
    with serving(tmp_path, TP2) as fake:
        processes = ProcessCollector(fake.port)
        pids = seen(processes, *WHOLE)
        os.kill(pids["worker", "1"], signal.SIGKILL)
        until(lambda: values(processes, STOPPED)[pids["worker", "1"]] == 1)
        assert processes.owners()[pids["worker", "1"]] == Owner("worker", "1")


def test_oom_kill_is_dated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dated(count: int) -> float:
        (tmp_path / "vmstat").write_text(f"nr_free_pages 7\noom_kill {count}\n")
        samples = {name: value for name, _, value in processes.collect().samples}
        assert samples["diag_host_oom_kills_total"] == count
        return samples["diag_host_last_oom_kill_timestamp_seconds"]

    monkeypatch.setattr(table, "VMSTAT", f"..{tmp_path}/vmstat")
    monkeypatch.setattr(collector, "last_vllm_kill", lambda: 0.0)
    processes = ProcessCollector(8000)
    assert dated(3) == dated(3) == 0  # it was so before
    grown = dated(4)
    assert time.time() - 60 < grown == dated(4)


@pytest.mark.usefixtures("_searching")
def test_processes_are_counted_by_role_also_once_none_is_left(tmp_path: Path) -> None:
    def counted() -> dict[str, float]:
        samples = processes.collect().samples
        return {labels[0]: value for name, labels, value in samples if name == "diag_vllm_processes"}

    with serving(tmp_path, TP2) as fake:
        processes = ProcessCollector(fake.port)
        assert counted().get("engine") != 0  # nothing is known of an engine that was never seen
        pids = seen(processes, *WHOLE)
        assert counted() == {"api_server": 1, "engine": 1, "worker": 2}
        os.kill(pids[ENGINE], signal.SIGKILL)  # nobody buries it
        until(lambda: counted()["engine"] == 0)
        assert counted()["api_server"] == 1
        fake.process.kill()
        fake.process.wait()
        until(lambda: counted() == {"api_server": 0, "engine": 0, "worker": 2})  # two have outlived it
        with serving(tmp_path, flags=["--port", str(fake.port)], port=fake.port):
            until(lambda: counted() == {"api_server": 1, "worker": 2})


@pytest.mark.usefixtures("_searching")
def test_a_server_that_ended_before_its_engine_was_seen_has_none(tmp_path: Path) -> None:
    def counted() -> dict[str, float]:
        samples = processes.collect().samples
        return {labels[0]: value for name, labels, value in samples if name == "diag_vllm_processes"}

    with serving(tmp_path) as fake:
        processes = ProcessCollector(fake.port)
        until(lambda: counted() == {"api_server": 1})
        fake.process.kill()  # nobody buries it
        until(lambda: counted() == {"api_server": 0, "engine": 0})


def test_a_worker_that_ended_vanishes_and_the_others_keep_their_ranks(tmp_path: Path) -> None:
    workers = [f"VLLM::Worker_PP{pp}_TP{tp}" for pp in (0, 1) for tp in (0, 1)]
    with serving(tmp_path, {**engine(*workers), "reap": True}) as fake:
        processes = ProcessCollector(fake.port)
        pids = seen(processes, SERVER, ENGINE, *(("worker", str(rank)) for rank in range(4)))
        for rank in ("1", "3"):
            os.kill(pids["worker", rank], signal.SIGKILL)
        left = seen(processes, SERVER, ENGINE, ("worker", "0"), ("worker", "2"))
        assert left["worker", "2"] == pids["worker", "2"]


def test_a_pid_that_came_again_is_another_process(tmp_path: Path) -> None:
    with serving(tmp_path, TP2) as fake:
        processes = ProcessCollector(fake.port)
        pids = seen(processes, *WHOLE)
        stranger = subprocess.Popen(["sleep", "60"])
        try:
            _came_again(processes, pids["worker", "1"], stranger.pid)
            assert stranger.pid in processes.owners()
            assert looked(processes).keys() == set(pids.values())
        finally:
            stranger.kill()
            stranger.wait()


def _came_again(processes: ProcessCollector, ended: int, stranger: int) -> None:
    """Let a worker end that had the stranger's PID."""
    view = processes._view
    worker = psutil.Process(stranger)
    worker._ident = (stranger, 1.0)  # by which psutil tells them apart
    gone = replace(view.members[ended], process=worker)
    members, owners = {**view.members, stranger: gone}, {**view.owners, stranger: view.owners[ended]}
    processes._view = replace(view, members=members, owners=owners, table={**view.table, stranger: gone})


def test_processes_that_end_during_a_look_do_no_harm(tmp_path: Path) -> None:
    with serving(tmp_path, TP2) as fake:
        processes = ProcessCollector(fake.port)
        pids = seen(processes, *WHOLE)
        stop = threading.Event()
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(_short_lives, stop) for _ in range(4)]
            looks = [looked(processes) for _ in range(300 if THOROUGH else 60)]
            fresh = [looked(ProcessCollector(fake.port)) for _ in range(10 if THOROUGH else 3)]
            stop.set()
        assert sum(each.result() for each in running) > len(looks) / 6
        assert all(each.keys() == set(pids.values()) for each in looks + fresh)


def _short_lives(stop: threading.Event) -> int:
    count = 0
    while not stop.is_set():
        subprocess.run(["true"], check=True)
        count += 1
    return count


def test_concurrent_reads_during_a_scan_are_safe(tmp_path: Path) -> None:
    with serving(tmp_path, TP2) as fake:
        seen(ProcessCollector(fake.port), *WHOLE)
        for _ in range(5):
            processes = ProcessCollector(fake.port)
            with ThreadPoolExecutor(8) as pool:
                answers = [pool.submit(processes.owners) for _ in range(8)]
                pool.submit(processes.collect)
            assert {frozenset(each.result().items()) for each in answers} == {frozenset(processes.owners().items())}
            assert len(processes.owners()) == 4


# The command


def test_command_is_published_with_its_environment_settings(tmp_path: Path) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "NCCL_P2P_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    with serving(tmp_path, TP2, environment=environment) as fake:
        processes = ProcessCollector(fake.port)
        seen(processes, *WHOLE)
        words = processes.launch().split()
        assert {"VLLM_CPU_OMP_THREADS_BIND='0|1'", "NCCL_P2P_DISABLE=1", "CUDA_VISIBLE_DEVICES=2,3"} < set(words)
        assert words[-4:] == ["serve", "model", "--port", str(fake.port)]
        assert "FAKE_VLLM" not in processes.launch()
        assert processes.visible() == "2,3"


def test_only_secret_variables_that_a_relaunch_needs_are_named(tmp_path: Path) -> None:
    flags = ["--api-key", "sk-11111111hush", "second-hush", "--hf-token=hf_3333hush", "--port"]
    environment = {
        "VLLM_API_KEY": "hush",
        "VLLM_HTTP_TOKEN": "hush",
        "HF_TOKEN": "hush",
        "VLLM_PROXY": "http://me:hush@proxy",
        "VLLM_SERVICE_HOST": "hush",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    with serving(tmp_path, TP2, flags=flags, environment=environment) as fake:
        until(lambda: bool(table.listeners(fake.port)))
        launch = ProcessCollector(fake.port).launch()
        assert "CUDA_VISIBLE_DEVICES=0" in launch
        assert "VLLM_PROXY" not in launch
        assert '--api-key "${VLLM_API_KEY:?}" "${VLLM_API_KEY_2:?}" --hf-token="${HF_TOKEN:?}" --port' in launch
        assert "hush" not in launch
        assert launch.startswith('VLLM_API_KEY="${VLLM_API_KEY:?}" HF_TOKEN="${HF_TOKEN:?}" ')
        assert "VLLM_HTTP_TOKEN" not in launch


def test_unreadable_process_lacks_only_environment_and_disk_reads(tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    with serving(tmp_path, TP2, environment=environment, hidden=True) as fake:
        seen(ProcessCollector(fake.port), *WHOLE)
        launch, visible, stopped, resident, reads = _as_somebody_else(fake.port)
        assert visible is None
        assert launch.endswith(f"serve model --port {fake.port}")
        assert "CUDA" not in launch
        assert (len(stopped), len(resident), reads) == (4, 4, {})


def _as_somebody_else(port: int) -> Any:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_look_as_nobody, args=(port, theirs))
    child.start()
    assert ours.poll(30)
    child.join()
    return ours.recv()


def _look_as_nobody(port: int, theirs: Any) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    processes = ProcessCollector(port)
    found = (values(processes, family) for family in (STOPPED, RESIDENT, READS))
    theirs.send((processes.launch(), processes.visible(), *found))


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path(sys.executable).with_name("py-spy").exists(),
    reason="needs root, to give up its rights, and py-spy",
)
@pytest.mark.parametrize("may_read", [True, False])
def test_without_the_right_to_read_a_process_its_stack_is_replaced_by_the_reason(may_read: bool) -> None:
    code = "from sys import argv; from diag.exporter.process import stacks, server\n"
    code += "(seen,) = stacks.take({int(argv[1]): server.Owner('worker', '0')}); print(len(seen.frames), seen.problem)"
    rights = [] if may_read else ["setpriv", "--bounding-set=-sys_ptrace"]
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as read:
        assert read.stdout and read.stdout.readline()
        command = [*rights, sys.executable, "-c", code, str(read.pid)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        read.kill()
    lacking = "0 this user may not read its memory: run diag as the server's user or as root (CAP_SYS_PTRACE)"
    assert answer.strip() == ("1" if may_read else lacking)
