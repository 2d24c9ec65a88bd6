"""Infos on a healthy server: none comes and goes at its threshold, and a decode server has no prefix-cache finding."""

from pathlib import Path

import numpy as np
import pytest
from support import rewriting as re
from support.connector_pages import value

from diag.artefacts.alerts import keeps_firing
from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.incident import seconds
from diag.knowledge.catalog import load
from diag.knowledge.formulas import conjunction
from diag.promql import Block, Samples, evaluate
from diag.report.terminal import render

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
        "vllm:request_prompt_tokens_sum": 2000.0,
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
