"""A container's log and status, asked of the API server, as parts of its server's page.

The log of the run before is read first: in a crash loop it says why. Each line comes with its own time, so whatever
zone the container has does not matter.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from diag.core.formatting import printable
from diag.core.metric_families import Collected, Collector, Sample
from diag.exporter.log.server_log import ServerLog
from diag.http.failure import Failure
from diag.sources.kubernetes.api import Api
from diag.sources.kubernetes.discovery import Candidate
from diag.sources.kubernetes.status import ContainerStatus, container_status
from diag.vllm.server.config import ServerFacts

FIRST_BYTES, LAST_LINES = 512 * 2**10, 5_000
"""Read of a log that is there already: its beginning, with the configuration, and its end."""
STATUS_EVERY = 5.0
"""Seconds between two looks at the pod."""
_NO_LINE = (0.0, "")
"""Before the first line: unix time, and the time as the kubelet writes it, which is finer."""
CRASHES = "diag_vllm_log_consecutive_crashes"


class ContainerLog:
    """Reads the log of one container, each line once; keeps the protocol `Collector` with the pod's status.

    `problem` says why it cannot be read.
    """

    name = "log"

    def __init__(
        self,
        api: Api,
        namespace: str,
        of: Candidate,
        status: ContainerStatus,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state = ServerLog(UTC)
        self.status = status
        self.problem = ""
        self._api, self._namespace, self._of, self._clock = api, namespace, of, clock
        self._looked_at = clock()
        self._last = _NO_LINE
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Read what there is: the run before, where there was one, then this one."""
        if self.status.restarts:
            self._read(previous="true", tailLines=str(LAST_LINES))
        if self.status.running_since:
            self._ended()
        if self._read(limitBytes=str(FIRST_BYTES)) >= FIRST_BYTES:
            self._read(tailLines=str(LAST_LINES))
        if not self.status.running_since:
            self._ended()

    def collect(self) -> Collected:
        """Read on; what is known by now."""
        if self._clock() - self._looked_at >= STATUS_EVERY:
            self._look()
        self._read(**self._since())
        with self._lock:
            return Collected(self._samples(), self.problem)

    def page(self, answered: bool) -> None:
        """Whether the server's /metrics page has just answered: what its log may mean depends on it."""
        with self._lock:
            self.state.page(self._clock(), answered)

    def _samples(self) -> list[Sample]:
        """The larger count of crashes: the log shows the last two runs, the kubelet tells of all."""
        now = self._clock()
        known = self.state.samples(now) if self.state.latest is not None else []
        crashes = max([self.status.crashes_in_a_row(now), *(value for name, _, value in known if name == CRASHES)])
        others = [sample for sample in known if sample[0] != CRASHES]
        return [*others, (CRASHES, (), crashes), *self.status.samples()]

    def _look(self) -> None:
        """Take note of a restart; a pod that cannot be read is as it was."""
        self._looked_at = self._clock()
        try:
            pod = self._api.pod(self._namespace, self._of.pod)
        except Failure:
            return
        before, self.status = self.status, container_status(pod, self._of.container)
        if self.status.last != before.last:  # once it runs again, the end of that run's log is the previous one's
            self._read(**self._since(), previous="true" if self.status.running_since else "")
            self._ended()

    def _ended(self) -> None:
        last = self.status.last
        if last and last.at:
            with self._lock:
                self.state.process_ended(last.at, last.by_signal)

    def _since(self) -> Mapping[str, str]:
        """What is new, to the second: the API server knows no finer."""
        since = datetime.fromtimestamp(int(self._last[0]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if self._last[0] else ""
        return {"sinceTime": since, "tailLines": str(LAST_LINES)}

    def _read(self, **query: str) -> int:
        """Feed the lines that are new; the number of bytes that came."""
        pod, container = self._of.pod, self._of.container
        try:
            text = self._api.log(self._namespace, pod, {"container": container, **query})
        except Failure as error:
            is_gone = bool(query.get("previous"))  # no log of the run before is kept, or there was none
            self.problem = self.problem if is_gone else f"the log of pod {printable(pod)} cannot be read: {error}"
            return 0
        self.problem = ""
        with self._lock:
            for line in text.decode("utf-8", "replace").split("\n"):
                self._feed(line)
        return len(text)

    def _feed(self, line: str) -> None:
        stamp = line.partition(" ")[0]
        try:
            at = (datetime.fromisoformat(stamp).timestamp(), stamp)
        except (ValueError, OverflowError):
            return
        if at > self._last:
            self._last = at
            self.state.feed(line, at[0], live=False)


@dataclass(frozen=True)
class PodView:
    """What the API server tells of one server beside its page; keeps the protocol `ServerView`."""

    log: ContainerLog
    command: str

    @property
    def collectors(self) -> Sequence[Collector]:
        """The log, with the status of its container."""
        return (self.log,)

    @property
    def has_server(self) -> bool:
        """Whether its log has a line, or its container has ended before."""
        return self.log.state.latest is not None or self.log.status.last is not None

    def start(self) -> None:
        """Nothing goes on between two scrapes."""

    def scraped(self, answered: bool) -> None:
        """Whether its page has just answered."""
        self.log.page(answered)

    def completed(self, facts: ServerFacts) -> ServerFacts:
        """What the server reports of itself, with its log and the command of its container."""
        return self.log.state.completes(facts)._replace(process=self.command)
