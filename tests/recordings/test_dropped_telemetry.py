"""Missing telemetry never completes a verdict: without a family, a label or a source, nothing else is claimed.

A verdict may become unknown, and it stays ill while a sign of the incident is measured. It is health only if nothing
that remains shows the incident.
"""

import tomllib
from collections import Counter
from functools import cache

import pytest
from support import dropping
from support.paths import ALL_RECORDINGS, RECORDINGS
from support.reports import judged as whole
from support.sampling import some

from diag.commands.observe import judge_observation
from diag.core.contract import Contract
from diag.diagnosis.report import Report
from diag.knowledge.catalog import load
from diag.sources.observation import Observation
from diag.sources.recording.reader import read

EIGHT = (
    "kv_cascade",
    "contention_bigbatch",
    "queue_saturation",
    "engine_stalled",
    "gpu_thermal_throttling",
    "requests_failing",
    "host_cpu_starved",
    "lora_thrash",
)
MANY, FEW = 3, 1
"""Parts that are dropped from each of the eight recordings and from each further one; bench/dropped.py drops all."""
HIDDEN = {
    "kv_cascade": ("vllm:kv_cache_usage_perc", "vllm:num_preemptions"),
    "engine_stalled": ("vllm:kv_cache_usage_perc", "vllm:request_prefill_time_seconds"),
    "admission_deadlock": ("vllm:generation_tokens_total",),
    "h100_memory_held": ("diag_gpu_memory_free_bytes",),
}
"""Families without which an ill server was HEALTHY once, or had another incident: always dropped."""


def verdict(name: str) -> str:
    about = tomllib.loads((RECORDINGS / name / "recording.toml").read_text(encoding="utf-8"))
    return str(about["truth"]["verdict"])


ALL = sorted(path.name for path in ALL_RECORDINGS)
ILL = [name for name in ALL if verdict(name) == "ill"]


@cache
def recorded(name: str) -> Observation:
    return read(RECORDINGS / name)


def judged(observation: Observation) -> Report:
    return judge_observation(observation, Contract(), load()).report


def wrong(name: str, parts: dict[str, Observation]) -> dict[str, dropping.Change]:
    """Return what is wrong without each of these parts of a recording."""
    changes = {part: dropping.change(whole(name), judged(left)) for part, left in parts.items()}
    return {part: change for part, change in changes.items() if change.is_wrong}


@pytest.mark.parametrize("name", EIGHT)
def test_ill_server_is_not_healthy_without_any_single_family(name: str) -> None:
    """Sixteen families were missed once: the report without them was HEALTHY."""
    seen = recorded(name)
    families = dropping.families(seen)
    dropped = {*some(families, MANY, name), *(family for family in families if family in HIDDEN.get(name, ()))}
    reports = {family: judged(dropping.without_family(seen, family)) for family in sorted(dropped)}
    assert [family for family, report in reports.items() if report.verdict == "healthy"] == []
    new = {
        family: change.new for family, report in reports.items() if (change := dropping.change(whole(name), report)).new
    }
    assert new == {}


@pytest.mark.parametrize("name", sorted({*HIDDEN, *some((name for name in ILL if name not in EIGHT), 7)} - {*EIGHT}))
def test_dropped_family_hides_no_measured_sign(name: str) -> None:
    seen = recorded(name)
    families = {*some(dropping.families(seen), FEW, name), *HIDDEN.get(name, ())}
    assert wrong(name, {family: dropping.without_family(seen, family) for family in families}) == {}


@pytest.mark.parametrize("name", some(ILL, 7))
def test_dropped_source_hides_no_measured_sign(name: str) -> None:
    seen = recorded(name)
    sources = some(dropping.SOURCES, FEW, name)
    assert wrong(name, {source: dropping.without_source(seen, source) for source in sources}) == {}


@pytest.mark.parametrize("name", some(ILL, 12))
def test_dropped_label_hides_no_measured_sign(name: str) -> None:
    seen = recorded(name)
    labels = some(dropping.labels(seen), FEW, name)
    assert wrong(name, {label: dropping.without_label(seen, label) for label in labels}) == {}


@pytest.mark.parametrize("name", some((name for name in ALL if verdict(name) == "healthy"), 8))
def test_healthy_server_without_its_page_is_not_healthy(name: str) -> None:
    report = judged(dropping.without_source(recorded(name), "vLLM's page"))
    assert report.verdict in ("unknown", "no_incident")


@pytest.mark.nightly
def test_a_sign_of_trouble_is_rare_on_healthy_servers() -> None:
    """A condition that most healthy servers meet is context (`Signal.context`), and makes no suspect."""
    measured: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for name in (name for name in ALL if verdict(name) == "healthy"):
        for finding in whole(name).findings:
            diagnosis = finding.diagnosis
            own = (*diagnosis.incident.symptoms, *diagnosis.incident.supports)
            readings = (*diagnosis.symptoms[: len(diagnosis.incident.symptoms)], *diagnosis.supports)
            for condition, reading in zip(own, readings, strict=True):
                if condition.op.startswith(">") and not condition.signal.context and diagnosis.severity != "info":
                    sign = f"{diagnosis.incident.id}: {condition.signal.name}"
                    measured[sign] += reading.value is not None
                    held[sign] += reading.holds is True
    assert [sign for sign, count in held.items() if count >= 3 and 2 * count > measured[sign]] == []
