"""How near a server is to the ceilings of its GPUs: by hand, by vLLM's own estimate, and where that is not known."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import rewriting, scenarios
from support.scenarios import Beside, config, gpu, model

from diag.commands import doctor
from diag.commands.observe import ObserveOptions, observe
from diag.core.contract import Contract
from diag.diagnosis.report import Report
from diag.diagnosis.vitals import CeilingShares
from diag.ramp.analysis import Circumstances, conclude
from diag.ramp.plan import Limits
from diag.ramp.results import Offer
from diag.ramp.step import measure
from diag.report import json, sentences
from diag.report.short_report import short_report

LLAMA = model("llama-3.1-8b")
TENSOR_2 = model("llama-3.1-8b", "--tensor-parallel-size 2")
WEIGHTS = 2 * (8.03e9 - 128_256 * 4096)
"""Bytes of Llama 3.1 8B without its input embedding."""
CACHE, USED = 100_000, 0.5
"""Tokens that the KV cache holds, and the share of it in use; each takes 131,072 bytes."""
STEPS, BATCH = 60, 12


def page(t: float, estimated: float, engines: int) -> str:
    """A server that makes 60 steps a second with 12 requests, and 3,000 prompt tokens of which 1,000 were cached."""
    rates = {
        "iteration_tokens_total_count": STEPS,
        "generation_tokens_total": STEPS * BATCH,
        "prompt_tokens_total": 3000,
        "prefix_cache_hits_total": 1000,
        "time_to_first_token_seconds_count": 1,
        "estimated_read_bytes_per_gpu_total": estimated,
        "estimated_write_bytes_per_gpu_total": 0,
        "estimated_flops_per_gpu_total": estimated,
    }
    gauges = {"num_requests_running": BATCH, "num_requests_waiting": 0, "kv_cache_usage_perc": USED}
    values = {name: rate * t for name, rate in rates.items()} | gauges
    each = ((name, engine, value) for engine in range(engines) for name, value in values.items())
    return "".join(f'vllm:{name}{{engine="{engine}",model_name="m"}} {value}\n' for name, engine, value in each)


def record(folder: Path, *beside: Beside, estimated: float = 0, engines: int = 1) -> ObserveOptions:
    """A recording of it with these parts beside it."""

    def pages() -> Iterator[rewriting.Scrape]:
        for t in range(0, 60, 2):
            text = page(t, estimated, engines)
            yield 1.7e9 + t, "h:1", text + scenarios.text(t, text, (config(kv_cache_size_tokens=CACHE), *beside))

    return ObserveOptions([str(rewriting.write(folder / "recording", pages()))])


def report(folder: Path, *beside: Beside, estimated: float = 0, engines: int = 1) -> Report:
    """Return the doctor's report."""
    return doctor.run(record(folder, *beside, estimated=estimated, engines=engines))


BOUND = (
    "74.6 % of the GPU's memory bandwidth in use (12 requests in a decoding step): memory bandwidth limits the speed"
)


def shares(folder: Path, *beside: Beside, estimated: float = 0) -> CeilingShares:
    """Return the shares of the only engine."""
    (found,) = report(folder, *beside, estimated=estimated).ceilings
    return found


def test_a_step_reads_the_weights_and_the_kv_cache_in_use(tmp_path: Path) -> None:
    found = shares(tmp_path, LLAMA, gpu(0))
    assert found.bandwidth == pytest.approx(STEPS * (WEIGHTS + USED * CACHE * 131_072) / 3.352e12, rel=0.001)
    assert (found.batch, found.bound) == (pytest.approx(BATCH), "")


def test_tokens_that_were_not_cached_are_computed(tmp_path: Path) -> None:
    """Two operations a number; the output layer is left out."""
    numbers = 8.03e9 - 2 * 128_256 * 4096
    computed = STEPS * BATCH + 3000 - 1000
    assert shares(tmp_path, LLAMA, gpu(0)).compute == pytest.approx(2 * numbers * computed / 989.4e12, rel=0.001)


def test_all_reduces_send_twice_a_layer_over_the_link_there_is(tmp_path: Path) -> None:
    """Two ranks: each sends 32 layers x 2 x 4096 numbers of 2 bytes a token; PCIe 4.0 has 16 lanes of 1.97 GB/s."""
    sent = (STEPS * BATCH + 2000) * 32 * 2 * 4096 * 2
    linked = shares(tmp_path / "nvlink", TENSOR_2, gpu(0, nvlink_active_links=18))
    alone = shares(tmp_path / "pcie", TENSOR_2, gpu(0))
    assert linked.nvlink == pytest.approx(sent / 450e9, rel=0.001)
    assert linked.pcie == alone.pcie == pytest.approx(sent / (16 * 1.97e9), rel=0.001)
    assert alone.nvlink is None
    assert shares(tmp_path / "one", LLAMA, gpu(0)).pcie is None


def test_a_ring_is_as_fast_as_its_slowest_card(tmp_path: Path) -> None:
    """The second GPU has 4 of its 16 lanes; one that idles, whose link has lowered its generation, is in no ring."""
    sent = (STEPS * BATCH + 2000) * 32 * 2 * 4096 * 2
    slow = gpu(1, pcie_link_width__current=4)
    asleep = gpu(2, utilization_ratio=0, pcie_link_generation__current=1)
    assert shares(tmp_path, TENSOR_2, gpu(0), slow, asleep).pcie == pytest.approx(sent / (4 * 1.97e9), rel=0.001)


def test_experts_count_that_the_batch_reaches(tmp_path: Path) -> None:
    """Mixtral: 2 of 8 experts a token, 32 layers of 3 x 4096 x 14,336 numbers each, 46.7e9 parameters in all."""
    experts = 2 * 32 * 8 * 3 * 4096 * 14_336
    dense = 2 * (46.70e9 - 32_000 * 4096) - experts
    read = dense + experts * (1 - 0.75**BATCH) + USED * CACHE * 131_072
    found = shares(tmp_path, model("mixtral-8x7b"), gpu(0))
    assert found.bandwidth == pytest.approx(STEPS * read / 3.352e12, rel=0.001)


def test_vllms_own_estimate_comes_first_and_needs_no_model(tmp_path: Path) -> None:
    found = shares(tmp_path, gpu(0), estimated=1e12)
    assert found.bandwidth == pytest.approx(1 / 3.352, rel=0.001)
    assert found.compute is None  # by which type of number is not known
    assert shares(tmp_path / "both", LLAMA, gpu(0), estimated=1e12).bandwidth == found.bandwidth


@pytest.mark.parametrize(
    "beside",
    [(gpu(0),), (LLAMA,), (LLAMA, gpu(0, serving=0)), ()],
    ids=["no model", "no GPU", "a GPU of somebody else", "neither"],
)
def test_unknown_gpu_or_model_has_no_ceiling(tmp_path: Path, beside: tuple[Beside, ...]) -> None:
    found = report(tmp_path, *beside)
    assert not found.ceilings
    assert "GPU limits" not in "".join(short_report(found))
    assert json.DOCTOR.of(found)["ceilings"] == []


def test_the_report_has_one_line_that_names_what_binds(tmp_path: Path) -> None:
    assert sentences.ceilings(report(tmp_path / "room", LLAMA, gpu(0))) == [
        "38.6 % of the GPU's memory bandwidth, 3.84 % of its compute in use (12 requests in a decoding step): "
        "the GPU does not limit the speed"
    ]
    bound = report(tmp_path / "bound", gpu(0), estimated=2.5e12)
    assert sentences.ceilings(bound) == [BOUND]


def test_short_report_has_the_engine_nearest_to_its_ceiling(tmp_path: Path) -> None:
    found = report(tmp_path, LLAMA, gpu(0), engines=2)
    calm, busy = found.ceilings
    found = found._replace(ceilings=(calm, busy._replace(bandwidth=0.9)))
    lines = [line for line in short_report(found) if "GPU limits" in line]
    assert [line.split(":1 ")[1][:15] for line in lines] == ["engine 1: 90 % "]
    assert len(sentences.ceilings(found)) == 2
    assert len(short_report(found)) <= 20


def test_a_ramp_names_the_resource_that_a_full_step_lacks(tmp_path: Path) -> None:
    """Twice the requests at the same tokens per second: the step is full, and the data sheet says of what."""
    seen = observe(record(tmp_path, gpu(0), estimated=2.5e12), Contract())
    step = measure(Offer(2), seen, Contract(), None)
    assert step
    step = step._replace(requests=200.0)
    steps = [step._replace(offer=Offer(at), tokens_per_step=12.0 * at, requests_per_second=at) for at in (1, 2)]
    ramp = conclude(steps, Limits(Contract()), Circumstances("h:1"))
    (found,) = (one for one in ramp.candidates if one.id == "compute")
    assert (found.name, found.state) == ("memory bandwidth", "binds")
    assert found.evidence[-1] == f"by the data sheet, {BOUND}"
    assert ramp.binds is None, "more load might bring more"
    queued = [step._replace(waiting=0.5 * BATCH) for step in steps]
    binds = conclude(queued, Limits(Contract()), Circumstances("h:1")).binds
    assert binds and binds.id == "compute", "half as many requests wait as run"
