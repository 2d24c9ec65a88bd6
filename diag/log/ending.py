"""Judge how a log ends: the state of its server at the last line, and the end that only the end of the log shows.

Of a log that is read alone, the last exception after which nothing moves is the server's end too.
"""

from collections.abc import Sequence

from diag.core.log_events import ON_DEVICE, EventLine, LogContext, LogEnding, LogState
from diag.log.marks import MARKS
from diag.log.patterns import recognise
from diag.log.states import ServerStates
from diag.log.tracebacks import MOST_READ, ErrorLine
from diag.log.trackers import MOST_NAME, MOST_TEXT, READY_STAGE, informativeness, quote

FEWEST_SIGNS = 2
"""Signs of work that refute a death, or show another server behind a failed start: the first may be an older one's."""


class EndJudge:
    """Judges the states that the lines of a log have led to; `at` is the unix time of the last one, 0 for none."""

    def __init__(self, states: ServerStates, at: float) -> None:
        self._states = states
        self._run = states.run
        self._at = at

    @property
    def state(self) -> LogState:
        """The state of the server at the last line."""
        run, startup, writers = self._run, self._run.startup, self._states.writers
        if not writers.is_vllm:
            return "lost"
        if startup.has_ended and not startup.is_ready:
            return "shut down" if run.shutdown.was_told else "stopped" if run.is_interrupted else "failed"
        if run.is_dead or startup.has_ended:
            return "dead" if run.is_dead else "shut down"
        if (run.ended_from_outside or run.is_interrupted) and not run.shutdown.was_told:
            return "stopped"
        if startup.stage is None:
            return "lost"
        if run.script_error is not None:
            return "script failed"
        if writers.is_script and startup.is_ready and not writers.has_api_server:
            return "run over"
        return "serving" if startup.is_ready else "starting"

    @property
    def ending(self) -> LogEnding:
        """The state of the server at the last line, with what is told of it."""
        state, run, load = self.state, self._run, self._states.load
        phase, done = run.startup.position
        error = quote(self._states.root_cause.reason, MOST_READ)
        latest, file = self._states.answers.latest, quote(self._states.file, MOST_NAME)
        lines = (
            EventLine(event, quote(line.text, MOST_TEXT), file, line.number, line.process, at, quote(frame, MOST_NAME))
            for event, (line, at, frame) in self._states.lines.items()
        )
        return LogEnding(
            state,
            self._at,
            run.errors,
            processes=len(run.raised),
            last=quote(run.waits_for or self._states.last_text, MOST_TEXT),
            lines=tuple(lines),
            phase=phase if state == "starting" else "",
            done=done if state == "starting" else None,
            context=LogContext("", run.config.platform, "" if run.startup.stage is None else phase, (), error),
            failed=latest.count("5xx"),
            answered=len(latest),
            refused=latest.count("4xx"),
            succeeded=self._states.answers.succeeded != 0,
            not_done=next(reversed(self._states.answers.not_done), ""),
            is_unhealthy=run.is_unhealthy,
            raised=quote(run.worker_error.text, MOST_TEXT) if run.worker_error else "",
            load=load.words(self._at),
            is_still=state == "serving" and load.is_still,
            waits=run.rank_waits if state in ("serving", "lost") else "",
            goes_on=state == "failed" and run.signs >= FEWEST_SIGNS,
            reason=self._states.root_cause.line,
        )

    def finish(self, cut_short: ErrorLine | None) -> None:
        """Take the end of the log for that of the server if its last word is an exception, a death, or a long wait.

        `cut_short` is an exception whose traceback the log breaks off.
        """
        states, run = self._states, self._run
        pending, states.pending = states.pending, []
        if states.writers.handles_request and run.startup.stage is None:  # a request's frames, perhaps below its error
            pending = [error for error in pending if not error.is_lone]
        if states.runs_script and not any(error.in_step for error in pending) and run.announced is None:
            self._end_script(pending)
            return
        if run.ended_from_outside:  # a wait has failed nothing
            pending = [error for error in pending if not MARKS.waits_for_gpus.match(error.text)]
        startup = run.startup
        if states.last_failure is not None and not startup.is_ready and not run.root_cause.has_reason:
            run.root_cause = states.last_failure  # the start in which the log ends has no reason of its own
        if run.abort is not None and run.abort[1] == states.served and not run.is_dead:
            pending = [run.abort[0], *pending]
            run.abort[0].in_step = startup.is_ready or startup.stage is None
        announced, served = run.announced or (None, 0)
        if announced is not None and (not startup.is_ready or (announced.in_step and served == states.served)):
            pending = [announced, *pending]
        elif startup.is_ready and run.is_unhealthy and run.worker_error is not None and not run.is_dead:
            pending = [run.worker_error]
            run.worker_error.in_step = True
        elif startup.is_ready and not any(error.in_step for error in pending):
            if run.is_dead and not states.starts and not startup.has_ended:  # the log begins with a worker's death
                states.die(self._at)
            return
        elif not pending and not run.root_cause.has_reason and cut_short is not None:
            pending = [cut_short]
        states.writers.is_vllm = states.writers.is_vllm or bool(pending)
        if startup.has_ended or not (pending or run.is_dead):
            if pending and not run.root_cause.has_reason:  # the failure is known, and its reason was cut off
                states.give_reason(pending)
            return
        if pending:
            states.give_reason(pending)
        for error in pending:
            pattern = recognise(error.text, "ERROR")
            if pattern is not None and pattern.kind == "event" and pattern.name not in states.events.seen:
                states.events.read(pattern, error.text, error.at)
        at = pending[0].at if pending else self._at
        if any(error.in_step for error in pending):
            states.die(at)
        else:
            states.fail(at)

    def _end_script(self, pending: Sequence[ErrorLine]) -> None:
        """Note how a script ended whose engine had started; if that ran out of memory, the engine may hold it."""
        states = self._states
        if pending or states.writers.is_script:
            states.reach(READY_STAGE, self._at)
        if not pending:
            return
        error = self._run.script_error = max(pending, key=lambda exception: informativeness(exception.text))
        states.last_text = f"{error.text} (line {error.number})" if error.number else error.text
        pattern = recognise(error.text, "ERROR")
        if pattern is not None and pattern.kind == "event" and pattern.name in ON_DEVICE:
            states.give_reason([error])
            states.events.read(pattern, error.text, error.at)
