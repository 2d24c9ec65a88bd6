"""Pools by prompt length: proposed with the effect that they have, and in no case where a pool could be overloaded."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.mixed_lengths import MixedLoad, RequestKind, play, record
from support.paths import RECORDINGS
from support.simulated_vllm import Limits

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.diagnosis import pools
from diag.diagnosis.pool_model import LengthHistogram, LoadOfServer, ServerCosts
from diag.diagnosis.pools import Pools, find_pools
from diag.diagnosis.query_cache import QueryCache
from diag.sources.observation import Observation
from diag.sources.recording.reader import read

LIMITS = Limits(token=0.0003, step=0.02)
CHAT, DOCUMENTS = RequestKind(1.5, 300, 150), RequestKind(0.1, 12_000, 100)
LOAD = MixedLoad((CHAT, DOCUMENTS), LIMITS)


def pools_of(recorded: Observation, load: MixedLoad) -> Pools | str:
    limits = (load.limits.max_num_batched_tokens, load.limits.max_num_seqs)
    subject = (("instance", "h0:1"), ("engine", "0"))
    return find_pools(subject, recorded.instants[-1] / 1000, QueryCache(recorded, Contract()), *limits)


def test_pools_have_the_effect_that_the_report_names(tmp_path: Path) -> None:
    record(tmp_path, LOAD, 1500, 5, seed=1)
    found = [each for each in doctor.run(ObserveOptions([str(tmp_path)])).present if each.proposals]
    (finding,) = [each for each in found if each.diagnosis.incident.id == "prefill_decode_contention"]
    (proposal,) = [each for each in finding.proposals if each.fix.pools]
    assert proposal is not finding.proposals[0]
    named = re.search(
        r"With (\d) servers, 1 more than today, serve prompts up to ([\d,]+) tokens on (\d) and longer ones on (\d)\. "
        r".* short prompts .* all requests, (\d+) ms in pools; long prompts .* all requests, ([\d.]+) s in pools",
        proposal.text,
    )
    assert named, proposal.text
    servers, edge, short, long = (int(text.replace(",", "")) for text in named.groups()[:4])
    assert (servers, short + long) == (2, 2)
    assert 500 <= edge <= 10_000
    played = play(LOAD, edge, (short, long), 1800, seed=2)
    assert played.preemptions == 0
    assert float(named[5]) / 1000 == pytest.approx(np.quantile(played.short, 0.9), rel=0.3)
    assert float(named[6]) == pytest.approx(np.quantile(played.long, 0.9), rel=0.3)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (LOAD._replace(burst=12), "bursts"),
        (
            LOAD._replace(kinds=(CHAT._replace(rate=0.01), DOCUMENTS._replace(rate=0.001)), clients=12),
            "wait for answers",
        ),
        (LOAD._replace(limits=replace(LIMITS, num_gpu_blocks=1500)), "preempted"),
        (
            LOAD._replace(kinds=(CHAT, DOCUMENTS._replace(rate=0.3)), limits=replace(LIMITS, num_gpu_blocks=90_000)),
            "saturated|does not reproduce",
        ),
        (LOAD._replace(kinds=(CHAT, DOCUMENTS._replace(rate=0.005))), "too tight|hardly better"),
    ],
    ids=["bursts", "clients", "preemptions", "saturated", "few long prompts"],
)
def test_a_load_that_does_not_tell_its_demand_gets_no_pools(tmp_path: Path, load: MixedLoad, reason: str) -> None:
    found = pools_of(read(record(tmp_path, load, 900, 5, seed=1)), load)
    assert isinstance(found, str), found
    assert re.search(reason, found), found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Observation:
    return read(record(tmp_path_factory.mktemp("pools"), LOAD, 1200, 5, seed=1))


@pytest.mark.parametrize(
    ("bound", "value"),
    [
        ("MOST_PREFILL", 0.001),
        ("MOST_KV", 0.001),
        ("MOST_BATCH", 0.01),
        ("CLEARLY", 0.001),
        ("LEAST_GAIN", 1000.0),
        ("MOST_ERROR", 0.0001),
        ("MOST_MISPLACED", 0.0),
        ("MOST_CACHED", -0.01),
    ],
)
def test_each_bound_is_kept(recorded: Observation, monkeypatch: pytest.MonkeyPatch, bound: str, value: float) -> None:
    assert isinstance(pools_of(recorded, LOAD), Pools)
    monkeypatch.setattr(pools, bound, value)
    assert isinstance(pools_of(recorded, LOAD), str)


@pytest.mark.parametrize("name", ["contention_bigbatch", "contention_long_prefill", "kv_cascade"])
def test_a_recording_of_half_a_minute_gets_no_pools(name: str) -> None:
    found = doctor.run(ObserveOptions([str(RECORDINGS / name)])).present
    assert not [proposal for each in found for proposal in each.proposals if proposal.fix.pools]


def test_lengths_keep_the_buckets_and_the_mean_of_a_histogram() -> None:
    histogram = LengthHistogram([100, 1000, 10_000, math.inf], [50, 90, 100, 100], 50 * 60 + 40 * 300 + 10 * 8000)
    lengths = histogram.lengths
    assert [float((lengths <= edge).mean()) for edge in (100, 1000, 10_000)] == pytest.approx([0.5, 0.9, 1], abs=0.01)
    assert lengths.mean() == pytest.approx(950, rel=0.02)
    assert 8000 <= histogram.most_mean(1, beyond=True) <= 10_000
    assert 167 <= histogram.most_mean(1, beyond=False) <= 500


def test_kv_cache_bounds_hold_for_every_coupling_of_prompts_and_outputs() -> None:
    chance = np.random.default_rng(3)
    prompts, outputs = chance.lognormal(6, 1, 400), np.sort(chance.lognormal(5, 1, 400))
    costs = ServerCosts(step=0.02, token=0.0001, capacity=1e6, budget=8192, cap=256)
    load = LoadOfServer(1.0, prompts, prompts, outputs)
    least, most = (load.kv_tokens(costs, 0.1, longest_together=way)[0] for way in (False, True))
    pace = costs.step / (1 - load.utilisation(costs))
    for _ in range(20):
        drawn = chance.permutation(outputs)
        held = float((pace * drawn * (prompts + drawn / 2) + 0.1 * prompts).mean())
        assert least <= held <= most
