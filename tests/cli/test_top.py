"""`diag top` over live servers: one that hangs holds up nothing, memory is bounded, what it keeps is recorded."""

import os
import pty
import re
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.bad_servers import Reply, Request, serving
from support.cli import diag
from support.exporter_server import listening, vllms_page
from support.live.server import free_port
from support.paths import RECORDINGS, ROOT
from support.processes import serving as vllm_processes
from support.top_views import press, run, screen, shown, until

from diag.commands import top
from diag.commands.exporter import ReplayedServer
from diag.commands.observe import ObserveOptions
from diag.commands.top import make_app, on_this_host
from diag.core.errors import BadUsage
from diag.exporter.process.server import find_local_servers
from diag.exposition import scrapes
from diag.exposition.scrapes import Target
from diag.sources.recording.reader import Replay, read, read_pages
from diag.top.frame import PageMemory

CASCADE = RECORDINGS / "kv_cascade"


@contextmanager
def cascade() -> Iterator[str]:
    """The URL of a cascade that is replayed in this process."""
    recorded = read_pages(CASCADE)
    (name, kept), *_ = recorded.scrapes.items()
    with listening(answering=ReplayedServer(Replay(kept, time.time(), 1.0, True), recorded.facts[name])) as url:
        yield url


@contextmanager
def hanging() -> Iterator[str]:
    """The URL of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_hangs_holds_up_neither_the_view_nor_the_others_and_a_recording_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(live: str, stuck: str) -> None:
        feed = make_app(ObserveOptions([live, stuck], every=0.5, timeout=60.0)).feed
        async with shown(feed) as (app, pilot):
            await until(pilot, lambda: app.frame and "running" in app.frame.rows[0].values)
            lines = await press(pilot, "s")
            assert "1 server: 1 unknown" in lines[2]
            assert lines[5].split()[0] == live.removeprefix("http://")
            monkeypatch.chdir(tmp_path)
            await press(pilot, "r", shows="scrapes recorded")

    with cascade() as live, hanging() as stuck:
        run(look(live, stuck))
    (folder,) = tmp_path.iterdir()
    recorded = read(folder)
    assert recorded.scrapes >= 2
    assert recorded.versions == {recorded.instances[0]: "0.32.0"}


def test_a_server_that_is_lost_stays_in_the_view() -> None:
    def answer(request: Request) -> Reply | None:
        return Reply(vllms_page()) if request.count < 3 else None

    async def look(url: str) -> None:
        async with shown(make_app(ObserveOptions([url], every=0.5, timeout=1.0)).feed) as (app, pilot):
            await until(pilot, lambda: app.frame and app.frame.report.observed.failed_scrapes)
            assert "unknown" in screen(app)[5]

    with serving(answer) as server:
        run(look(server.url))


def test_a_log_is_read_again_and_again(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("OSError: You are trying to access a gated repo.\n", encoding="utf-8")

    async def look() -> None:
        async with shown(make_app(ObserveOptions([str(log)])).feed) as (app, _):
            assert app.frame is not None
            assert app.frame.report.verdict == "critical"
            assert any("startup_failed" in line for line in screen(app))

    run(look())


def test_view_without_servers_ends_with_the_doctors_error() -> None:
    async def look(url: str) -> None:
        app = make_app(ObserveOptions([url], every=0.5, timeout=0.5))
        async with app.run_test() as pilot:
            await until(pilot, lambda: app.feed.failed)
        assert "refused" in str(app.feed.failed)

    run(look(f"http://127.0.0.1:{free_port()}"))


def test_kept_samples_are_bounded_in_time_and_bytes() -> None:
    memory = PageMemory(seconds=10, most_bytes=10_000)
    for at in range(100):
        memory.page(1000 * at, "a:1", b"x 1\n")
    assert len(memory._kept) == 11
    for at in range(100, 103):
        memory.page(1000 * at, "a:1", os.urandom(6_000))
    assert len(memory._kept) == 1
    with pytest.raises(BadUsage, match="nothing was scraped yet"):
        PageMemory(10).write(Path("nowhere"), {}, (), 5.0)


def test_scrapes_that_are_forgotten_take_their_series_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes, "FEW_SERIES", 10)
    target = Target("a:1")
    for at in range(100):
        target.add(at, b'x 7\nvllm:y{adapter="%d"} %d\n' % (at, at))
        target.forget(at - 2)
    table = target.table()
    assert len(table.labels) < 20
    rows = zip(table.labels, table.values, strict=True)
    by_adapter = {labels["adapter"]: row for labels, row in rows if "adapter" in labels}
    assert [by_adapter["97"][0], by_adapter["98"][1], by_adapter["99"][2]] == [97, 98, 99]


def test_without_arguments_the_servers_on_this_host_are_shown(tmp_path: Path) -> None:
    with vllm_processes(tmp_path) as fake:
        assert f"http://127.0.0.1:{fake.port}" in find_local_servers()
        assert f"http://127.0.0.1:{fake.port}" in on_this_host(ObserveOptions([""])).targets


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("tests/recordings/kv_cascade",), "a recording does not change"),
        (("--prometheus", "http://127.0.0.1:1", "--at", "-2h"), "leave out --at and --to"),
        (("http://127.0.0.1:1",), "diag top needs a terminal"),
        (("http://127.0.0.1:1", "--log", "-"), "name the file of the log"),
        (("-",), "name the file of the log"),
    ],
)
def test_unusable_target_is_one_sentence(words: tuple[str, ...], reason: str) -> None:
    done = diag("top", *words)
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert reason in done.stderr


def test_missing_extra_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(BadUsage, match=r"pip install 'diag\[top\]'"):
        top.run(ObserveOptions(["http://127.0.0.1:1"]), here=False)


def test_terminal_view_respects_no_color_and_quits() -> None:
    with cascade() as url:
        pid, terminal = pty.fork()
        if pid == 0:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "xterm-256color"}
            os.execve(sys.executable, [sys.executable, "-m", "diag", "top", url, "--every", "0.5"], environment)
        drawn = b""
        while b"CANNOT TELL" not in drawn and select.select([terminal], [], [], 20)[0]:
            drawn += os.read(terminal, 2**16)
        os.write(terminal, b"\x03")
        while select.select([terminal], [], [], 20)[0]:
            try:
                drawn += os.read(terminal, 2**16)
            except OSError:
                break
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"CANNOT TELL" in drawn
    styles = {int(code) for codes in re.findall(rb"\x1b\[([0-9;]+)m", drawn) for code in codes.split(b";")}
    assert styles
    assert not styles & {*range(30, 39), *range(40, 49), *range(90, 108)}
