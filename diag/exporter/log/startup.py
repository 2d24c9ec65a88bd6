"""How far one start of vLLM is, by the stages and the bars of its log."""

from collections.abc import Iterator

from diag.core.log_events import READY, WARM_UP
from diag.core.metric_families import Sample
from diag.exporter.log.pattern import KERNEL_WARM_UP, PHASES, STAGES

MOST_BARS = 1_000
_READY = STAGES.index(READY)


class Startup:
    """How far one start is. Stages only go forward: a rank that is late does not move it back.

    All phases are 0 once it failed or the server was shut down; the times spent stay. A server first seen at work is
    ready, and nothing is known of its start. Progress is a line of a stage, or a bar that moved: a bar redrawn where it
    stands, a warning, and the line that a rank waits are none. It ends with being ready.
    """

    def __init__(self, at: float | None = None) -> None:
        self.stage = None if at is None else 0
        self.over = False
        self._entered = at or 0.0
        self._moved = at
        self._spent: dict[str, float] = {}
        self._bars: dict[tuple[str, int], int] = {}
        self._ratio: float | None = None

    @property
    def seen(self) -> bool:
        """Neither failed nor shut down, and there."""
        return self.stage is not None and not self.over

    @property
    def ready(self) -> bool:
        """The start ended well, whatever came after."""
        return self.stage == _READY

    @property
    def under_way(self) -> bool:
        """The present phase still takes time."""
        return self.seen and not self.ready

    def reach(self, stage: int, at: float) -> None:
        """A line of that stage."""
        if self.over or self.ready:
            return
        if self.stage is None:
            self.stage, self._entered = stage, at
        self._moved = max(at, self._moved or at)
        if stage > self.stage:
            self._spend(at)
            self.stage, self._ratio = stage, None

    def move(self, at: float) -> None:
        """A line that shows progress inside of a stage."""
        if self.under_way:
            self.reach(0, at)

    def bar(self, stage: int, what: str, done: int, total: int, at: float) -> None:
        """A bar as it was drawn: the ranks draw the same one, so the highest count is where it is."""
        if done <= self._bars.get((what, total), -1) or len(self._bars) > MOST_BARS:
            return
        self._bars[what, total] = done
        self.reach(stage, at)
        if self.under_way and self.stage == stage and total:
            self._ratio = min(done / total, 1.0)

    def end(self, at: float) -> None:
        """The start failed, or the server was shut down."""
        if self.under_way:
            self._spend(at)
        self.over = True

    def _spend(self, at: float) -> None:
        phase = _phase(self.stage or 0)
        self._spent[phase] = self._spent.get(phase, 0.0) + max(at - self._entered, 0.0)
        self._entered = at

    def samples(self, now: float) -> Iterator[Sample]:
        """Nothing where neither a start nor a server at work was seen; `ready` takes no time."""
        if self.stage is None:
            return
        present = "" if self.over else _phase(self.stage)
        for phase in PHASES:
            yield "diag_vllm_startup_phase", (phase,), float(phase == present)
        spent = dict(self._spent)
        if self.under_way:
            spent[present] = spent.get(present, 0.0) + max(now - self._entered, 0.0)
        for phase, seconds in spent.items():
            yield "diag_vllm_startup_phase_seconds", (phase,), seconds
        if self.under_way and self._ratio is not None:
            yield "diag_vllm_startup_progress_ratio", (), self._ratio
        if self._moved is not None:
            yield "diag_vllm_startup_last_progress_timestamp_seconds", (), self._moved


def _phase(stage: int) -> str:
    return WARM_UP if STAGES[stage] == KERNEL_WARM_UP else STAGES[stage]
