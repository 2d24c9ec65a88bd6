"""Infos on a healthy server: none comes and goes at its threshold, and a decode server has no prefix-cache finding."""

import random
import re as regex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import rewriting as re
from support.connector_pages import value
from support.simulated_vllm import Engine, Limits, Request, page

from diag.artefacts.alerts import keeps_firing
from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.incident import seconds
from diag.knowledge.catalog import load
from diag.knowledge.formulas import conjunction
from diag.promql import Block, Samples, evaluate
from diag.report.terminal import render

OUTPUT = regex.compile(r"^(vllm:(?:request_)?generation_tokens\S*) \S+$", regex.MULTILINE)
DAY = np.arange(0, 86_400_000, 60_000)
CONFIG = {"instance": "h:8000", "__name__": "diag_vllm_config", "flag": "block_size"}


def day(mean: float) -> Samples:
    """A day of 20 requests a minute: the hit rate, of prompts and of drafts, differs from minute to minute."""
    noise = np.random.default_rng(7)
    share = np.clip(noise.normal(mean, 0.15, DAY.size), 0, 1)
    rates = {
        "vllm:prefix_cache_hits_total": 2000 * share,
        "vllm:prefix_cache_queries_total": 2000.0,
        "vllm:request_success_total": 20.0,
        "vllm:prompt_tokens_total": 2000.0,
        "vllm:generation_tokens_total": 1000.0,
        "vllm:request_prompt_tokens_sum": 2000.0,
        "vllm:request_queue_time_seconds_sum": 1.0,
        "vllm:request_prefill_time_seconds_sum": 20.0,
        "vllm:request_inference_time_seconds_sum": 100.0,
        "vllm:spec_decode_num_draft_tokens_total": 1000.0,
        "vllm:spec_decode_num_accepted_tokens_total": 1000 * share,
        "vllm:spec_decode_num_drafts_total": 500.0,
    }
    labels = tuple({"__name__": name, "instance": "h:8000", "engine": "0"} for name in rates)
    values = np.array([np.cumsum(np.broadcast_to(rate, DAY.size)) for rate in rates.values()])
    return Samples([Block(labels, DAY, values), Block((CONFIG,), DAY, np.full((1, DAY.size), 16.0))])


def firings(name: str, mean: float) -> int:
    """Count how often the alert begins in a day: after `hold`, until it has been over for `keep_firing_for`."""
    incident = next(incident for incident in load() if incident.id == name)
    query = conjunction(incident, incident.window, Contract()).written_out()
    vector = evaluate(query, day(mean), DAY)
    holds = vector.present[0] if len(vector.labels) else np.zeros(DAY.size, bool)
    begun, since, last = 0, None, None
    for minute, held in enumerate(holds):
        if held:
            since = minute if since is None else since
            if minute - since >= seconds(incident.hold) / 60:
                begun, last = begun + (last is None), minute
        else:
            since = None
        if last is not None and minute - last > keeps_firing(incident) / 60:
            last = None
    return begun


@pytest.mark.parametrize("name", ["prefix_cache_ineffective", "speculation_ineffective"])
def test_an_info_does_not_come_and_go_at_its_threshold(name: str) -> None:
    """Each alert began 64 times in this day over a window of five minutes."""
    assert firings(name, 0.3) <= 2
    assert (firings(name, 0.1), firings(name, 0.5)) == (1, 0)


def test_a_decode_server_has_no_prefix_cache_finding(tmp_path: Path) -> None:
    """A KV connector brings the KV cache of its prompts: it prefills none that a cached prefix could save."""

    def decodes(page: str) -> str:
        tokens = value(page, 'vllm:prompt_tokens_total{engine="0"')
        return re.with_value(page, "vllm:external_prefix_cache_hits_total{", f"{tokens}")

    own, decode = list(re.scrapes("prefix_unique")), re.changed(re.scrapes("prefix_unique"), decodes)
    for name, pages in (("own", own), ("decode", decode)):
        report = doctor.run(ObserveOptions([str(re.write(tmp_path / name, pages))]))
        ids = [finding.diagnosis.incident.id for finding in report.present]
        assert ("prefix_cache_ineffective" in ids) == (name == "own")


@pytest.mark.parametrize("stated", ["", "[contract]\nttft_seconds = 2.5\n"])
def test_a_healthy_report_says_that_no_slo_is_set(tmp_path: Path, stated: str) -> None:
    contract = tmp_path / "diag.toml"
    contract.write_text(stated)
    folder = re.write(tmp_path / "recording", re.scrapes("healthy"))
    report = doctor.run(ObserveOptions([str(folder)], contract=contract))
    lines = [line for line in render(report).splitlines() if line.startswith("  SLO ")]
    assert len(lines) == (not stated) and all("none in diag.toml" in line for line in lines)


def prompts(begun: float, seconds: int, cached: Callable[[float], float]) -> Iterator[re.Scrape]:
    """A server whose prompts share so much of 2,000 tokens, by the time at which they arrive."""
    draw, engine = random.Random(7), Engine(Limits(token=0.0002), begun - 3600)
    engine.now = at = begun
    while (at := at + draw.expovariate(2.0)) < begun + seconds:
        tokens = round(draw.gauss(2000, 300))
        found = int(tokens * cached(at - begun)) // 16 * 16
        engine.send(Request(at, tokens, draw.randint(100, 500), cached=found))
    for time in range(15, seconds, 15):
        engine.run(begun + time)
        yield begun + time, "v:8000", page([engine])


def is_told(folder: Path, pages: Iterable[re.Scrape]) -> bool:
    """Return True if a low hit rate is reported."""
    report = doctor.run(ObserveOptions([str(re.write(folder / "recording", pages))]))
    return "prefix_cache_ineffective" in {finding.diagnosis.incident.id for finding in report.present}


@pytest.mark.parametrize("after", [0.0, 0.35, 0.7])
def test_a_prefix_cache_that_breaks_is_not_hidden_by_what_it_found_before(tmp_path: Path, after: float) -> None:
    """The hit rate is 35 % over all of the half hour; that it has halved is the mix of clients."""
    pages = prompts(1_795_000_000.0, 1800, lambda t: 0.7 if t < 900 else after)
    assert is_told(tmp_path, pages) == (after == 0.0)


@pytest.mark.parametrize("generates", [True, False])
def test_a_server_that_generates_nothing_shares_no_prefix(tmp_path: Path, generates: bool) -> None:
    off = re.changed(
        re.scrapes("prefix_unique"),
        lambda text: text.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"'),
    )
    shown = re.changed(off, str if generates else lambda text: OUTPUT.sub(r"\1 0", text))
    assert is_told(tmp_path, shown) == generates
