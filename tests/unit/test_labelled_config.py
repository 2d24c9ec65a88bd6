"""Settings in the labels of vLLM's own page become numbers in PromQL."""

import pytest

from diag.sources.prometheus.missing_metrics import MOST_VALUES, read_page_flags, with_page_flags

INFO = {"num_gpu_blocks": "100", "block_size": "16", "sliding_window": "None", "mamba_block_size": "None"}
ASKS = 'max by (instance) (last_over_time(diag_vllm_config{flag="kv_cache_size_tokens"}[5m])) > 0'


def page(instance: str, engine: str = "0", **labels: str) -> dict[str, str]:
    return {"__name__": "vllm:cache_config_info", "instance": instance, "engine": engine, **INFO, **labels}


def test_instances_with_equal_settings_share_one_selector() -> None:
    known = read_page_flags([page("a:1"), page("b:1"), page("c:1", num_gpu_blocks="50")])
    assert known["kv_cache_size_tokens"] == {1600: ["a:1", "b:1"], 800: ["c:1"]}


def test_the_blocks_of_all_engines_are_shared_among_them() -> None:
    assert read_page_flags([page("a:1", "0"), page("a:1", "1")])["kv_cache_size_tokens"] == {800: ["a:1"]}


def test_known_settings_are_combined_with_the_query() -> None:
    told = (
        'max by (instance) ((last_over_time(diag_vllm_config{flag="kv_cache_size_tokens"}[5m]) or 1600 * '
        'max by (instance) (last_over_time(vllm:cache_config_info{instance=~"a[.]b:1"}[5m])))) > 0'
    )
    assert (
        with_page_flags(ASKS, read_page_flags([page("a.b:1")])).replace("\\\\.", "[.]").replace("1600.0", "1600")
        == told
    )


@pytest.mark.parametrize("promql", ["up", ASKS.replace("kv_cache_size_tokens", "max_num_seqs")])
def test_query_is_unchanged_without_known_settings(promql: str) -> None:
    assert with_page_flags(promql, read_page_flags([page("a:1")])) == promql


def test_beyond_the_limit_of_values_settings_stay_unknown() -> None:
    known = read_page_flags(page(f"{n}:1", num_gpu_blocks=str(100 + n)) for n in range(2 * MOST_VALUES))
    assert with_page_flags(ASKS, known).count("cache_config_info") == MOST_VALUES
