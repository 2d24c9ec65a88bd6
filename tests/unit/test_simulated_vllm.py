"""The simulated server of the healthy soak: its page is consistent, and is called healthy or ill as it deserves."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support import healthy_loads, rewriting
from support.healthy_loads import KINDS, scraped
from support.scenarios import present
from support.simulated_vllm import Engine, Limits, Request, page

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report

BEGUN = 1_795_000_000.0
MINUTES = [2.0 * k for k in range(120)]


def judge(folder: Path, kind: str) -> Report:
    scrapes = ((each.at, each.instance, each.page) for each in scraped(kind, 1, MINUTES, BEGUN, length=300))
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", scrapes))]))


def values(text: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)]


def test_page_accounts_for_every_request() -> None:
    engine = Engine(Limits(max_num_seqs=4, num_gpu_blocks=200), BEGUN)
    for k in range(40):
        engine.send(Request(BEGUN + k / 10, 300, 200, until=BEGUN + (k / 10 + 1 if k % 10 == 0 else 1e6)))
    engine.run(BEGUN + 8)
    text = page([engine])
    finished = sum(values(text, "vllm:request_success_total"))
    held = values(text, "vllm:num_requests_running") + values(text, "vllm:num_requests_waiting")
    assert finished > 0 and held[0] <= 4 and held[1] > 0
    lost = values(text, "http_requests_total")[0] - finished
    assert finished + sum(held) + lost == 40 and lost > 0
    assert values(text, "vllm:e2e_request_latency_seconds_count") == [finished]
    assert values(text, "vllm:kv_cache_usage_perc")[0] <= 1
    gaps = values(text, "vllm:inter_token_latency_seconds_count")[0]
    firsts = values(text, "vllm:time_to_first_token_seconds_count")[0]
    assert values(text, "vllm:generation_tokens_total")[0] == gaps + firsts


def test_newest_is_preempted_where_no_block_is_left() -> None:
    engine = Engine(Limits(num_gpu_blocks=60), BEGUN)
    for k in range(3):
        engine.send(Request(BEGUN + k, 300, 400))
    engine.run(BEGUN + 60)
    text = page([engine])
    assert values(text, "vllm:num_preemptions_total")[0] > 0
    assert sum(values(text, "vllm:request_success_total")) == 3


def test_names_are_those_of_a_recorded_page() -> None:
    names = set(re.findall(r"^([\w:]+)", page([Engine(Limits(), BEGUN)]), re.MULTILINE))
    *_, (_, _, recorded) = rewriting.scrapes("healthy")
    assert names <= set(re.findall(r"^([\w:]+)", recorded, re.MULTILINE))
    assert len(names) > 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat with exporter", "adapters", "data parallel", "disaggregated pair"])
def test_healthy_load_is_called_healthy(tmp_path: Path, kind: str) -> None:
    report = judge(tmp_path, kind)
    assert report.verdict == "healthy" and not present(report)


def test_too_little_capacity_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = replace(KINDS["chat"], rate=healthy_loads.steady(6), limits=Limits(max_num_seqs=4))
    monkeypatch.setitem(KINDS, "chat", crowded)
    assert "queue_saturation" in present(judge(tmp_path, "chat"))
