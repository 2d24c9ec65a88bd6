"""Selection of a Prometheus' servers: by instance, job, model and any label, and by a site's own labels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import prometheus_server, rewriting, top_views
from support.paths import RECORDINGS
from support.prometheus_server import PLACES, Server, program

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.commands.top import make_app
from diag.core.contract import Contract
from diag.core.formatting import moment
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report
from diag.knowledge.catalog import load
from diag.knowledge.formulas import formula
from diag.promql import Block, Samples, add_matchers, evaluate
from diag.sources.observation import Observation
from diag.sources.prometheus.scope import Scope, TimeSpan, parse_time
from diag.sources.recording.reader import read

SICK, WELL = "kv_cascade", "healthy"
BEGIN = 1_795_000_000_000


def labelled(name: str, **labels: str) -> list[Block]:
    """The samples of a recording with these labels of its target; all recordings begin at once."""
    seen = read(RECORDINGS / name)
    shift = BEGIN - int(seen.instants[0])
    return [
        block._replace(labels=tuple({**each, **labels} for each in block.labels), times=block.times + shift)
        for block in seen.samples.select([])
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A sick and a healthy server of two clusters, jobs and models, and a target that is no vLLM."""
    sick = labelled(SICK, instance="sick:8000", job="chat", cluster="eu", model_name="large")
    well = labelled(WELL, instance="well:8000", job="code", cluster="us", model_name="small")
    other = Block(({"__name__": "up", "instance": "node:9100", "job": "node"},), well[0].times, well[0].values[:1] * 0)
    with prometheus_server.serving(program(PLACES[1]), [*sick, *well, other]) as held:
        yield held


def judged(server: Server, contract: Path | None = None, **scope: tuple[str, ...]) -> Report:
    span = TimeSpan(since=f"{BEGIN / 1000}", until=f"{BEGIN / 1000 + 60}")
    settings = ObserveOptions([], prometheus=server.url, scope=Scope(span, **scope), contract=contract)
    return doctor.run(settings)


def instances(report: Report) -> set[str]:
    return {dict(each.diagnosis.subject)["instance"] for each in report.findings}


def test_the_live_view_shows_the_servers_of_a_prometheus(server: Server) -> None:
    scope = Scope(TimeSpan(since=f"{BEGIN / 1000}", until=f"{BEGIN / 1000 + 60}"))
    feed = make_app(ObserveOptions([], prometheus=server.url, scope=scope)).feed

    async def look() -> None:
        async with top_views.shown(feed, top_views.WIDE) as (app, pilot):
            sick, well = top_views.screen(app)[5:7]
            assert sick.split()[:4] == ["sick:8000", "critical", "busy", "kv_eviction_cascade"]
            assert well.split()[:3] == ["well:8000", "healthy", "busy"]
            assert "█" in well
            await top_views.press(pilot, "r", shows="nothing is recorded")
            await top_views.press(pilot, "enter", shows="Trade-off")

    top_views.run(look())


def test_every_vllm_server_is_judged_and_nothing_else(server: Server) -> None:
    report = judged(server)
    assert instances(report) == {"sick:8000", "well:8000"}
    assert {dict(each.diagnosis.subject)["instance"] for each in report.present if each.diagnosis.primary} == {
        "sick:8000"
    }


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({"instances": ("sick:8000",)}, "sick:8000"),
        ({"instances": ("w.*", "nobody")}, "well:8000"),
        ({"jobs": ("chat",)}, "sick:8000"),
        ({"models": ("sma.+",)}, "well:8000"),
        ({"matchers": ('cluster="eu"',)}, "sick:8000"),
        ({"matchers": ('cluster!="eu"', 'job=~"co.*"')}, "well:8000"),
        ({"jobs": ("chat|code",), "models": ("small",)}, "well:8000"),
    ],
)
def test_selected_servers_are_judged(server: Server, scope: dict[str, tuple[str, ...]], expected: str) -> None:
    report = judged(server, **scope)
    assert instances(report) == {expected}
    assert report.verdict == ("critical" if expected == "sick:8000" else "healthy")


def test_site_labels_identify_servers(tmp_path: Path) -> None:
    """Two pods behind one address; by `instance` they would be one server."""
    (tmp_path / "diag.toml").write_text('[site]\nlabels = ["cluster", "pod"]\n')
    sick = labelled(SICK, instance="proxy:80", cluster="eu", pod="vllm-0")
    well = labelled(WELL, instance="proxy:80", cluster="eu", pod="vllm-1")
    other = Block(({"__name__": "up", "instance": "node:9100", "cluster": "eu"},), well[0].times, well[0].values[:1])
    with prometheus_server.serving(program(PLACES[1]), [*sick, *well, other]) as held:
        report = judged(held, tmp_path / "diag.toml")
    assert instances(report) == {"eu/vllm-0", "eu/vllm-1"}
    there = {each.diagnosis.incident.id for each in report.present}
    here = {each.diagnosis.incident.id for each in doctor.run(ObserveOptions([f"tests/recordings/{SICK}"])).present}
    assert there - {"replicas_unbalanced"} == here  # of the two, one waits while the other has room


def test_single_selected_server_is_compared_with_its_peers(tmp_path: Path) -> None:
    seen = read(side_by_side(tmp_path))
    with prometheus_server.serving(program(PLACES[1]), list(seen.samples.select([]))) as held:
        span = TimeSpan(since=f"{seen.instants[0] / 1000}", until=f"{seen.instants[-1] / 1000}")
        scope = Scope(span, instances=("r0:8000",))
        report = doctor.run(ObserveOptions([], prometheus=held.url, scope=scope))
    assert instances(report) == {"r0:8000"}
    assert "replicas_unbalanced" in {each.diagnosis.incident.id for each in report.present}


def side_by_side(folder: Path) -> Path:
    """A replica with a queue, r0:8000, and two that have room."""
    replicas = [
        rewriting.changed(rewriting.scrapes(name), lambda page: rewriting.of_model(page, "one"))
        for name in ("queue_saturation", WELL, WELL)
    ]
    return rewriting.write(folder / "fleet", rewriting.side_by_side(*replicas))


def expressions(seen: Observation) -> set[str]:
    asked = QueryCache(seen, Contract())
    return {
        formula(condition.signal, incident.per, asked.window(incident).text, Contract()).written_out()
        for incident in load()
        for condition in incident.every_condition
    }


def test_matchers_narrow_every_selector(tmp_path: Path) -> None:
    """An expression with added matchers yields for one server the same as without other servers."""
    seen = read(side_by_side(tmp_path))
    alone = [
        block._replace(labels=(labels,), values=block.values[[row]])
        for block in seen.samples.select([])
        for row, labels in enumerate(block.labels)
        if labels["instance"] == "r0:8000"
    ]
    for text in expressions(seen):
        one = evaluate(add_matchers(text, 'instance="r0:8000"'), seen.samples, seen.instants[-3:])
        other = evaluate(text, Samples(alone), seen.instants[-3:])
        assert one.labels == other.labels
        assert one.present.tolist() == other.present.tolist()


@pytest.mark.parametrize(
    ("promql", "expected"),
    [
        ("up", 'up{job="v"}'),
        ("up{}", 'up{job="v", }'),
        ('rate(x{le="{up}"}[15ms] offset 5m)', 'rate(x{job="v", le="{up}"}[15ms] offset 5m)'),
        ('{__name__=~"up|x"}', '{job="v", __name__=~"up|x"}'),
        ('label_replace(up, "x", "up", "", "")', 'label_replace(up{job="v"}, "x", "up", "", "")'),
        ("sum by (upper) (up) / vector(1)", 'sum by (upper) (up{job="v"}) / vector(1)'),
    ],
)
def test_add_matchers_changes_only_selectors(promql: str, expected: str) -> None:
    assert add_matchers(promql, 'job="v"') == expected
    assert add_matchers(promql, "") == promql


@pytest.mark.parametrize(
    ("written", "time"),
    [
        ("12:00", "2026-11-27 12:00:00"),
        ("noon", "2026-11-27 12:00:00"),
        ("23:16", "2026-11-26 23:16:00"),  # the last one before now
        ("today 01:00", "2026-11-27 01:00:00"),
        ("yesterday 18:00", "2026-11-26 18:00:00"),
        ("12:00+02:00", "2026-11-27 10:00:00"),
        ("-2h", "2026-11-27 15:20:00"),
    ],
)
def test_a_time_of_day_is_the_last_one(written: str, time: str) -> None:
    assert moment(parse_time(written, 1_795_800_000_000) / 1000) == f"{time} UTC"
