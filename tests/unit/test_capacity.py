"""Ceilings: against public figures, against sums that can be done by hand, and the choices that follow."""

from dataclasses import replace

import pytest
from support.paths import MODELS
from support.public_figures import cache_figures, figures

from diag.core.errors import BadUsage
from diag.vllm import work
from diag.vllm.command import parse as command
from diag.vllm.deployments import TENSORS, Deployment, choices, layouts
from diag.vllm.gpus import named
from diag.vllm.memory.model import read
from diag.vllm.memory.setup import GpuSpec, setup
from diag.vllm.work import REACHED, Replica, cost_per_million


def replica(name: str, gpu: str = "h100", flags: str = "") -> Replica:
    model, kind = read(MODELS / name), named(gpu)
    found = command.read(f"vllm serve {MODELS / name} {flags}", version="0.32.0")
    return Replica(model, setup(found, model, GpuSpec(kind.memory, kind.name), "0.32.0"), kind)


def held(name: str, gpu: str, concurrency: int | None, length: int = 8192) -> list[Deployment]:
    setup = replace(replica(name, gpu).setup, length=length)
    setups = [replace(setup, tensor=tensor) for tensor in TENSORS]
    return layouts(read(MODELS / name), setups, named(gpu), concurrency)


# -- public figures ---------------------------------------------------------------------------------------------------


def test_public_figures_are_below_their_ceilings_and_within_the_stated_range() -> None:
    """A figure above its ceiling would be a mistake of the arithmetic or of a data sheet."""
    found = list(figures())
    assert len(found) >= 20
    assert [figure for figure in found if not REACHED[0] <= figure.reached <= REACHED[1]] == []


def test_logged_kv_caches_are_within_their_estimates() -> None:
    assert [size for size in cache_figures() if not size.estimated.low <= size.measured <= size.estimated.high] == []


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_single_request_reads_every_weight_but_the_embedding_once() -> None:
    """Llama 3.1 8B: 8.03e9 parameters, 525e6 of them are the input embedding, 2 bytes each, at 1,555 GB/s."""
    found = replica("llama-3.1-8b", "a100-40").decode(1, 1)
    assert found.tokens_per_second == pytest.approx(1555e9 / (2 * (8.03e9 - 128_256 * 4096)), rel=0.001)
    assert found.binds == "weights"


def test_kv_cache_is_read_for_each_request() -> None:
    """Llama 3.1 8B keeps 131,072 bytes for a token."""
    one = replica("llama-3.1-8b")
    assert work.decode(one.model, one.setup, 40, 10_000).cache_bytes == 40 * 10_000 * 131_072
    assert one.decode(40, 10_000).binds == "KV cache"


def test_sliding_windows_are_read_no_further() -> None:
    """Gemma 3 27B: 10 of 62 layers attend to everything, 52 to 1,024 tokens; 16 KV heads of 128 in 2 bytes, twice."""
    one = replica("gemma-3-27b")
    read_bytes = work.decode(one.model, one.setup, 1, 32_768).cache_bytes
    assert read_bytes == (10 * 32_768 + 52 * 1024) * 2 * 16 * 128 * 2


def test_chunks_of_llama_4_are_read_no_further() -> None:
    model = replica("llama-4-scout").model
    assert [work.reach(mixer, 100_000) for mixer in model.mixers[:4]] == [
        8192,
        8192,
        8192,
        100_000,
    ]


def test_states_of_linear_attention_are_read_and_written_whatever_the_context() -> None:
    """Qwen3-Next: 12 layers keep 2,048 bytes of a token, 36 a state of 8,192 x 3 and 32 x 128 x 128 numbers."""
    one = replica("qwen3-next-80b")
    states = 36 * 2 * 2 * (8192 * 3 + 32 * 128 * 128)
    for context in (1000, 100_000):
        assert work.decode(one.model, one.setup, 8, context).cache_bytes == 8 * (12 * 2048 * context + states)


def test_sparse_attention_reads_the_index_of_all_tokens_and_2048_of_them() -> None:
    """DeepSeek V3.2 keeps 132 bytes of a token in the index of each of 61 layers."""
    one = replica("deepseek-v3.2", "h200")
    read_bytes = work.decode(one.model, one.setup, 1, 100_000).cache_bytes
    assert read_bytes == 61 * (2048 * 576 * 2 + 100_000 * 132)


@pytest.mark.parametrize(("tokens", "share"), [(1, 1 / 16), (16, 0.64), (1000, 1.0)])
def test_batch_reads_only_the_activated_experts(tokens: int, share: float) -> None:
    """Qwen3 30B A3B: 8 of 128 experts for a token; 16 tokens miss an expert with 0.9375 ** 16."""
    one = replica("qwen3-30b-a3b")
    weights, all_of_them = (work.decode(one.model, one.setup, count, 1).weight_bytes for count in (tokens, 10**6))
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert (weights - (all_of_them - experts)) / experts == pytest.approx(share, abs=0.005)


def test_mla_is_replicated_and_experts_are_divided_among_gpus() -> None:
    one, eight = (replica("deepseek-v3", "h200", flags) for flags in ("", "-tp 8"))
    alone, shared = (work.decode(each.model, each.setup, 32, 4096) for each in (one, eight))
    assert shared.cache_bytes == alone.cache_bytes == 32 * 4096 * 61 * 576 * 2
    assert 7.5 < alone.weight_bytes / shared.weight_bytes <= 8


def test_prefill_computes_two_operations_for_each_parameter() -> None:
    """A short prompt has little attention: 989.5e12 / (2 x 6.98e9 without embedding and head)."""
    found = replica("llama-3.1-8b").prefill(16)
    assert found.tokens_per_second == pytest.approx(989.5e12 / (2 * 6.98e9), rel=0.002)
    assert found.binds == "compute"


def test_a_prompt_attends_to_half_of_itself_and_to_no_more_than_its_windows() -> None:
    """Gemma 3 27B, 4 operations for each of 32 heads of 128: of 4,096 tokens 2,048, within 1,024 of them 896."""
    one = replica("gemma-3-27b")
    done = work.prefill(one.model, one.setup, 100, 4096)
    assert done.attention_flops == 100 * (10 * 2048 + 52 * 896) * 4 * 32 * 128


def test_an_all_reduce_goes_around_a_ring() -> None:
    """Two of them in each of 80 layers, of 8,192 numbers of 2 bytes, 3/4 of them sent twice, at 450 GB/s."""
    found = replica("llama-3-70b", "h100", "-tp 4").decode(64, 1024)
    assert found.send == pytest.approx(64 * 2 * 80 * 8192 * 2 * 2 * 3 / 4 / 450e9)


def test_pcie_replaces_nvlink_beyond_what_it_joins() -> None:
    assert work.link(named("h100-pcie"), 2) == ("NVLink", 300e9)
    assert work.link(named("h100-pcie"), 4) == ("PCIe", 64e9)
    assert replica("llama-3-70b", "l40s", "-tp 8").decode(256, 128).binds == "PCIe"


@pytest.mark.parametrize(
    ("name", "gpu", "flags", "kind"),
    [
        ("llama-3.1-8b", "h100", "", "bf16"),
        ("llama-3.1-8b", "h100", "--quantization fp8", "fp8"),
        ("llama-3.1-8b", "a100-80", "--quantization fp8", "bf16"),
        ("deepseek-v3", "h200", "", "fp8"),
        ("gpt-oss-120b", "h100", "", "bf16"),
        ("gpt-oss-120b", "b200", "", "fp8"),
    ],
)
def test_matrices_are_multiplied_in_a_type_that_the_gpu_has(name: str, gpu: str, flags: str, kind: str) -> None:
    one = replica(name, gpu, flags)
    done = work.prefill(one.model, one.setup, one.setup.batched_tokens, 16)
    matrices = done.matrix_flops / one.gpu.flops[kind] + done.attention_flops / one.gpu.flops["bf16"]
    assert one.prefill(16).compute == pytest.approx(matrices)


# -- deployments and choices ------------------------------------------------------------------------------------------


def test_sizes_that_do_not_divide_the_model_are_left_out() -> None:
    assert [one.setup.tensor for one in held("qwen2.5-7b", "h100", None)] == [1, 2, 4, 4]
    assert [one.layout for one in held("qwen2.5-7b", "h100", None)] == ["TP 1", "TP 2", "TP 4", "2 x TP 4"]


def test_every_row_is_for_the_same_load() -> None:
    found = held("llama-3.1-8b", "h100", 50, length=32_768)
    assert [one.batch for one in found] == [50] * len(found)
    assert all(one.decode and one.requests >= 50 for one in found)


def test_an_unknown_architecture_has_no_ceiling() -> None:
    unknown = replica("llama-3.1-8b")
    with pytest.raises(BadUsage, match="diag cannot compute its ceilings"):
        work.decode(replace(unknown.model, family=None), unknown.setup, 1, 1)


def test_costs_follow_from_price_and_rate() -> None:
    """$10 an hour at 3,400 tokens/s; twice that at half of it."""
    assert cost_per_million(2.5, 4, 3400) == pytest.approx(0.817, abs=0.001)
    assert cost_per_million(2.5, 4, 3400, 0.5) == pytest.approx(1.634, abs=0.001)


def test_choices_are_sentences_with_the_deciding_numbers() -> None:
    (first, *_) = held("llama-3.1-8b", "h100", 20, length=32_768)
    said = choices(first.ledger.model, first, 20)
    for part in ("2 replicas decode", "over PCIe", "prefix cache", "route long requests"):
        assert any(part in sentence for sentence in said), part


def test_a_load_beyond_one_host_is_held_by_replicas() -> None:
    found = held("llama-3-70b", "h100", 5000)
    assert all(one.requests >= 5000 for one in found) and found[0].replicas > 8
