"""What the kubelet reports of a container: whether it runs, how it ended, how often it was restarted, its limits.

Pure: a pod as the API server describes it in, numbers and sentences out.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from diag.core.formatting import moment, plural, printable, resource_quantity
from diag.core.metric_families import Sample
from diag.exporter.log.crashes import STEADY_SECONDS
from diag.sources.kubernetes.discovery import Pod, containers, name, part

OOM_KILLED = "OOMKilled"
FIRST_BACK_OFF, LONGEST_BACK_OFF = 10.0, 300.0
"""Seconds that the kubelet waits before a second restart in a row; doubled for each further one, up to the longest."""
_TERMINATED = 143
"""Exit status of a process that was told to stop (SIGTERM)."""
_SIGNALLED = 128
_BACK_OFF = re.compile(r"back-off (?:(\d+)m)?(\d+)s restarting")


class Ended(NamedTuple):
    """How a run of a container ended; `at` is in unix seconds, 0 where the kubelet does not know."""

    at: float
    status: int
    reason: str

    @property
    def by_signal(self) -> bool:
        """Whether a signal other than the request to stop ended it."""
        return self.reason == OOM_KILLED or (self.status > _SIGNALLED and self.status != _TERMINATED)


class ContainerStatus(NamedTuple):
    """A container at one look; `last` is the latest run that is over, None where the first one goes on.

    ready: whether the kubelet says so, which says something where it is `probed` for that.
    """

    restarts: int = 0
    waits: str = ""
    message: str = ""
    running_since: float = 0.0
    ready: bool = False
    probed: bool = False
    last: Ended | None = None
    memory_limit: float | None = None
    cpu_limit: float | None = None

    def crashes_in_a_row(self, now: float) -> int:
        """Ends that nobody asked for since it last ran for ten minutes: at least so many.

        The kubelet counts all restarts, but waits the longer the more came in a row: for 10 s before the second one.
        """
        ended = self.last
        if ended is None or (self.running_since and now - self.running_since >= STEADY_SECONDS):
            return 0
        wait = self._back_off or (self.running_since - ended.at if self.running_since and ended.at else 0.0)
        if wait < FIRST_BACK_OFF:
            return int(ended.status not in (0, _TERMINATED))
        in_a_row = 2 + math.floor(math.log2(min(wait, LONGEST_BACK_OFF) / FIRST_BACK_OFF) + 0.1)
        return min(in_a_row, self.restarts + (not self.running_since))

    @property
    def _back_off(self) -> float:
        """Seconds that the kubelet says that it waits."""
        found = _BACK_OFF.search(self.message)
        return int(found[1] or 0) * 60.0 + int(found[2]) if found else 0.0

    def samples(self) -> Iterator[Sample]:
        """What an exporter on its host would serve of it."""
        killed = self.last.at if self.last and self.last.reason == OOM_KILLED else 0.0
        yield "diag_host_last_oom_kill_timestamp_seconds", (), killed
        if self.memory_limit:
            yield "diag_host_memory_limit_bytes", (), self.memory_limit
        if self.cpu_limit:
            yield "diag_host_cpu_limit_cores", (), self.cpu_limit


def container_status(pod: Pod, container: str) -> ContainerStatus:
    """The status of that container."""
    status = next(iter(_named(part(pod, "status").get("containerStatuses"), container)), {})
    state, last = part(status, "state"), part(part(status, "lastState"), "terminated")
    wanted = next(iter(_named(containers(pod), container)), {})
    limits = part(part(wanted, "resources"), "limits")
    waiting = part(state, "waiting")
    ended = part(state, "terminated") or last
    return ContainerStatus(
        restarts=int(status.get("restartCount") or 0),
        waits=str(waiting.get("reason", "")),
        message=str(waiting.get("message", "")),
        running_since=_time(part(state, "running").get("startedAt")),
        ready=status.get("ready") is True,
        probed="readinessProbe" in wanted,
        last=_ended(ended) if ended else None,
        memory_limit=resource_quantity(str(limits.get("memory"))),
        cpu_limit=resource_quantity(str(limits.get("cpu"))),
    )


def not_started(pod: Pod) -> str:
    """Why no container of a pod has run yet or will run any more, as a sentence; "" where that is not so."""
    status, shown = part(pod, "status"), f"pod {printable(name(pod))}"
    if part(pod, "metadata").get("deletionTimestamp"):
        return f"{shown} is being deleted"
    if status.get("phase") in ("Succeeded", "Failed"):
        why = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
        return f"{shown} has ended ({printable(why or status['phase'], 200)})"
    if status.get("phase") != "Pending":
        return ""
    waiting = [part(part(each, "state"), "waiting") for each in _statuses(status)]
    reasons = [*waiting, *(each for each in status.get("conditions") or [] if each.get("status") == "False")]
    told: Mapping[str, Any] = next((each for each in reasons if each.get("reason") and each.get("message")), {})
    why = f"{told['reason']}, {told['message']}" if told else "its containers are being created"
    return f"{shown} is pending: {printable(why, 200)}"


def note(shown: str, found: ContainerStatus, probes: Sequence[str] = ()) -> Iterator[str]:
    """What a reader should know of a container that was restarted, waits or failed probes: one sentence at most."""
    told = []
    if found.restarts and found.last:
        at = f"the last at {moment(found.last.at)}, " if found.last.at else ""
        how = f"{at}{found.last.reason or 'Error'}, exit status {found.last.status}"
        told.append(f"{plural(found.restarts, 'restart')} ({printable(how)})")
    if found.waits:
        why = found.message.partition(" restarting failed")[0]
        told.append(printable(found.waits) + (f" ({printable(why, 200)})" if why else ""))
    if told or probes:
        yield f"{shown}: {', '.join([*told, *probes])}"


def failed_probes(pod: Pod, container: str, events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The probes for which the kubelet restarts a container, as often as its events say that they failed."""
    wanted = next(iter(_named(containers(pod), container)), {})
    field = f"spec.containers{{{container}}}"
    own = [each for each in events if part(each, "involvedObject").get("fieldPath") == field]
    for probe in ("startupProbe", "livenessProbe"):
        kind = probe.removesuffix("Probe")
        failed = [each for each in own if str(each.get("message", "")).lower().startswith(f"{kind} probe failed")]
        if failed:
            times, settings = sum(int(each.get("count") or 1) for each in failed), part(wanted, probe)
            allowed = int(settings.get("periodSeconds", 10)) * int(settings.get("failureThreshold", 3))
            yield f"its {probe} failed {plural(times, 'time')}: the kubelet restarts it after {allowed} s of that"


def _ended(terminated: Mapping[str, Any]) -> Ended:
    return Ended(
        _time(terminated.get("finishedAt")),
        int(terminated.get("exitCode") or 0),
        str(terminated.get("reason", "")),
    )


def _time(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _statuses(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _named(items: Any, wanted: str) -> list[Mapping[str, Any]]:
    return [item for item in items or [] if item.get("name") == wanted]
