"""The running configuration: who says what, and whom to believe."""

import pytest

from diag.sources import config as configuration
from diag.sources.config import Told, from_server_info
from diag.sources.pages import Table, Target

INFO = {
    "block_size": "16",
    "num_gpu_blocks": "100",
    "gpu_memory_utilization": "0.92",
    "enable_prefix_caching": "True",
    "num_gpu_blocks_override": "None",
    "sliding_window": "None",
}


def table(*infos: dict[str, str]) -> Table:
    """One page with a `cache_config_info` for each of these."""
    target = Target("h:1")
    lines = (",".join(f'{name}="{value}"' for name, value in info.items()) for info in infos)
    target.add(0, "".join(f"vllm:cache_config_info{{{each}}} 1\n" for each in lines).encode() or b"x 1\n")
    return target.table()


def from_page(table: Table) -> configuration.Config:
    infos = table.last("vllm:cache_config_info")
    return configuration.from_page(infos, table.pages[-1].layout.engines)


def settle(table: Table, told: Told) -> tuple[configuration.Config, list[str]]:
    return configuration.settle("h:1", from_page(table), told)


def test_the_labels_of_the_page_become_numbers() -> None:
    config = from_page(table(INFO))
    assert config["gpu_memory_utilization"] == 0.92
    assert config["enable_prefix_caching"] == 1.0


def test_what_is_not_set_is_not_there() -> None:
    assert "num_gpu_blocks_override" not in from_page(table(INFO))


def test_the_capacity_of_older_versions_is_blocks_times_size() -> None:
    assert from_page(table(INFO))["kv_cache_size_tokens"] == 1600


def test_the_blocks_are_those_of_all_engines() -> None:
    config = from_page(table(INFO | {"engine": "0"}, INFO | {"engine": "1"}))
    assert (config["data_parallel_size"], config["kv_cache_size_tokens"]) == (2, 800)


@pytest.mark.parametrize("change", [{"sliding_window": "4096"}, {"mamba_block_size": "8"}, {"num_gpu_blocks": "None"}])
def test_the_capacity_is_not_guessed(change: dict[str, str]) -> None:
    assert "kv_cache_size_tokens" not in from_page(table(INFO | change))


def test_the_capacity_that_vllm_says_itself_is_of_one_engine() -> None:
    config = from_page(table(*(INFO | {"kv_cache_size_tokens": "1500", "engine": each} for each in "01")))
    assert config["kv_cache_size_tokens"] == 1500


def test_the_longest_request_is_capacity_by_concurrency() -> None:
    said = INFO | {"kv_cache_size_tokens": "3200", "kv_cache_max_concurrency": "1.5625"}
    assert from_page(table(said))["max_model_len"] == 2048


def test_a_page_without_the_info_says_nothing() -> None:
    assert from_page(table()) == {}


def test_the_last_page_counts() -> None:
    target = Target("h:1")
    for blocks in (10, 20):
        target.add(blocks, f'vllm:cache_config_info{{num_gpu_blocks="{blocks}"}} 1\n'.encode())
    assert from_page(target.table())["num_gpu_blocks"] == 20


def test_server_info_is_read_by_the_list_of_flags_alone() -> None:
    answer = {
        "vllm_config": {
            "model_config": {"max_model_len": 2048, "enforce_eager": True, "hf_token": "hf_secret"},
            "scheduler_config": {"max_num_seqs": 64, "max_num_active_seqs": None},
            "speculative_config": {"max_model_len": 1},
        },
        "vllm_env": {"VLLM_API_KEY": "secret"},
    }
    assert from_server_info(answer) == {"max_model_len": 2048, "enforce_eager": 1, "max_num_seqs": 64}


@pytest.mark.parametrize("answer", [None, [], "text", {}, {"vllm_config": "Config(...)"}, {"vllm_config": [1]}])
def test_another_server_info_says_nothing(answer: object) -> None:
    assert from_server_info(answer) == {}


def test_the_better_source_is_believed_and_the_other_is_said() -> None:
    told = Told(
        max_model_len=4096,
        server_info={"max_num_seqs": 64},
        launch="vllm serve m --max-num-seqs 32 --block-size 32 --max-model-len 2k",
    )
    config, notes = settle(table(INFO), told)
    assert (config["max_num_seqs"], config["block_size"], config["max_model_len"]) == (64, 16, 2000)
    assert notes == [
        "block_size of h:1 is 16 by its page and 32 by its launch command: 16 was used",
        "max_num_seqs of h:1 is 64 by /server_info and 32 by its launch command: 64 was used",
        "max_model_len of h:1 is 2000 by its launch command and 4096 by /v1/models: 2000 was used",
    ]


def test_sources_that_agree_are_not_noted() -> None:
    assert settle(table(INFO), Told(launch="vllm serve m --block-size 16"))[1] == []


def test_asking_again_says_the_same() -> None:
    told = Told(launch="vllm serve m --block-size 64", server_info={"block_size": 16})
    assert [len(settle(table(), told)[1]) for _ in range(3)] == [1, 1, 1]


def test_a_launch_command_that_cannot_be_read_is_said() -> None:
    assert settle(table(), Told(launch="vllm serve 'm")) == (
        {},
        ["the launch command could not be read: No closing quotation"],
    )
