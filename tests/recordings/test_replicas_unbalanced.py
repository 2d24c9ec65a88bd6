"""A replica that holds far more than its peers is named, and nobody else: not an even fleet, a full one, a standby."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support import rewriting as re
from support.sampling import some
from support.simulated_vllm import Engine, Limits, Request, page

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.incident import regroup
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.knowledge.formulas import formula
from diag.promql import Block, Samples, evaluate
from diag.report import terminal
from diag.signals import load_of_peers, sign_of_imbalance

ID = "replicas_unbalanced"
LABELS = ("job", "namespace", "cluster", "region")
HOT, EVEN, IDLE, OTHER = "queue_saturation", "healthy", "idle", "healthy under another name"
FLEETS = {
    (HOT, EVEN, EVEN): ["r0:8000"],
    (EVEN, IDLE, HOT, IDLE): ["r2:8000"],
    (HOT, EVEN, HOT, EVEN, EVEN): ["r0:8000", "r2:8000"],
    (HOT, EVEN, EVEN, OTHER): ["r0:8000"],
    (EVEN, EVEN, EVEN): [],
    (IDLE, IDLE, IDLE): [],
    (EVEN, EVEN, IDLE): [],  # a new replica takes little yet
    (EVEN, IDLE, IDLE): [],  # uneven, and nobody waits
    (HOT, HOT, HOT): [],
    (HOT, HOT, EVEN): [],  # most of the fleet waits
    (HOT, EVEN): ["r0:8000"],
    (EVEN, HOT): ["r1:8000"],
    (HOT, HOT): [],
    (EVEN, EVEN): [],
    (HOT, IDLE): [],  # a standby
    (HOT,): [],
    (HOT, EVEN, OTHER): ["r0:8000"],
    (HOT, OTHER, OTHER): [],
}
"""What the replicas r0:8000 on do, and those of them that are to be named."""


def server(name: str) -> Iterable[re.Scrape]:
    """A recording, a scrape every 2 s."""
    pages = re.thinned(re.scrapes(EVEN if name == OTHER else name), 2)
    return re.changed(pages, lambda page: re.of_model(page, "other")) if name == OTHER else pages


def judged(folder: Path, scrapes: Iterable[re.Scrape]) -> Report:
    return doctor.run(ObserveOptions([str(re.write(folder, scrapes))]))


def found(report: Report, incident: str = ID) -> list[Diagnosis]:
    """Return the findings of an incident by replica and engine."""
    every = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == incident)
    return sorted(every, key=lambda each: each.subject[::-1])


def named(report: Report, label: str = "instance") -> list[str]:
    return [dict(each.subject)[label] for each in found(report) if each.state == "present"]


@pytest.mark.parametrize("names", some(FLEETS, 4), ids=" ".join)
def test_only_the_deviating_replica_is_named(tmp_path: Path, names: tuple[str, ...]) -> None:
    report = judged(tmp_path, re.side_by_side(*map(server, names)))
    assert named(report) == FLEETS[names]
    assert [each.state for each in found(report)].count("absent") == len(names) - len(FLEETS[names])


@pytest.mark.parametrize(("running", "waiting", "names"), [(64, 40, ["r0:8000"]), (10, 0, []), (9, 2, [])])
def test_replica_of_a_pair_is_compared_with_the_other(
    tmp_path: Path, running: int, waiting: int, names: list[str]
) -> None:
    def holds(running: int, waiting: int) -> Iterable[re.Scrape]:
        numbers = {"running": running, "waiting": waiting}
        pages = server(EVEN)
        for state, number in numbers.items():
            pages = re.changed(pages, partial(re.with_value, series=f"vllm:num_requests_{state}{{", value=f"{number}"))
        return pages

    assert named(judged(tmp_path, re.side_by_side(holds(running, waiting), holds(6, 0)))) == names


@pytest.mark.parametrize(
    ("engine", "beside", "advice"),
    [("1", re.as_ranks, "Other ranks of this server have room"), ("0", re.side_by_side, "Balance by the load of each")],
    ids=["ranks", "replicas"],
)
def test_ranks_and_replicas_are_peers_with_advice_of_their_own(
    tmp_path: Path, engine: str, beside: Callable[..., Iterable[re.Scrape]], advice: str
) -> None:
    report = judged(tmp_path, beside(*map(server, (EVEN, HOT, EVEN))))
    assert named(report, "engine") == [engine]
    (finding,) = (each for each in report.present if each.diagnosis.incident.id == ID)
    assert finding.proposals[0].text.startswith(advice)
    assert len({"rank" in each.text for each in finding.proposals}) == 1


@pytest.mark.parametrize("change", [re.before_0_9_2, re.before_0_8_3], ids=lambda each: each.__name__)
def test_an_older_release_is_judged_the_same(tmp_path: Path, change: Callable[[str], str]) -> None:
    report = judged(tmp_path, re.changed(re.side_by_side(*map(server, (HOT, EVEN, EVEN))), change))
    assert named(report) == ["r0:8000"]


def test_replica_without_telemetry_is_unknown_and_no_peer(tmp_path: Path) -> None:
    blind = re.changed(server(EVEN), lambda _: "process_cpu_seconds_total 1\n")
    report = judged(tmp_path, re.side_by_side(server(HOT), server(EVEN), blind))
    assert [each.state for each in found(report)] == ["present", "absent", "unknown"]


def test_queue_on_the_deviating_replica_is_a_consequence(tmp_path: Path) -> None:
    report = judged(tmp_path, re.side_by_side(*map(server, (HOT, EVEN, EVEN))))
    assert [each.explained_by for each in found(report, "queue_saturation")] == [ID, None, None]
    assert found(report)[0].primary


def stuck() -> Iterable[re.Scrape]:
    """A stall up to its last moments, before which 20 more requests were sent there than were recorded."""
    stalled = list(server("engine_stalled"))[:30]
    return re.changed(stalled, lambda page: re.with_value(page, "vllm:num_requests_waiting{", "20"))


def test_imbalance_is_the_cause_where_a_replica_generates_more_than_its_peers_and_else_a_consequence(
    tmp_path: Path,
) -> None:
    evicting, *well = map(server, ("kv_cascade", EVEN, EVEN, EVEN))
    report = judged(tmp_path, re.side_by_side(stuck(), evicting, *well))
    causes = [each.explained_by for each in found(report) if each.state == "present"]
    assert causes == ["engine_stalled", None]
    assert found(report, "engine_stalled")[0].primary and found(report)[1].primary
    assert found(report, "kv_eviction_cascade")[1].explained_by == ID


def test_replica_with_fewer_tokens_may_be_slow_and_one_with_more_is_not(tmp_path: Path) -> None:
    report = judged(tmp_path, re.side_by_side(stuck(), server(HOT), server(EVEN), server(EVEN), server(EVEN)))
    slow, hot, *_ = found(report)
    assert "a slow replica" in {each.name for each in slow.open}
    assert "a slow replica" in {each.name for each in hot.refuted}


def of_server(number: int, running: float, waiting: float, **labels: str) -> Block:
    """The load of a server over six minutes."""
    own = {"instance": f"r{number}:8000", "engine": "0", "model_name": "m", **labels}
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    values = np.repeat([[running], [waiting]], 24, axis=1)
    return Block(tuple({"__name__": name, **own} for name in names), np.arange(0, 360_000, 15_000), values)


@pytest.mark.parametrize("other", [[], [(12, 0)]], ids=["a pair", "three"])
def test_one_scrape_dates_an_imbalance(other: list[tuple[int, int]]) -> None:
    """A mean needs three samples: where scrapes come a bit late, no short window holds them."""
    blocks = [of_server(number, *load) for number, load in enumerate([(64, 40), (12, 0), *other])]
    written = formula(sign_of_imbalance, ("instance", "engine"), "20s", Contract()).written_out()
    vector = evaluate(written, Samples(blocks), np.array([300_000]))
    assert {own["instance"]: value for own, (value,) in zip(vector.labels, vector.values, strict=True)} == {
        f"r{number}:8000": number == 0 for number in range(len(blocks))
    }


@pytest.mark.parametrize("label", ["", "job", "namespace", "cluster", "region"])
def test_production_is_not_compared_with_staging(label: str) -> None:
    """Two servers of one model are loaded, those of staging are idle: they differ in one label of the site."""
    site = ("cluster", "region", "pod")
    loads = ((64, 40), (60, 38), (1, 0), (1, 0))
    blocks = [
        of_server(number, *load, **{name: "staging" if (name == label and number > 1) else "prod" for name in LABELS})
        for number, load in enumerate(loads)
    ]
    pods = [Block(tuple({**own, "pod": own["instance"]} for own in each.labels), *each[1:]) for each in blocks]
    written = formula(load_of_peers, ("instance", "engine"), "5m", Contract()).written_out()
    vector = evaluate(regroup(written, site), Samples(pods), np.array([300_000]))
    assert (vector.values.max() > 2) == (not label)
    if label in ("", "job", "namespace"):
        vector = evaluate(written, Samples(blocks), np.array([300_000]))
        assert (vector.values.max() > 2) == (not label)


def test_deferred_requests_are_no_load_to_balance(tmp_path: Path) -> None:
    """All of the 19 waiting requests of the replica wait for their KV transfers."""

    def deferred(page: str) -> str:
        waiting = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason='
        return re.with_value(re.with_value(page, f'{waiting}"capacity"', "0"), f'{waiting}"deferred"', "19")

    transfers = re.changed(server(HOT), deferred)
    assert named(judged(tmp_path, re.side_by_side(transfers, server(EVEN), server(EVEN)))) == []


def fleet(
    *kinds: Limits, rate: float = 2.5, prompts: tuple[int, ...] = (), rates: tuple[float, ...] = ()
) -> list[re.Scrape]:
    """Engines of one model that get requests at the same rate, or at `rates`, scraped every 5 s for 6 min."""
    begun = 1_795_000_000.0

    def pages(number: int, limits: Limits) -> Iterable[re.Scrape]:
        draw, engine = random.Random(number), Engine(limits, begun - 3600)
        engine.now = at = begun
        prompt = prompts[number] if prompts else 300
        while (at := at + draw.expovariate(rates[number] if rates else rate)) < begun + 360:
            engine.send(Request(at, prompt, 1 if limits.connector == "kv_producer" else draw.randint(60, 140)))
        for time in range(5, 360, 5):
            engine.run(begun + time)
            yield begun + time, "v:8000", page([engine])

    return re.side_by_side(*(pages(number, limits) for number, limits in enumerate(kinds)))


EVEN_KIND, SLOW = Limits(), Limits(step=0.1)


@pytest.mark.parametrize(
    ("kinds", "prompts", "names"),
    [
        ((EVEN_KIND, EVEN_KIND, SLOW, EVEN_KIND), (), ["r2:8000"]),
        ((EVEN_KIND, SLOW), (), ["r1:8000"]),
        ((EVEN_KIND, EVEN_KIND, Limits(step=0.03), EVEN_KIND), (), []),  # a little slower
        ((Limits(token=0.0002),) * 4, (300, 300, 1200, 300), []),  # longer prompts
        ((SLOW, SLOW, SLOW), (), []),  # all of them are of this kind
    ],
    ids=["slow", "a slow one of two", "a little slower", "longer prompts", "all slow"],
)
def test_a_slow_replica_is_told_before_requests_wait(
    tmp_path: Path, kinds: tuple[Limits, ...], prompts: tuple[int, ...], names: list[str]
) -> None:
    """It takes as many requests as its peers, and has a free place for each of them."""
    report = judged(tmp_path, fleet(*kinds, prompts=prompts))
    assert named(report) == names
    texts = [
        proposal.text for each in report.present if each.diagnosis.incident.id == ID for proposal in each.proposals
    ]
    assert [text.startswith("Find why this replica is slower") for text in texts] == [True] * len(names)


@pytest.mark.parametrize(
    ("each", "rates", "names"),
    [
        (0.0005, (8, 8, 1, 1, 1, 1), ["r0:8000", "r1:8000"]),
        (0.00015, (8, 8, 1, 1, 1, 1), []),  # its tokens come as soon as those of its peers
        (0.0005, (5, 5, 2.5, 3, 2, 2), []),  # sessions that stay with their replica
        (0.0005, (1, 0.1, 0.1, 0.1), []),  # a small fleet at night
    ],
    ids=["two carry all", "their ITL is alike", "affinity", "low load"],
)
def test_replicas_that_carry_nearly_all_are_an_info_while_nobody_waits(
    tmp_path: Path, each: float, rates: tuple[float, ...], names: list[str]
) -> None:
    report = judged(tmp_path, fleet(*[Limits(each=each)] * len(rates), rates=rates))
    assert (report.verdict, named(report)) == ("healthy", names)
    assert {one.severity for one in found(report) if one.state == "present"} <= {"info"}
    assert (ID in terminal.render(report)) is bool(names)


def test_a_decode_server_is_no_peer_of_a_prefill_server(tmp_path: Path) -> None:
    """The prefill server cannot follow: nobody can take its requests."""
    prefill = Limits(connector="kv_producer", max_num_seqs=2, step=1.2)
    report = judged(tmp_path, fleet(prefill, Limits(connector="kv_consumer")))
    assert named(report) == []


def test_two_decode_servers_are_peers(tmp_path: Path) -> None:
    decode = Limits(connector="kv_consumer")
    prefill = Limits(connector="kv_producer")
    report = judged(tmp_path, fleet(decode, replace(decode, max_num_seqs=2), prefill, decode))
    assert named(report) == ["r1:8000"]


def test_a_full_kv_cache_of_the_usual_size_is_no_smaller_one(tmp_path: Path) -> None:
    small = Limits(num_gpu_blocks=400, max_num_seqs=128)
    report = judged(tmp_path, fleet(small, replace(small, step=0.1), small, rate=2.0, prompts=(900, 900, 900)))
    (finding,) = (each for each in report.present if each.diagnosis.incident.id == ID)
    assert [one.text for one in finding.proposals if one.text.startswith("Give this replica")] == []


@pytest.mark.parametrize(("blocks", "is_told"), [(400, True), (20_000, False)])
def test_a_replica_with_a_smaller_kv_cache_is_told_so(tmp_path: Path, blocks: int, is_told: bool) -> None:
    """Requests wait for its KV cache, or for its sequence cap while the KV cache has room."""
    small = Limits(num_gpu_blocks=blocks, max_num_seqs=128 if is_told else 3)
    report = judged(tmp_path, fleet(Limits(), small, Limits(), rate=4.0, prompts=(900, 900, 900)))
    (finding,) = (each for each in report.present if each.diagnosis.incident.id == ID)
    assert named(report) == ["r1:8000"]
    assert finding.proposals[0].text.startswith("Give this replica the KV cache of its peers") == is_told


def test_a_replica_that_was_just_restarted_is_no_peer(tmp_path: Path) -> None:
    """Its work went to the other one, and it is idle since: the tokens of its former process are no work of its own."""
    first, scrapes = 1_795_000_000.0, []
    for number in range(2):
        engine, draw, at = Engine(Limits(max_num_seqs=12), first - 600), random.Random(number), -600.0
        while (at := at + draw.expovariate(3.0 if at < 600 else 6.0)) < 800:
            if number == 0 or at < 600:
                engine.send(Request(first + at, 400, 200))
        for time in range(0, 800, 15):
            engine = Engine(Limits(), first + 620) if number and time == 645 else engine
            engine.run(first + time)
            scrapes.append((first + time, f"r{number}:8000", page([engine]) * (not number or not 600 <= time < 645)))
    report = judged(tmp_path / "recording", sorted(scrapes))
    assert [each for each in report.present if each.diagnosis.incident.id == ID] == []
