"""How often a log showed each event, when last, and with which numbers."""

from collections.abc import Iterator

from diag.core.metric_families import Sample
from diag.exporter.log.pattern import EVENTS, Pattern
from diag.exporter.log.recognise import amount, values


class LogEvents:
    """Counts, times in unix seconds, and the numbers of the last line that has some; of hearsay, the time alone."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(EVENTS, 0)
        self._times = dict.fromkeys(EVENTS, 0.0)
        self._values: dict[str, dict[str, float]] = {}
        self._hearsay: dict[str, float] = {}

    def count(self, event: str, at: float) -> None:
        """It happened once more."""
        self._counts[event] += 1
        self._times[event] = max(at, self._times[event])

    def read(self, pattern: Pattern, text: str, at: float) -> None:
        """A line that shows one, with its numbers."""
        self.count(pattern.name, at)
        found = {name: amount(value) for name, value in values(pattern, text).items()}
        if found:
            self._values[pattern.name] = found

    def hear(self, event: str, at: float) -> None:
        """A line that reads like one, without proof that vLLM wrote it."""
        self._hearsay[event] = max(at, self._hearsay.get(event, 0.0))

    def samples(self) -> Iterator[Sample]:
        """Everything that is known."""
        for event, count in self._counts.items():
            yield "diag_vllm_log_events_total", (event,), count
            yield "diag_vllm_log_event_last_timestamp_seconds", (event,), self._times[event]
        for event, at in self._hearsay.items():
            yield "diag_vllm_log_hearsay_timestamp_seconds", (event,), at
        for event, fields in self._values.items():
            for field, value in fields.items():
                yield "diag_vllm_log_value", (event, field), value
