"""Three-valued decisions, causes that nest what they explain, and times, on samples small enough to see through."""

from collections.abc import Sequence

import numpy as np
import pytest

from diag import promql
from diag.core.contract import Contract
from diag.core.incident import BurnRateWindow, Effect, Incident, LookAlike, Signal, judged
from diag.diagnosis.diagnose import Diagnosis, diagnose
from diag.diagnosis.query_cache import QueryCache
from diag.report.sentences import ruled_out
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
def test_false_overrides_missing_and_missing_overrides_present(heat: float, noise: float, state: str) -> None:
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
def test_incident_that_cannot_be_ruled_out_at_the_end_is_not_absent(noise: list[float], state: str) -> None:
    assert judge([INCIDENT], heat=[2] * 10, noise=noise)[0].state == state


def test_missing_signal_is_named() -> None:
    assert judge([INCIDENT], heat=[2] * 10)[0].missing == ("noise",)


def test_decided_incident_evaluates_other_conditions_only_for_a_report(
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


def test_past_incident_has_a_start_and_an_end() -> None:
    found = judge([INCIDENT], heat=[0] * 8 + [2] * 4 + [0] * 8, noise=[2] * 20)[0]
    assert (found.state, found.ongoing) == ("present", False)
    assert (found.since, found.until) == (START / 1000 + 8, START / 1000 + 11)


def test_incident_present_since_the_first_scrape_has_no_start() -> None:
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
def test_incident_that_returns_after_a_healthy_time_is_another_episode(
    noise: list[float], episodes: list[tuple[float | None, float]]
) -> None:
    found = judge([INCIDENT], heat=[2] * 15, noise=noise)[0]
    seconds = [
        (since if since is None else since - START / 1000, until - START / 1000) for since, until in found.episodes
    ]
    assert seconds == episodes
    assert (found.since, found.until) == (found.episodes[0][0], found.episodes[-1][1])


def test_violated_slo_is_ordered_after_causes_and_before_harmless_incidents() -> None:
    slo = INCIDENT._replace(id="a_slo", severity="critical", burns=(BurnRateWindow(6, "6h", "30m"),))
    info = INCIDENT._replace(id="an_info", severity="info")
    found = judge([slo, INCIDENT, info], heat=[2] * 10, noise=[2] * 10)
    assert [each.incident.id for each in found] == ["cause", "a_slo", "an_info"]
    assert [each.primary for each in found] == [True, False, False]


def test_consequences_are_nested_below_their_cause() -> None:
    cause, effect = INCIDENT._replace(explains=("effect",)), INCIDENT._replace(id="effect")
    found = {each.incident.id: each for each in judge([effect, cause], heat=[2] * 10, noise=[2] * 10)}
    assert (found["cause"].primary, found["effect"].primary) == (True, False)
    assert found["effect"].explained_by == "cause"


def test_consequence_of_several_incidents_is_nested_under_the_root_cause() -> None:
    """Not under the first of the alphabet."""
    root = INCIDENT._replace(id="root", explains=("between", "effect"))
    between, effect = INCIDENT._replace(id="between", explains=("effect",)), INCIDENT._replace(id="effect")
    found = judge([between, effect, root], heat=[2] * 10, noise=[2] * 10)
    assert {each.incident.id: each.explained_by for each in found} == {
        "root": None,
        "between": "root",
        "effect": "root",
    }


@pytest.mark.parametrize(
    ("heat", "smell", "explained_by"),
    [
        ([0] * 6 + [2] * 14, [0] * 9 + [2] * 11, {"heat": None, "smell": "heat"}),
        ([0] * 9 + [2] * 11, [0] * 6 + [2] * 14, {"heat": "smell", "smell": None}),
        ([0] * 6 + [2] * 14, [0] * 6 + [2] * 14, {"heat": None, "smell": None}),
        ([0] * 6 + [2] * 6 + [0] * 8, [0] * 9 + [2] * 11, {"heat": None, "smell": None}),
    ],
    ids=["the first", "the second", "at once", "a cause that has ended"],
)
def test_earlier_of_two_incidents_that_may_explain_each_other_leads(
    heat: list[float], smell: list[float], explained_by: dict[str, str | None]
) -> None:
    first, second = (
        INCIDENT._replace(
            id=name, symptoms=(signal(name).above(1, WHY),), may_explain=(Effect(other, began_first=True),)
        )
        for name, other in (("heat", "smell"), ("smell", "heat"))
    )
    found = judge([first, second], heat=heat, smell=smell)
    assert {each.incident.id: each.explained_by for each in found} == explained_by


@pytest.mark.parametrize(("room", "explained_by"), [(2, "cause"), (0, None), (MISSING, None)])
def test_a_cause_under_a_condition_needs_its_evidence(room: float, explained_by: str | None) -> None:
    has_room = signal("room").above(1, WHY)
    cause = INCIDENT._replace(supports=(has_room,), may_explain=(Effect("effect", where=(has_room,)),))
    effect = INCIDENT._replace(id="effect", severity="critical")
    found = {each.incident.id: each for each in judge([effect, cause], heat=[2] * 10, noise=[2] * 10, room=[room] * 10)}
    assert found["effect"].explained_by == explained_by
    assert found["cause"].severity == ("critical" if explained_by else "warning"), "as grave as what it has caused"


def test_unexplained_incident_with_more_evidence_comes_first() -> None:
    first = INCIDENT._replace(id="a", supports=(signal("heat").above(100, WHY),))
    second = INCIDENT._replace(id="b", supports=(signal("heat").above(1, WHY),))
    found = judge([first, second], heat=[2] * 10, noise=[2] * 10)
    assert [(each.incident.id, each.primary) for each in found] == [("b", True), ("a", False)]


def test_a_measured_loss_makes_a_warning_critical() -> None:
    grave = INCIDENT._replace(escalates=signal("heat").above(10, WHY))
    assert judge([grave], heat=[2] * 10, noise=[2] * 10)[0].severity == "warning"
    assert judge([grave], heat=[20] * 10, noise=[2] * 10)[0].severity == "critical"


@pytest.mark.parametrize(
    ("heat", "severity", "with_effect"), [(2, "info", "critical"), (20, "warning", "warning")], ids=["mild", "serious"]
)
def test_a_mild_incident_is_an_info_and_as_grave_as_what_it_explains(
    heat: float, severity: str, with_effect: str
) -> None:
    serious, (mild, *_) = signal("heat").above(10, WHY), INCIDENT.symptoms
    graded = INCIDENT._replace(supports=(serious,), serious=serious, mild=mild, explains=("effect",))
    effect = INCIDENT._replace(id="effect", severity="critical")
    assert judge([graded], heat=[heat] * 10, noise=[2] * 10)[0].severity == severity
    assert judge([effect, graded], heat=[heat] * 10, noise=[2] * 10)[0].severity == with_effect
    assert graded.alerting == (serious, *INCIDENT.conditions[1:])


def test_look_alike_is_ruled_out_by_its_missing_requirement() -> None:
    other = INCIDENT._replace(id="other", symptoms=(signal("smell").above(1, WHY),))
    one = INCIDENT._replace(
        looks_like=(LookAlike("other", distinguish=""), LookAlike("unheard_of", distinguish="ask somebody"))
    )
    found = judge([one, other], heat=[2] * 10, noise=[2] * 10, smell=[0.5] * 10)[0]
    assert ruled_out(found) == [("other", "0.5; it requires > 1")]
    assert [each.name for each in found.open] == ["unheard_of"]


def test_an_info_is_never_the_primary() -> None:
    assert not judge([INCIDENT._replace(severity="info")], heat=[2] * 10, noise=[2] * 10)[0].primary


def test_slo_threshold_is_read_from_diag_toml() -> None:
    named = INCIDENT._replace(symptoms=(signal("heat").above("queue_seconds", WHY),))
    assert judge([named], heat=[1.5] * 10)[0].symptoms[0].limit == Contract().queue_seconds
