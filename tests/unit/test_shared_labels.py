"""The label that separates ill from healthy servers: found where it does, and never where chance explains it."""

import random
from collections.abc import Mapping, Sequence

import pytest
from support.sampling import some

from diag.core.incident import Incident, Severity
from diag.diagnosis.diagnose import Diagnosis, State
from diag.diagnosis.progress import NotJudged
from diag.diagnosis.report import Observed, Report
from diag.diagnosis.shared_labels import IllGroup, SharedLabel, ill_groups, shared_labels
from diag.report import sentences as words
from diag.sources.prometheus.properties import DRIVER, GPU, MODEL, VERSION, Properties, Property

POOL, ZONE, CLUSTER = (Property("label", name) for name in ("pool", "zone", "cluster"))
QUEUED = "Requests queue while the KV cache has room (queue_saturation)"


def names(count: int, first: int = 0) -> tuple[str, ...]:
    return tuple(f"s{number}:8000" for number in range(first, first + count))


def group(ill: int, healthy: int, began: Sequence[int] = ()) -> IllGroup:
    """So many ill servers before so many healthy ones."""
    return IllGroup("queue_saturation", names(ill), names(healthy, ill), dict.fromkeys(names(ill), frozenset(began)))


def column(*runs: tuple[str, int]) -> dict[str, tuple[str, ...]]:
    """A value for each server: so many have the first, so many the next."""
    values = [value for value, count in runs for _ in range(count)]
    return {name: (value,) for name, value in zip(names(len(values)), values, strict=True)}


def counts(found: Sequence[SharedLabel]) -> list[tuple[str, str, int, int, int | None, int | None]]:
    return [
        (one.property.name, one.value, one.ill_with, one.ill, one.healthy_with, one.healthy) for one in found
    ]  # fmt: skip


def sentence(found: SharedLabel, not_judged: tuple[NotJudged, ...] = ()) -> str:
    observed = Observed("prometheus", "", 0, 0, 0, 0)
    return words.shared_sentence(found, Report(observed, "warning", (), (), not_judged, ()))


def test_a_pool_that_only_the_ill_servers_are_in_is_found() -> None:
    found = shared_labels([group(6, 194)], {POOL: column(("b", 6), ("a", 100), ("c", 94)), ZONE: column(("1", 200))})
    assert counts(found) == [("pool", "b", 6, 6, 0, 194)]
    assert found[0].servers == names(6)


def test_a_label_that_nearly_all_ill_and_few_healthy_servers_have_is_found_with_its_counts() -> None:
    rooms = column(("warm", 40), ("cold", 3), ("warm", 2), ("cold", 155))
    found = shared_labels([group(43, 157)], {Property("label", "room"): rooms})
    assert counts(found) == [("room", "warm", 40, 43, 2, 157)]
    assert sentence(found[0]) == (
        f'{QUEUED} on 43 servers: 40 of 43 have room="warm"; 2 of the 157 healthy servers do.'
    )


@pytest.mark.parametrize(
    "pools",
    [
        column(("b", 20)),  # one value everywhere
        column(*((f"p{number}", 1) for number in range(20))),  # a value of its own for each server
        column(("b", 4), ("a", 2), ("a", 14)),  # not nearly all of the ill
        column(("b", 6), ("b", 5), ("a", 9)),  # many of the healthy as well
        column(("", 6), ("a", 14)),  # a label that the ill servers lack
    ],
    ids=("everywhere", "unique", "too few ill", "too many healthy", "missing"),
)
def test_a_label_that_does_not_separate_is_not_reported(pools: Mapping[str, tuple[str, ...]]) -> None:
    assert shared_labels([group(6, 14)], {POOL: dict(pools)}) == ()


def test_a_label_that_chance_explains_is_not_reported() -> None:
    """Three of ten servers are in one pool of three by chance once in 120 draws."""
    properties: Properties = {POOL: column(("b", 3), ("a", 7)), ZONE: column(("1", 5), ("2", 5))}
    assert counts(shared_labels([group(3, 7)], properties)) == [("pool", "b", 3, 3, 0, 7)]
    others = {ZONE: column(("1", 4), ("2", 3), ("3", 3))}
    assert shared_labels([group(3, 7)], {**properties, **others}) == ()


def test_without_healthy_servers_nothing_is_reported() -> None:
    assert shared_labels([group(20, 0)], {POOL: column(("b", 20))}) == ()


def test_a_server_without_telemetry_counts_against_the_label() -> None:
    gpus = column(("H100", 10), ("A100", 90))
    assert shared_labels([group(10, 90)], {GPU: gpus})
    unknown = {name: values for at, (name, values) in enumerate(gpus.items()) if at < 10 or at >= 30}
    assert shared_labels([group(10, 90)], {GPU: unknown}) == ()
    few = {name: values for at, (name, values) in enumerate(gpus.items()) if at != 9 and at < 95}
    assert counts(shared_labels([group(10, 90)], {GPU: few})) == [("GPU", "H100", 9, 10, 0, 85)]


def test_most_specific_label_of_equal_sets_is_named_with_the_others_beside_it() -> None:
    same = column(("x", 6), ("y", 94))
    properties: Properties = {CLUSTER: same, DRIVER: same, ZONE: same, VERSION: same, POOL: same}
    (found,) = shared_labels([group(6, 94)], properties)
    assert [found.property, *(item for item, _ in found.also)] == [POOL, DRIVER, VERSION, ZONE, CLUSTER]
    assert sentence(found) == (
        f'{QUEUED} on 6 servers: all 6 have pool="x" (also GPU driver x, vLLM x, zone="x" and 1 more); '
        "0 of the 94 healthy servers do."
    )


@pytest.mark.parametrize(
    ("name", "place"), [("topology_kubernetes_io_zone", 1), ("cloud_google_com_gke_nodepool", 0), ("cooling", 0)]
)
def test_a_label_of_kubernetes_has_the_place_of_its_last_word(name: str, place: int) -> None:
    same = column(("x", 6), ("y", 94))
    label, room = Property("label", name), Property("label", "site")
    (found,) = shared_labels([group(6, 94)], {label: same, room: same})
    assert [found.property, found.also[0][0]].index(label) == place


def test_the_label_with_the_larger_difference_is_named() -> None:
    properties: Properties = {
        POOL: column(("b", 6), ("a", 14), ("b", 4), ("a", 76)),
        MODEL: column(("m", 6), ("n", 94)),
    }
    (found,) = shared_labels([group(6, 94)], properties)
    assert found.property == MODEL and found.also == ()


@pytest.mark.parametrize(
    ("item", "value", "text"),
    [
        (VERSION, "0.24.0", "run vLLM 0.24.0"),
        (MODEL, "qwen", "serve model qwen"),
        (GPU, "NVIDIA L4", "have GPU NVIDIA L4"),
        (Property("flag", "max_num_seqs"), "64", "run with --max-num-seqs 64"),
        (Property("flag", "enable_prefix_caching"), "false", "run with --no-enable-prefix-caching"),
        (Property("label", "pool"), "b\n\x1b[31m", 'have pool="b\\n\\x1b[31m"'),
    ],
)
def test_each_property_has_its_sentence(item: Property, value: str, text: str) -> None:
    (found,) = shared_labels([group(6, 94)], {item: column((value, 6), ("other", 94))})
    assert sentence(found) == (f"{QUEUED} on 6 servers: all 6 {text}; 0 of the 94 healthy servers do.")


def test_servers_are_not_called_healthy_if_something_could_not_be_judged() -> None:
    (found,) = shared_labels([group(6, 94)], {POOL: column(("b", 6), ("a", 94))})
    assert sentence(found, (NotJudged("too few scrapes"),)).endswith("; 0 of the 94 servers without an incident do.")


@pytest.mark.slow
def test_random_labels_give_almost_never_a_report() -> None:
    wrong = 0
    seeds = some(range(1000), 250)
    for seed in seeds:
        draw = random.Random(seed)
        total, ill = draw.choice([(12, 4), (40, 5), (100, 40), (200, 6)])
        properties = {
            Property("label", f"l{at}"): {
                name: (str(draw.randrange(draw.choice([2, 4, 20]))),) for name in names(total)
            }
            for at in range(30)
        }
        wrong += bool(shared_labels([group(ill, total - ill)], properties))
    assert wrong <= 0.003 * len(seeds)


def test_random_partitions_that_match_in_size_are_reported_at_most_once_in_a_hundred() -> None:
    """The worst case: pools exactly as large as the number of ill servers."""
    wrong = 0
    for seed in range(1000):
        draw, servers = random.Random(seed), names(12)
        pools = {Property("label", f"l{at}"): draw.sample(servers, 4) for at in range(5)}
        properties = {item: {name: (str(name in held),) for name in servers} for item, held in pools.items()}
        wrong += bool(shared_labels([group(4, 8)], properties))
    assert wrong <= 10


# -- hours of the day -------------------------------------------------------------------------------------------------


def test_hours_that_all_ill_servers_share_are_reported_beside_the_label() -> None:
    found = shared_labels([group(40, 60, began=(11, 12))], {POOL: column(("b", 40), ("a", 60))})
    assert [(one.property.kind, one.value, one.healthy) for one in found] == [
        ("label", "b", 60),
        ("hour", "11:00-13:00", None),
    ]


@pytest.mark.parametrize("began", [(), (11, 15), (9, 10, 11, 12)], ids=("unknown", "apart", "too long"))
def test_hours_that_are_no_window_of_three_are_not_reported(began: Sequence[int]) -> None:
    assert shared_labels([group(40, 60, began)], {}) == ()


def test_hours_of_few_servers_are_not_reported_if_chance_explains_them() -> None:
    assert shared_labels([group(3, 60, (11, 12, 13))], {}) == ()


def test_hours_over_midnight_are_one_window() -> None:
    (found,) = shared_labels([group(8, 2, (23, 0))], {})
    assert sentence(found) == f"{QUEUED} began between 23:00 and 01:00 UTC on all 8 servers."


# -- which servers are compared ---------------------------------------------------------------------------------------

DAY = tuple(1_700_006_400.0 + 900 * at for at in range(97))  # from 00:00 UTC on


def incident(name: str, severity: Severity = "warning") -> Incident:
    return Incident(
        id=name,
        title="",
        severity=severity,
        per=("instance",),
        cause="",
        impact="",
        symptoms=(),
        looks_like=(),
        fixes=(),
    )


def diagnosed(
    server: str, state: State, name: str = "heat", severity: Severity = "warning", since: float | None = None
) -> Diagnosis:
    present = state == "present"
    return Diagnosis(
        incident=incident(name, severity),
        subject=(("instance", server),),
        state=state,
        severity=severity,
        since=since,
        until=DAY[-1] if present else None,
        episodes=((since, DAY[-1]),) if present else (),
        ongoing=present,
        instants=DAY,
        symptoms=(),
        supports=(),
        escalation=(),
    )


def test_healthy_are_the_servers_on_which_the_incident_is_absent_and_no_other_is_present() -> None:
    diagnoses = [
        *(diagnosed(name, "present") for name in "abc"),
        diagnosed("d", "absent"),
        diagnosed("e", "unknown"),
        diagnosed("f", "absent"),
        diagnosed("f", "present", "other"),
        diagnosed("g", "absent"),
        diagnosed("g", "unknown"),
        diagnosed("h", "absent"),
        diagnosed("i", "absent"),
        diagnosed("i", "present", "note", "info"),
    ]
    (found,) = ill_groups(diagnoses, frozenset({"h"}))
    assert (found.incident, found.ill, found.healthy) == ("heat", ("a", "b", "c"), ("d", "i"))


def test_an_incident_that_has_ended_counts_and_an_info_does_not() -> None:
    ended = [diagnosed(name, "present")._replace(severity="info", ongoing=False) for name in "abc"]
    (found,) = ill_groups(
        [*ended, diagnosed("d", "absent"), *(diagnosed(name, "present", "i", "info") for name in "efg")]
    )
    assert (found.incident, found.ill, found.healthy) == ("heat", ("a", "b", "c"), ("d",))


def test_servers_that_recorded_conditions_clear_are_healthy_unless_they_are_gone() -> None:
    diagnoses = [diagnosed(name, "present") for name in "abc"]
    (found,) = ill_groups(diagnoses, frozenset({"e"}), {"heat": frozenset("def")}.__getitem__)
    assert found.healthy == ("d", "f")


@pytest.mark.parametrize(
    "diagnoses",
    [
        [diagnosed(name, "absent") for name in "abcd"],
        [diagnosed(name, "present") for name in "ab"],
        [diagnosed(name, "present", severity="info") for name in "abc"],
        [diagnosed(name, "present")._replace(explained_by="other") for name in "abc"],
        [diagnosed(name, "unknown") for name in "abc"],
        [diagnosed("a", "present")] * 3,  # three GPUs of one server
    ],
    ids=("healthy", "two", "info", "explained", "unknown", "one server"),
)
def test_a_fleet_without_several_ill_servers_has_no_group(diagnoses: Sequence[Diagnosis]) -> None:
    assert ill_groups(diagnoses) == ()


def test_hours_hold_the_time_by_which_an_incident_shows_late() -> None:
    noon = DAY[48]
    (found,) = ill_groups([diagnosed(name, "present", since=noon + 900) for name in "abc"])
    assert set(found.began.values()) == {frozenset({11, 12})}  # the window of five minutes and one instant before


@pytest.mark.parametrize(("since", "hours"), [(None, 97), (DAY[48], 40)], ids=("from the start", "half a day"))
def test_hours_are_unknown_without_a_start_or_the_other_hours(since: float | None, hours: int) -> None:
    short = [diagnosed(name, "present", since=since)._replace(instants=DAY[:hours]) for name in "abc"]
    (found,) = ill_groups(short)
    assert set(found.began.values()) == {frozenset()}
