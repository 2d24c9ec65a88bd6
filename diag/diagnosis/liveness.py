"""Forward progress as a probe, judged by the doctor's rules over the last scrapes of one server.

vLLM's own /health answers 200 through a hang, and a probe that only measures time restarts a server in a long prefill.
"""

from collections.abc import Sequence
from typing import NamedTuple

from diag.core.contract import Contract
from diag.core.formatting import quantity
from diag.diagnosis.progress import INSTANCE, Progress, judge, scope
from diag.diagnosis.query_cache import QueryCache
from diag.exposition.scrapes import Target
from diag.knowledge.signals.halted import processes_stopped
from diag.knowledge.signals.peers import ranks_out_of_step
from diag.sources.observation import Origin, observation
from diag.sources.samples import SampleSource

KEPT = 600_000
"""Milliseconds of scrapes to judge by: the signals of progress look back five minutes."""
MOST_VALUES = 5_000_000
"""Scrapes times series, those that are gone again too, at which gathering begins anew."""
HELD, HELD_UNPROVEN = 30.0, 90.0
"""Seconds for which an engine has to be stalled or dead, and for which it has to stand still where only its gauges show
that: they show nothing but the standstill during a long prefill either, and a restart for one is a false one."""
PROOFS = (processes_stopped, ranks_out_of_step)
FAILED = ("stalled", "dead")
UNREADY = ("asleep", "starting", *FAILED)


class Health(NamedTuple):
    """Whether a server is alive and whether it is ready, each with a sentence; where nobody can tell it is alive."""

    alive: bool
    ready: bool
    liveness: str
    readiness: str


def unknown(why: str) -> Health:
    """What is answered where nothing is known: a server is not restarted for it, and gets no requests."""
    return Health(alive=True, ready=False, liveness=f"cannot tell: {why}", readiness=f"cannot tell: {why}")


class Liveness:
    """Gathers the pages of one exporter and judges them."""

    def __init__(self, instance: str, every: float) -> None:
        self._target = Target(instance)
        self._every = every
        self._failing_since: int | None = None

    def observe(self, at: int, page: bytes) -> Health:
        """Add a page that was taken at unix milliseconds, and judge what was seen until then."""
        self._forget(at - KEPT)
        self._target.add(at, page)
        seen = observation(Origin("scrape", self._target.instance, self._every), [self._target], {})
        queries = QueryCache(SampleSource(seen.samples, seen.instants, seen.interval), Contract())
        known, unknown = judge(queries)
        told = _sentences(known) or f"cannot tell: {'; '.join(each.sentence for each in unknown)}"
        unready = _sentences([progress for progress in known if progress.state in UNREADY]) or self._no_page()
        failing = [progress for progress in known if progress.state in FAILED]
        if not failing:
            self._failing_since = None
            return Health(True, not unready, told, unready or told)
        self._failing_since = self._failing_since or at
        left = _patience(failing, queries) - (at - self._failing_since) / 1000
        waits = f" (the answer is 503 if that lasts for another {quantity(left, 'seconds')})" if left > 0 else ""
        return Health(left > 0, False, _sentences(failing) + waits, unready)

    def _no_page(self) -> str:
        page = self._target.scrapes[-1].page
        return "" if page and page.layout.vllm else "vLLM's /metrics does not answer"

    def _forget(self, before: int) -> None:
        if self._target.size > MOST_VALUES:
            self._target = Target(self._target.instance)
        self._target.scrapes[:] = [scrape for scrape in self._target.scrapes if scrape.at >= before]


def _patience(failing: Sequence[Progress], queries: QueryCache) -> float:
    """Seconds for which these states have to last."""
    rows = (queries.ask(signal, INSTANCE, queries.live("30s")) for signal in PROOFS)
    proven = any((values[-1] > 0).any() for found in rows for values in found.values())
    return HELD if proven or any(progress.state == "dead" for progress in failing) else HELD_UNPROVEN


def _sentences(known: Sequence[Progress]) -> str:
    return "; ".join(f"{scope(progress.subject)} is {progress.state}: {progress.reason}" for progress in known)
