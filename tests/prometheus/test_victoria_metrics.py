"""A second engine: VictoriaMetrics answers what Prometheus answers, and vmalert stays silent over a healthy day."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
from support import healthy_day, recorded_series, timelines
from support import victoria_metrics as victoria
from support.dashboards import PAGES, plain, queries
from support.paths import ROOT
from support.scenarios import gpu, workers
from support.timelines import blocks

from diag.core.contract import Contract
from diag.core.incident import Incident
from diag.knowledge.catalog import load
from diag.knowledge.formulas import conjunction
from diag.promql import Block, Labels, Samples

RULES = ROOT / "alerts" / "diag.rules.yaml"
END = 1_790_000_000_000
INSTANTS = (END - 660_000, END)
"""Four minutes after the faults set in, and a quarter of an hour: some are over by then."""
INCIDENTS = load()
RARE = re.compile(
    r"^ALERTS|ALERTS_FOR_STATE|(incident|instance)\) \(ALERTS|> [01]$|offset 1d|before_the_upgrade|nvlink_(bytes|max)"
    "|pcie_throughput|diag_condition:threshold"
)
"""What there is only where rules are evaluated, after an event, or on other GPUs."""


@pytest.mark.nightly
def test_no_alert_fires_on_a_healthy_day() -> None:
    with victoria.serving(healthy_day.day(END)) as server:
        alerts = victoria.replay(RULES, END - 86_400_000, END, server)
    assert [each for each in alerts if each.endswith("firing")] == []


def test_alerts_fire_on_the_replay_of_a_cascade() -> None:
    """Counter-check for the silent healthy day: the same replay over the last hour of a cascade."""
    with victoria.serving(named("kv_eviction_cascade")) as server:
        alerts = victoria.replay(RULES, END - 1_500_000, END, server)
    assert "VllmKvEvictionCascade firing" in alerts


@pytest.fixture(scope="module")
def server() -> Iterator[victoria.Server]:
    """Every timeline as an instance of its own."""
    gpus = (gpu(index, **timelines.ALL_GPU_FAULTS) for index in range(2))
    told = placed("told", timelines.timeline("healthy", *gpus, workers(1.0, 0.9), timelines.network, *timelines.TOLD))
    told += placed("nan", timelines.timeline("output_corrupted", *timelines.NAN_CAUSES))
    sick = [block for name in (*timelines.RECORDED, *timelines.HOSTS) for block in named(name)]
    made = recorded_series.recorded(Samples([*sick, *told]), np.array(INSTANTS))
    with victoria.serving([*sick, *told, *made]) as held:
        yield held


def named(name: str) -> list[Block]:
    """The timeline of an incident as the samples of the instance of that name."""
    return placed(name, timelines.faulty(name)[0])


def placed(name: str, series: timelines.Series) -> list[Block]:
    """A timeline as the samples of the instance of that name, the last at END.

    Its peers keep their names, and no other instance is one: each timeline has a model of its own.
    """
    (block,) = blocks(series, END / 1000 - float(timelines.TIMES[-1]))

    def told(labels: Labels) -> Labels:
        model = {"model_name": name} if "model_name" in labels else {}
        return {**labels, **model, "instance": labels["instance"].replace("h:1", name)}

    return [block._replace(labels=tuple(map(told, block.labels)))]


@pytest.mark.nightly
@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: each.id)
def test_doctor_finds_the_incident_in_victoria_metrics(server: victoria.Server, incident: Incident) -> None:
    found = {dict(key)["instance"] for at in INSTANTS for key in server.query(asked(incident), at)}
    assert found >= ({incident.id} & {*timelines.RECORDED, *timelines.HOSTS})
    causes = {each.id for each in INCIDENTS if incident.id in each.explains}
    assert found & {*timelines.RECORDED} <= {incident.id, *causes} or incident.severity == "info"


def asked(incident: Incident) -> str:
    return conjunction(incident, incident.window, Contract()).written_out()


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_victoria_metrics_answers_every_dashboard_query(server: victoria.Server, page: str) -> None:
    texts = [re.sub(r"\$[a-z]\w*", ".*", plain(each)) for each in queries(page)]
    answers = {promql: any(server.query(promql, at) for at in INSTANTS) for promql in texts if not RARE.search(promql)}
    assert [promql for promql, answer in answers.items() if not answer] == []
