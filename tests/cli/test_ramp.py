"""`diag ramp` when things go wrong: nobody said yes, the generator fails or hangs, the server dies, Ctrl-C."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bad_servers import Reply, Request, Server, serving
from support.paths import TESTS
from support.rewriting import scrapes

from diag.commands import ramp as work
from diag.commands.observe import ObserveOptions
from diag.commands.options import RampOptions
from diag.core.errors import BadUsage, Unreachable
from diag.report import ramp as text

PAGES = [page.encode() for _, _, page in scrapes("queue_saturation")]
PLAYED = TESTS / "support" / "played_bench"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(work, "TRAFFIC", 0.5)
    monkeypatch.setattr("diag.ramp.run.MOST_SECONDS", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(PLAYED))
    monkeypatch.setenv("PLAYED_BENCH_STEPS", str(tmp_path / "steps"))


@pytest.fixture
def busy() -> Iterator[Server]:
    """A server whose pages are those of one that was recorded under load, one after the other."""

    def answer(request: Request) -> Reply:
        if request.path != "/metrics":
            return Reply(status=404)
        return Reply(PAGES[min(request.count - 1, len(PAGES) - 1)])

    with serving(answer) as server:
        yield server


def ramp(url: str, **more: object) -> work.Ramp:
    observed = ObserveOptions([url], every=0.1, timeout=1.0)
    given = {"python": sys.executable, "yes": True, "step_seconds": 1.0, "most": 4, "rates": 0, **more}
    return work.run(RampOptions(**given), observed)  # type: ignore[arg-type]


def test_no_load_is_generated_without_confirmation(busy: Server, tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="confirm that with --yes"):
        ramp(busy.url, yes=False)
    assert not (tmp_path / "steps").exists()


def test_steps_are_measured_and_judged(busy: Server) -> None:
    found = ramp(busy.url)
    assert [step.offer.concurrency for step in found.steps][:2] == [1, 2]
    assert found.stopped == ""
    assert found.lengths
    assert found.lengths.shown.endswith("(as this server's own)")


@pytest.mark.parametrize(
    ("played", "said"), [("crash 3", "its tokenizer cannot be loaded"), ("hang 3", "did not end in time")]
)
def test_a_generator_that_fails_loses_no_step(
    busy: Server, monkeypatch: pytest.MonkeyPatch, played: str, said: str
) -> None:
    monkeypatch.setenv("PLAYED_BENCH", played)
    found = ramp(busy.url)
    assert found.steps
    assert said in found.stopped
    assert said in text.render(found)


def test_python_without_vllm_is_reported_in_one_sentence(busy: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    assert "this Python has no vLLM" in ramp(busy.url).stopped
    with pytest.raises(BadUsage, match="cannot be run"):
        ramp(busy.url, python="/nowhere/python")


@pytest.mark.parametrize("hangs", [0.0, 2.5])
def test_a_server_that_dies_or_hangs_ends_the_ramp(hangs: float, tmp_path: Path) -> None:
    """In the second step, with closed connections, or with none that is answered in time."""
    steps = tmp_path / "steps"

    def answer(request: Request) -> Reply | None:
        if request.path != "/metrics":
            return Reply(status=404)
        if not steps.exists() or steps.stat().st_size < 3:
            return Reply(PAGES[min(request.count - 1, len(PAGES) - 1)])
        time.sleep(hangs)
        return None

    with serving(answer) as server:
        found = ramp(server.url, most=256)
    assert "the server stopped answering" in found.stopped
    assert found.steps, "what was measured until then is judged"


def test_an_unreachable_server_is_no_ramp() -> None:
    with pytest.raises(Unreachable):
        ramp("http://127.0.0.1:9")


AT_ONCE = "from diag.commands import ramp; ramp.TRAFFIC = 0.5; from diag.cli.app import main; main()"
"""The command, which observes existing traffic for 0.5 s instead of 10 s."""


def command(url: str, *options: str) -> list[str]:
    made = ["--vllm-python", sys.executable, "--yes", "--step-seconds", "5", "--most", "2", "--rates", "0"]
    return [sys.executable, "-c", AT_ONCE, "ramp", url, *made, "--every", "0.1", *options]


@pytest.fixture
def diag_and_played_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{PLAYED}{os.pathsep}{TESTS.parent}")


@pytest.mark.usefixtures("diag_and_played_bench")
def test_a_ramp_into_a_pipe_shows_its_steps_as_lines(busy: Server, tmp_path: Path) -> None:
    """`diag ramp ... 2>&1 | tee FILE`: the file was empty for minutes, until the report."""
    ramping = shlex.join(command(busy.url))
    seen, file = subprocess.PIPE, tmp_path / "file"
    with subprocess.Popen(["bash", "-c", f"set -o pipefail; {ramping} 2>&1 | tee {file}"], stdout=seen) as shell:
        assert shell.stdout
        first = shell.stdout.readline().decode()
        assert shell.poll() is None, "the line is there while the ramp runs"
        rest = shell.stdout.read().decode()
    assert shell.returncode in (0, 2, 3), "the exit status of diag"
    lines = [line.partition("  ")[2] for line in (first + rest).splitlines()]
    begun = [lines.index(what) for what in ("watching the traffic that is there", "warming up", "1 requests")]
    report = next(at for at, line in enumerate((first + rest).splitlines()) if line.startswith("Ramp of"))
    assert 0 == begun[0] < begun[1] < begun[2] < report
    assert "\x1b" not in first + rest
    assert "\r" not in first + rest
    assert file.read_text() == first + rest


@pytest.mark.usefixtures("diag_and_played_bench")
def test_ctrl_c_that_also_ends_tee_loses_no_report(
    busy: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C in `diag ramp ... | tee FILE` ends tee at once; the report then goes to standard error."""
    monkeypatch.setenv("PLAYED_BENCH", "hang 2")
    steps, page = tmp_path / "steps", tmp_path / "page.html"
    options = command(busy.url, "--html", str(page))
    with subprocess.Popen(options, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ramping:
        assert ramping.stdout
        assert ramping.stderr
        while not steps.exists() or steps.stat().st_size < 2:
            time.sleep(0.05)
        time.sleep(1)
        ramping.stdout.close()
        ramping.send_signal(signal.SIGINT)
        said = ramping.stderr.read().decode()
    assert "\nRamp of" in said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert ramping.returncode in (0, 2, 3), "the exit status of what was measured"
    assert page.exists()


def test_ctrl_c_keeps_what_was_measured(busy: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLAYED_BENCH", "hang 4")  # a busy host may scrape too few pages of one of the three before
    monkeypatch.setattr("diag.ramp.run.MOST_SECONDS", 60.0)
    steps, ended = tmp_path / "steps", threading.Event()

    def interrupt() -> None:
        while not steps.exists() or steps.stat().st_size < 4:
            time.sleep(0.05)
        if not ended.wait(1):  # a late signal would interrupt another test
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    found = ramp(busy.url, most=16)
    ended.set()
    assert found.stopped == "interrupted"
    assert len(found.steps) >= 2
    left = subprocess.run(["pgrep", "-f", "vllm.benchmarks.serve"], capture_output=True, text=True, check=False)
    assert str(os.getpid()) not in left.stdout
