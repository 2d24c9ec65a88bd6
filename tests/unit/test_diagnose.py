"""Three-valued decisions, causes that nest what they explain, and times, on samples small enough to see through."""

from collections.abc import Sequence

import numpy as np
import pytest

from diag import promql
from diag.core.contract import Contract
from diag.core.incident import BurnRateWindow, Incident, LookAlike, Signal, judged
from diag.diagnosis.diagnose import Diagnosis, diagnose
from diag.diagnosis.query_cache import QueryCache
from diag.sources.observation import SampleSource

WHY = judged("a test")
START = 1_700_000_000_000
MISSING = float("nan")


def signal(name: str) -> Signal:
    return Signal(name, f"max by ($by) (last_over_time({name}[$window]))", "{value}", "")


INCIDENT = Incident(
    id="cause",
    title="",
    severity="warning",
    per=("instance", "engine"),
    cause="",
    impact="",
    symptoms=(signal("heat").above(1, WHY), signal("noise").above(1, WHY)),
    looks_like=(),
    fixes=(),
    live_window="2s",
)


def judge(incidents: Sequence[Incident], **series: Sequence[float]) -> tuple[Diagnosis, ...]:
    """One engine, a scrape every second; MISSING leaves a hole."""
    rows = {"up": [1.0] * len(next(iter(series.values()))), "vllm:num_requests_running": [0.0], **series}
    length = len(rows["up"])
    times = START + 1000 * np.arange(length, dtype=np.int64)
    blocks = []
    for name, values in rows.items():
        labels = {"__name__": name, "instance": "a:1", **({} if name == "up" else {"engine": "0"})}
        row = np.resize(np.array(values, float), (1, length))
        row[np.isnan(row)] = promql.STALE
        blocks.append(promql.Block((labels,), times, row))
    return diagnose(incidents, QueryCache(SampleSource(promql.Samples(blocks), times, 1.0), Contract()))


@pytest.mark.parametrize(
    ("heat", "noise", "state"),
    [
        (2, 2, "present"),
        (2, 0, "absent"),
        (0, MISSING, "absent"),
        (2, MISSING, "unknown"),
        (MISSING, MISSING, "unknown"),
        (2, float("inf"), "unknown"),
    ],
)
def test_false_beats_missing_and_missing_beats_present(heat: float, noise: float, state: str) -> None:
    assert judge([INCIDENT], heat=[heat] * 10, noise=[noise] * 10)[0].state == state


@pytest.mark.parametrize(
    ("noise", "state"),
    [
        ([0] * 5 + [MISSING] * 5, "unknown"),
        ([MISSING] * 7 + [0] * 3, "absent"),
        ([0] * 3 + [2] * 2 + [MISSING] * 5, "present"),
    ],
    ids=["denied at first only", "denied at the end", "seen meanwhile"],
)
def test_what_cannot_be_denied_at_the_end_is_not_absent(noise: list[float], state: str) -> None:
    assert judge([INCIDENT], heat=[2] * 10, noise=noise)[0].state == state


def test_what_is_missing_is_named() -> None:
    assert judge([INCIDENT], heat=[2] * 10)[0].missing == ("noise",)


def test_what_one_condition_decides_evaluates_the_others_when_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    ask = SampleSource.ask
    monkeypatch.setattr(
        SampleSource, "ask", lambda self, query, at: (asked.append(query.written_out()), ask(self, query, at))[1]
    )
    found = judge([INCIDENT], heat=[0] * 10, noise=[2] * 10)[0]
    assert found.state == "absent" and not any("noise" in query for query in asked)
    assert [reading.value for reading in found.symptoms] == [0, 2] and any("noise" in query for query in asked)


def test_an_incident_that_held_for_a_while_has_a_beginning_and_an_end() -> None:
    found = judge([INCIDENT], heat=[0] * 8 + [2] * 4 + [0] * 8, noise=[2] * 20)[0]
    assert (found.state, found.ongoing) == ("present", False)
    assert (found.since, found.until) == (START / 1000 + 8, START / 1000 + 11)


def test_an_incident_that_held_from_the_first_look_on_has_no_beginning() -> None:
    found = judge([INCIDENT], heat=[2] * 20, noise=[2] * 20)[0]
    assert (found.since, found.until, found.ongoing) == (None, START / 1000 + 19, True)


@pytest.mark.parametrize(
    ("noise", "episodes"),
    [
        ([0] * 4 + [2] * 3 + [0] * 4 + [2] * 4, [(4, 6), (11, 14)]),
        ([0] * 4 + [2] * 3 + [0] * 3 + [2] * 5, [(4, 14)]),
        ([0] * 4 + [2] * 3 + [MISSING] * 4 + [2] * 4, [(4, 14)]),
        ([2] * 5 + [0] * 5 + [2] * 1 + [0] * 4, [(None, 4), (10, 10)]),
    ],
    ids=["health between", "health for less than a window and a scrape", "a hole between", "from the first look on"],
)
def test_what_came_back_after_a_time_of_health_is_another_episode(
    noise: list[float], episodes: list[tuple[float | None, float]]
) -> None:
    found = judge([INCIDENT], heat=[2] * 15, noise=noise)[0]
    seconds = [
        (since if since is None else since - START / 1000, until - START / 1000) for since, until in found.episodes
    ]
    assert seconds == episodes
    assert (found.since, found.until) == (found.episodes[0][0], found.episodes[-1][1])


def test_a_violated_slo_comes_after_any_cause_and_before_what_harms_nobody() -> None:
    slo = INCIDENT._replace(id="a_slo", severity="critical", burns=(BurnRateWindow(6, "6h", "30m"),))
    info = INCIDENT._replace(id="an_info", severity="info")
    found = judge([slo, INCIDENT, info], heat=[2] * 10, noise=[2] * 10)
    assert [each.incident.id for each in found] == ["cause", "a_slo", "an_info"]
    assert [each.primary for each in found] == [True, False, False]


def test_a_cause_nests_what_it_explains() -> None:
    cause, effect = INCIDENT._replace(explains=("effect",)), INCIDENT._replace(id="effect")
    found = {each.incident.id: each for each in judge([effect, cause], heat=[2] * 10, noise=[2] * 10)}
    assert (found["cause"].primary, found["effect"].primary) == (True, False)
    assert found["effect"].explained_by == "cause"


def test_what_follows_from_several_is_nested_under_the_one_that_follows_from_nothing() -> None:
    """Not under the first of the alphabet."""
    root = INCIDENT._replace(id="root", explains=("between", "effect"))
    between, effect = INCIDENT._replace(id="between", explains=("effect",)), INCIDENT._replace(id="effect")
    found = judge([between, effect, root], heat=[2] * 10, noise=[2] * 10)
    assert {each.incident.id: each.explained_by for each in found} == {
        "root": None,
        "between": "root",
        "effect": "root",
    }


def test_of_two_that_nothing_explains_the_better_supported_comes_first() -> None:
    first = INCIDENT._replace(id="a", supports=(signal("heat").above(100, WHY),))
    second = INCIDENT._replace(id="b", supports=(signal("heat").above(1, WHY),))
    found = judge([first, second], heat=[2] * 10, noise=[2] * 10)
    assert [(each.incident.id, each.primary) for each in found] == [("b", True), ("a", False)]


def test_a_measured_loss_makes_a_warning_critical() -> None:
    grave = INCIDENT._replace(escalates=signal("heat").above(10, WHY))
    assert judge([grave], heat=[2] * 10, noise=[2] * 10)[0].severity == "warning"
    assert judge([grave], heat=[20] * 10, noise=[2] * 10)[0].severity == "critical"


def test_a_look_alike_is_ruled_out_by_what_it_lacks() -> None:
    other = INCIDENT._replace(id="other", symptoms=(signal("smell").above(1, WHY),))
    one = INCIDENT._replace(
        looks_like=(LookAlike("other", distinguish=""), LookAlike("unheard_of", distinguish="ask somebody"))
    )
    found = judge([one, other], heat=[2] * 10, noise=[2] * 10, smell=[0.5] * 10)[0]
    assert [(each.name, each.evidence) for each in found.refuted] == [("other", "0.5; it requires > 1")]
    assert [each.name for each in found.open] == ["unheard_of"]


def test_an_info_is_never_the_primary() -> None:
    assert not judge([INCIDENT._replace(severity="info")], heat=[2] * 10, noise=[2] * 10)[0].primary


def test_a_limit_of_the_contract_is_read_from_it() -> None:
    named = INCIDENT._replace(symptoms=(signal("heat").above("queue_seconds", WHY),))
    assert judge([named], heat=[1.5] * 10)[0].symptoms[0].limit == Contract().queue_seconds
