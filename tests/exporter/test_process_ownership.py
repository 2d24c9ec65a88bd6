"""Several vLLM servers on one host: a process belongs to a server by a proof, or to none."""

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from support.live import server as live
from support.processes import Fake, engine, serving

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.exporter.process import collector
from diag.exporter.process.collector import ProcessCollector
from diag.log.corroboration import Measurement

ORPHANED, STRAY = "diag_vllm_process_orphaned", "diag_vllm_stray_engine"
STARTED = "process_start_time_seconds"


@pytest.fixture(autouse=True)
def _searching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search all processes at every look."""
    monkeypatch.setattr(collector, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(collector, "SEARCH_SHARE", 1000.0)


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def pids(processes: ProcessCollector, family: str) -> set[int]:
    """Return the PIDs of a family's samples that are 1."""
    samples = processes.collect().samples
    return {int(labels[0]) for name, labels, value in samples if name == family and value == 1}


def engine_of(fake: Fake) -> int:
    """Return the PID of the engine, once it has its title."""

    def titled() -> list[int]:
        below = psutil.Process(fake.process.pid).children(recursive=True)
        return [each.pid for each in below if each.cmdline()[:1] == ["VLLM::EngineCore"]]

    until(lambda: bool(titled()))
    return titled()[0]


def writing(log: Path) -> Sequence[str]:
    """Return the words before a command that make it write to a log."""
    return ("bash", "-c", f'exec "$@" > {log}', "-")


def end_api_server(fake: Fake) -> None:
    """Kill it, and bury it, as its supervisor does."""
    fake.process.kill()
    fake.process.wait()


def test_of_three_servers_each_gets_the_engine_that_writes_to_its_log(tmp_path: Path) -> None:
    logs = [tmp_path / f"{name}.log" for name in ("dead", "other", "alive")]
    with ExitStack() as stack:
        dead, other, alive = (stack.enter_context(serving(tmp_path, engine(), before=writing(log))) for log in logs)
        engines = [engine_of(fake) for fake in (dead, other, alive)]
        end_api_server(dead)
        end_api_server(other)
        for at, fake in ((0, dead), (1, other)):
            processes = ProcessCollector(fake.port, log=str(logs[at]))
            until(lambda: pids(processes, ORPHANED) == {engines[at]})  # noqa: B023
            assert engines[1 - at] in pids(processes, STRAY)
            assert engines[2] not in pids(processes, STRAY)
        assert pids(ProcessCollector(alive.port, log=str(logs[2])), ORPHANED) == set()


def test_without_a_proof_an_engine_without_a_server_is_nobodys(tmp_path: Path) -> None:
    with serving(tmp_path, engine()) as other:
        orphan = engine_of(other)
        end_api_server(other)
        processes = ProcessCollector(live.free_port(), log=str(tmp_path / "no such file"))
        until(lambda: orphan in pids(processes, STRAY))
        assert pids(processes, ORPHANED) == set()
        assert orphan not in processes.owners()
        assert "diag_vllm_processes" not in {name for name, *_ in processes.collect().samples}


def test_a_log_to_which_another_server_writes_too_proves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "shared.log"
    with (
        serving(tmp_path, engine(), before=writing(log)) as one,
        serving(tmp_path, engine(), before=writing(log)) as two,
    ):
        orphan = engine_of(two)
        engine_of(one)
        end_api_server(two)
        processes = ProcessCollector(live.free_port(), log=str(log))
        until(lambda: orphan in pids(processes, STRAY))
        assert pids(processes, ORPHANED) == set()


def test_an_engine_that_holds_the_socket_of_the_port_is_this_servers(tmp_path: Path) -> None:
    with serving(tmp_path, engine(), method="fork") as fake:
        orphan = engine_of(fake)
        end_api_server(fake)
        processes = ProcessCollector(fake.port)
        until(lambda: pids(processes, ORPHANED) == {orphan})
        assert processes.server_pid() is None


def test_an_engine_in_the_session_of_a_command_for_the_port_is_this_servers(tmp_path: Path) -> None:
    with serving(tmp_path, engine(), before=("bash", "-c", '"$@"; sleep 600; true', "-")) as fake:
        orphan = engine_of(fake)
        (api_server,) = psutil.Process(fake.process.pid).children()
        api_server.kill()
        processes = ProcessCollector(fake.port)
        until(lambda: pids(processes, ORPHANED) == {orphan})
        assert pids(ProcessCollector(live.free_port()), ORPHANED) == set()


def page(started: float) -> Measurement:
    return Measurement(time.time(), page=True, answers=True, started={STARTED: started})


def test_a_server_whose_command_names_the_port_is_another_ones_if_the_page_was_started_at_another_time(
    tmp_path: Path,
) -> None:
    """In another container, for example: it comes and goes while the page answers."""
    with serving(tmp_path, engine(), port=0) as fake:
        engine_of(fake)
        time.sleep(1.5)
        started = psutil.Process(fake.process.pid).create_time()
        processes = ProcessCollector(fake.port, log="")
        processes.page(page(started))
        until(lambda: len(processes.collect().samples) > 0 and len(processes.owners()) == 2)
        processes.page(page(started - 3600))
        assert "is another server's" in processes.collect().problem
        assert not processes.owners()
        os.killpg(fake.process.pid, signal.SIGKILL)
        fake.process.wait()
        assert "diag_vllm_processes" not in {name for name, *_ in processes.collect().samples}


def test_a_server_that_starts_after_the_last_page_is_this_ones_restart(tmp_path: Path) -> None:
    port = live.free_port()
    processes = ProcessCollector(port)
    processes.page(page(time.time() - 3600))
    with serving(tmp_path, engine(), flags=["--port", str(port)], port=0) as fake:
        until(lambda: bool(processes.collect()) and processes.server_pid() == fake.process.pid)


def test_a_program_that_listens_and_is_the_parent_of_servers_is_none(tmp_path: Path) -> None:
    """A gateway in front of the servers that it starts, as the tests' own process is here."""
    with socket.create_server(("127.0.0.1", 0)) as gateway, serving(tmp_path, engine()) as fake:
        engine_of(fake)
        processes = ProcessCollector(gateway.getsockname()[1])
        processes.collect()
        assert processes.server_pid() is None
        assert not processes.owners()


def test_a_look_at_a_server_that_left_its_engine_behind_ends_with_the_scrape_that_proves_it(tmp_path: Path) -> None:
    """The refused page alone would say after two scrapes that the server is dead."""
    log = tmp_path / "vllm.log"
    with serving(tmp_path, engine(), log=log) as fake:
        engine_of(fake)
        fake.process.kill()
        fake.process.wait()
        report = doctor.run(ObserveOptions((f"127.0.0.1:{fake.port}",), log=str(log), every=0.2))
    assert [found.diagnosis.incident.id for found in report.present if found.diagnosis.primary] == ["engine_orphaned"]
    assert report.observed.scrapes == 3
