"""Stage of a scenario: the server with its monitoring, and the actual beside the expected answers."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from support.live import load, server
from support.live.on_call import Look, OnCall, Said, on_call

NOT_ASKED, NONE = "-", "none"
LETS_GO = 180.0
"""Seconds after a cure within which the last alert ends."""
SETTLES = 15.0
"""Seconds of load after which a server is an ordinary busy one."""
SETTLED = 6
"""Answers after which the first steps, which compile kernels, are past."""
FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "32")


@dataclass(frozen=True)
class Row:
    """Answers at one moment; alternatives of an expected answer are joined by " or ", the first is waited for."""

    live: str = NOT_ASKED
    exporter: str = NOT_ASKED
    prometheus: str = NOT_ASKED
    alert: str = NOT_ASKED
    verify: str = NOT_ASKED
    livez: str = NOT_ASKED


def everywhere(said: str, alert: str, verify: str = NOT_ASKED, livez: str = "200") -> Row:
    """Return a row with one answer live, from the exporter and from Prometheus; `livez` is the status of /livez."""
    return Row(said, said, said, alert, verify, livez)


def alternatives(said: str) -> list[str]:
    """The answers that are right."""
    return said.split(" or ")


@dataclass(frozen=True)
class Outcome:
    """A row of the table; `seconds` from the fault to the first alert that is expected, None where none came.

    `gone` are the seconds from the cure to the end of the last alert, None where nothing is cured. `look` is
    that of the live answer.
    """

    name: str
    expected: Row
    got: Row
    seconds: float | None = None
    gone: float | None = None
    look: Look | None = None

    @property
    def wrong(self) -> set[str]:
        """The columns in which something else was said than expected."""
        expected = vars(self.expected)
        wrong = {column for column, said in vars(self.got).items() if said not in alternatives(expected[column])}
        return wrong | ({"gone"} if self.gone is not None and self.gone > LETS_GO else set())


@dataclass(frozen=True)
class Stage:
    """Stage of a scenario; `loading` limits the servers that start at a time to the number of cores."""

    folder: Path
    in_haste: bool = False
    loading: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(2))

    @contextmanager
    def starting(
        self, flags: Sequence[str], cold: bool = False, **environment: str
    ) -> Iterator[tuple[server.Server, OnCall]]:
        """A server from its first moment on, and who is on call for it; `cold` as users start it, to relaunch it."""
        if self.in_haste:
            environment = server.paced(self.folder / "plugin") | environment
        with (
            server.starting(self.folder, "tiny", flags, cold=cold, **environment) as vllm,
            on_call(self.folder, vllm, self.in_haste) as who,
        ):
            yield vllm, who

    @contextmanager
    def serving(
        self, flags: Sequence[str] = FLAGS, cold: bool = False, **environment: str
    ) -> Iterator[tuple[server.Server, OnCall]]:
        """Start a server and wait until it serves."""
        with ExitStack() as loading:
            loading.enter_context(self.loading)
            with self.starting(flags, cold, **environment) as (vllm, who):
                server.wait_until_ready(vllm)
                loading.close()
                yield vllm, who

    @contextmanager
    def busy(self, flags: Sequence[str] = FLAGS, **environment: str) -> Iterator[tuple[server.Server, OnCall]]:
        """Start a server and wait for some ordinary load, which continues."""
        with self.serving(flags, **environment) as (vllm, who), load.running(vllm.port, *load.STEADY) as clients:
            clients.wait_for(SETTLED, *load.STEADY)
            time.sleep(0 if self.in_haste else SETTLES)
            yield vllm, who


def look(who: OnCall, expected: Row) -> tuple[Row, Said]:
    """Ask at once, live and by the exporter, and Prometheus as soon as its alert has come; also the live answer."""
    awaited = alternatives(expected.alert)[0]
    with ThreadPoolExecutor(2) as meanwhile:
        first = meanwhile.submit(who.first_look)
        alive = meanwhile.submit(lambda: NOT_ASKED if expected.livez == NOT_ASKED else who.livez(expected.livez))
        if awaited not in (NOT_ASKED, NONE):
            who.wait_for(awaited)
        exporter, live = first.result()
    by_prometheus = who.by_prometheus(awaited).short
    return Row(live.short, exporter.short, by_prometheus, livez=alive.result()), live


def outcome(name: str, who: OnCall, expected: Row, got: Row, since: float, cured: float | None = None) -> Outcome:
    """Return the answers with the alerts so far; an alert from before the fault is a false alarm.

    `since` and `cured` are the unix times of the fault and of its cure; the alerts are waited for until they end.
    """
    gone = None if cured is None else max(0.0, who.last_fired() - cured)
    last_look = who.looks[-1] if who.looks else None
    if expected.alert == NOT_ASKED:
        return Outcome(name, expected, got, gone=gone, look=last_look)
    sent = who.notified()
    told = sent.get(alternatives(expected.alert)[0])
    names = {f"{alert} (before the fault)" if at < since else alert for alert, at in sent.items()}
    alerts = ", ".join(sorted(names | who.fired() if expected.alert == NONE else names))
    return Outcome(name, expected, replace(got, alert=alerts or NONE), told and told - since, gone, last_look)


Scenario = Callable[[Stage], Iterator[Outcome]]
