"""A real vLLM on the CPU that prefills slowly: healthy is called healthy, an incident is named while it lasts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import top_views
from support.live import cure, load, server

from diag.commands.budget import estimate
from diag.commands.observe import ObserveOptions
from diag.commands.options import BudgetOptions

pytestmark = [pytest.mark.live, server.needed]
DIAG = str(Path(sys.executable).parent / "diag")
FLAGS = ("--max-model-len", "8192", "--max-num-batched-tokens", "16384", "--max-num-seqs", "32")
TIMES_HEALTHY = int(os.environ.get("DIAG_TIMES_HEALTHY", "2"))


def doctor(url: str, seconds: float = 30) -> dict[str, object]:
    command = [DIAG, "doctor", url, "--for", str(seconds), "--every", "1", "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)


def primary(report: dict[str, object]) -> list[str]:
    return [each["incident"] for each in report["diagnoses"] if each["primary"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[server.Server]:
    """A server whose step is large enough for two long prompts."""
    with server.running(folder, "small", FLAGS) as running:
        yield running


def test_the_kv_cache_of_a_real_server_is_estimated_to_the_token(small: server.Server) -> None:
    model = small.log.parent / "small"
    command = small.command.replace("vllm serve", f"VLLM_CPU_KVCACHE_SPACE=1 vllm serve {model}")
    before = estimate(BudgetOptions(command, version="0.32.0")).ledger
    budget = estimate(BudgetOptions(command, log=str(small.log)))
    assert before.tokens and before.concurrency
    assert (before.tokens.low, before.tokens.high) == (budget.logged["tokens"],) * 2
    assert [round(each, 2) for each in before.concurrency] == [budget.logged["concurrency"]] * 2
    assert budget.logged["length"] == before.setup.length
    assert (budget.ledger.verdict, budget.ledger.setup.version, budget.ledger.tokens) == (
        "fits",
        "0.32.0",
        before.tokens,
    )


def test_a_healthy_server_is_healthy_time_after_time(small: server.Server) -> None:
    """On a host with more work than cores, as while other tests run, users do wait, and a report may say so."""
    with load.alone(), load.running(small.port, *load.HEALTHY) as clients:
        clients.wait_for(12, *load.HEALTHY)
        with ThreadPoolExecutor(2) as pairs:  # two at a time
            coming = pairs.map(lambda _: doctor(small.url), range(TIMES_HEALTHY))
            row, shown = top_views.first_judged(ObserveOptions([small.url], every=2.0, log=str(small.log)))
            reports = list(coming)
        crowded = os.getloadavg()[0] > os.cpu_count()
    assert len(reports) == TIMES_HEALTHY
    for report in reports:
        present = {each["incident"] for each in report["diagnoses"] if each["state"] == "present"}
        assert present <= ({"host_cpu_starved"} if crowded else set())
        assert report["verdict"] in (["healthy", "no_incident", "warning"] if crowded else ["healthy"])
        assert report["progress"][0]["state"] == "busy"
    assert shown.split()[1] in ("healthy", "warning") and shown.split()[2] == "busy", shown
    assert {"running", "kv", "tokens", "ttft95", "itl50"} <= row.values.keys()


def test_long_prompts_among_streams_are_named_with_a_threshold_to_set(small: server.Server) -> None:
    """bench/cures.py measures that this fix works.

    Where other programs have the cores, a short look holds too few long prompts, or leads with their want of CPU time.
    """
    with load.alone(), load.running(small.port, *cure.CONTENTION.clients) as clients:
        clients.wait_for(2, cure.CONTENTION.clients[1])
        looks = (doctor(small.url, seconds) for seconds in (30, 30, 60, 120, 240))
        told = (diagnosis for report in looks for diagnosis in report["diagnoses"] if diagnosis["state"] == "present")
        named = (each for each in told if each["incident"] == "prefill_decode_contention")
        fixes = ((each["primary"], {fix["name"]: fix["after"] for fix in each["fixes"]}) for each in named)
        leads, fix = next((leads, fix) for leads, fix in fixes if cure.CONTENTION.flag in fix)
        crowded = os.getloadavg()[0] > os.cpu_count()
    assert leads or crowded
    low, high = cure.CONTENTION.bounds
    assert low <= fix[cure.CONTENTION.flag] <= high
