"""Measures `diag top` at ten replayed servers in a pseudo terminal, and writes bench/top.md.

With --screenshots it writes the pictures of docs/top.md instead.
"""

import asyncio
import fcntl
import os
import platform
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))

from support.live.server import free_port  # noqa: E402

from diag.commands.observe import ObserveOptions  # noqa: E402
from diag.commands.top import make_app  # noqa: E402
from diag.top.app import TopApp  # noqa: E402

DIAG = [sys.executable, "-m", "diag"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    "PYTHONPATH": str(ROOT),
    "TERM": "xterm-256color",
}
RECORDINGS = (
    *("kv_cascade", "engine_stalled", "contention_long_prefill", "gpu_thermal_throttling", "queue_saturation"),
    *("healthy", "healthy_vllm_0_20_2", "benign_preemptions", "data_parallel_one_busy", "idle"),
)
WARM_UP, SECONDS = 60.0, 60.0
MOST_CPU, MOST_MIB = 0.05, 120.0
COLUMNS, LINES = 120, 30
WIDE, NARROW = (140, 20), (80, 24)
PICTURES = ROOT / "docs" / "_static"
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""A picture must not load anything."""


@contextmanager
def replayed() -> Iterator[list[str]]:
    """The URLs of ten servers."""
    ports = [free_port() for _ in RECORDINGS]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with ExitStack() as stack:
        for name, port in zip(RECORDINGS, ports, strict=True):
            command = [*DIAG, "replay", f"tests/recordings/{name}", "--listen", f"127.0.0.1:{port}"]
            process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **quiet))
            stack.callback(process.kill)
        time.sleep(10.0)
        yield [f"http://127.0.0.1:{port}" for port in ports]


class Terminal:
    """A program in a pseudo terminal; `written` counts the bytes that it has drawn."""

    def __init__(self, command: list[str]) -> None:
        self.written = 0
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, ENVIRONMENT)
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))

    def look_on(self, seconds: float) -> None:
        """Read what it draws for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._file], [], [], left)[0]:
                self.written += len(os.read(self._file, 2**16))

    def quit(self) -> int:
        """Press q; its exit status."""
        os.write(self._file, b"q")
        with suppress(OSError):  # where it has ended
            self.look_on(5.0)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def cpu(self) -> float:
        """CPU seconds so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def most_mebibytes(self) -> float:
        """The most memory that it had at a time."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024


def measure() -> int:
    """Write the table; 1 where a bound is missed."""
    with replayed() as urls:
        terminal = Terminal([*DIAG, "top", *urls])
        terminal.look_on(WARM_UP)
        cpu, written = terminal.cpu, terminal.written
        terminal.look_on(SECONDS)
        share, drawn = (terminal.cpu - cpu) / SECONDS, (terminal.written - written) / SECONDS
        memory, status = terminal.most_mebibytes, terminal.quit()
    lines = [
        "# diag top",
        "",
        f"Python {platform.python_version()}, {os.cpu_count()} cores; {len(RECORDINGS)} replayed servers, a terminal of"
        f" {COLUMNS}x{LINES}; {SECONDS:g} s from {WARM_UP:g} s after the start on.",
        "",
        "| what | measured | bound |",
        "|---|---|---|",
        f"| CPU, share of a core | {100 * share:.1f} % | < {100 * MOST_CPU:g} % |",
        f"| memory (RSS), most since the start, MiB | {memory:.0f} | < {MOST_MIB:g} |",
        f"| sent to the terminal, bytes per second | {drawn:.0f} | |",
    ]
    table.write("top.md", "\n".join(lines) + "\n")
    return int(status != 0 or share >= MOST_CPU or memory >= MOST_MIB)


async def take_screenshots(urls: list[str]) -> None:
    """The ten servers, the cascade and the stall."""
    app = make_app(ObserveOptions(urls, every=5.0))
    async with app.run_test(size=WIDE) as pilot:
        while not {"engine_stalled", "kv_eviction_cascade"} <= incidents(app):
            await pilot.pause(0.2)
        save(app.export_screenshot(title="diag top"), "top")
        await pilot.press("p")
        for place, name in ((1, "top-stall"), (0, "top-cascade")):
            await pilot.press("slash", *urls[place].rpartition(":")[2], "enter")
            await pilot.resize_terminal(100, 40)
            await pilot.press("enter")
            await pilot.pause(1.0)
            save(app.export_screenshot(title="diag top"), name)
            await pilot.press("escape", "escape")
        await pilot.press("p")
        await pilot.resize_terminal(*NARROW)
        await pilot.pause(1.0)
        save(app.export_screenshot(title="diag top, 80x24"), "top-narrow")


def incidents(app: TopApp) -> set[str]:
    """What holds on any server."""
    return {name for row in (app.frame.rows if app.frame else ()) for name in row.incidents}


def save(picture: str, name: str) -> None:
    """Write a picture."""
    (PICTURES / f"{name}.svg").write_text(FONTS.sub("", picture), encoding="utf-8")


def main() -> int:
    """Measure, or take the pictures."""
    if "--screenshots" not in sys.argv:
        return measure()
    with replayed() as urls:
        asyncio.run(take_screenshots(urls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
