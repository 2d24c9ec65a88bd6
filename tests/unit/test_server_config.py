"""The running configuration: the value of every source, and which source is used."""

import pytest

from diag.exposition.scrapes import ScrapeTable, Target
from diag.vllm import running_config
from diag.vllm.running_config import SET, ServerFacts, from_server_info

INFO = {
    "block_size": "16",
    "num_gpu_blocks": "100",
    "gpu_memory_utilization": "0.92",
    "enable_prefix_caching": "True",
    "num_gpu_blocks_override": "None",
    "sliding_window": "None",
}


def table(*infos: dict[str, str]) -> ScrapeTable:
    """One page with a `cache_config_info` for each of these."""
    target = Target("h:1")
    lines = (",".join(f'{name}="{value}"' for name, value in info.items()) for info in infos)
    target.add(0, "".join(f"vllm:cache_config_info{{{each}}} 1\n" for each in lines).encode() or b"x 1\n")
    return target.table()


def from_page(table: ScrapeTable) -> running_config.Config:
    infos = table.last("vllm:cache_config_info")
    return running_config.from_page(infos, table.pages[-1].layout.engines)


def settle(table: ScrapeTable, told: ServerFacts) -> tuple[running_config.Config, list[str]]:
    settled = running_config.settle(from_page(table), told)
    return settled.numbers, settled.notes("h:1")


def test_the_labels_of_the_page_become_numbers() -> None:
    found = from_page(table(INFO))
    assert found["gpu_memory_utilization"] == 0.92
    assert found["enable_prefix_caching"] == 1.0


def test_unset_settings_are_missing() -> None:
    assert "num_gpu_blocks_override" not in from_page(table(INFO))


def test_the_capacity_of_older_versions_is_blocks_times_size() -> None:
    assert from_page(table(INFO))["kv_cache_size_tokens"] == 1600


def test_the_blocks_are_those_of_all_engines() -> None:
    found = from_page(table(INFO | {"engine": "0"}, INFO | {"engine": "1"}))
    assert (found["data_parallel_size"], found["kv_cache_size_tokens"]) == (2, 800)


@pytest.mark.parametrize("change", [{"sliding_window": "4096"}, {"mamba_block_size": "8"}, {"num_gpu_blocks": "None"}])
def test_the_capacity_is_not_guessed(change: dict[str, str]) -> None:
    assert "kv_cache_size_tokens" not in from_page(table(INFO | change))


def test_capacity_published_by_vllm_is_per_engine() -> None:
    found = from_page(table(*(INFO | {"kv_cache_size_tokens": "1500", "engine": each} for each in "01")))
    assert found["kv_cache_size_tokens"] == 1500


def test_the_longest_request_is_capacity_by_concurrency() -> None:
    said = INFO | {"kv_cache_size_tokens": "3200", "kv_cache_max_concurrency": "1.5625"}
    assert from_page(table(said))["max_model_len"] == 2048


def test_page_without_cache_config_info_has_no_settings() -> None:
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
def test_unknown_server_info_is_ignored(answer: object) -> None:
    assert from_server_info(answer) == {}


def test_the_more_trusted_source_is_used_and_a_conflict_is_noted() -> None:
    told = ServerFacts(
        max_model_len=4096,
        server_info={"max_num_seqs": 64},
        launch="vllm serve m --max-num-seqs 32 --block-size 32 --max-model-len 2k",
    )
    found, notes = settle(table(INFO), told)
    assert (found["max_num_seqs"], found["block_size"], found["max_model_len"]) == (64, 16, 4096)
    assert notes == [
        "block_size of h:1 is 16 (/metrics) but 32 (launch command): 16 is used",
        "max_model_len of h:1 is 4096 (/v1/models) but 2000 (launch command): 4096 is used",
        "max_num_seqs of h:1 is 64 (/server_info) but 32 (launch command): 64 is used",
    ]


def test_sources_that_agree_are_not_noted() -> None:
    assert settle(table(INFO), ServerFacts(launch="vllm serve m --block-size 16"))[1] == []


def test_settling_again_gives_the_same_notes() -> None:
    told = ServerFacts(launch="vllm serve m --block-size 64", server_info={"block_size": 16})
    assert [len(settle(table(), told)[1]) for _ in range(3)] == [1, 1, 1]


def test_a_launch_command_that_cannot_be_parsed_is_noted() -> None:
    assert settle(table(), ServerFacts(launch="vllm serve 'm")) == (
        {},
        ["the launch command could not be parsed: the command has an unclosed quotation mark or parenthesis"],
    )


NAMES = (
    running_config.SERVER_INFO,
    running_config.PROCESS,
    running_config.LOG,
    running_config.PAGE,
    running_config.EXPORTER,
    running_config.MODELS,
    running_config.LAUNCH,
)
"""In the order of the issue that asked for it: the server's own word, its process, its log, its page, and so on."""


def everybody(name: str, flag: str, without: tuple[str, ...]) -> running_config.RunningConfig:
    """Every source says another number, but for those that are silent."""
    value = {source: float(16 * number) for number, source in enumerate(NAMES, 1) if source not in without}
    said = {source: {name: number} for source, number in value.items()}
    commands = {source: f"vllm serve m {flag} {number:.0f}" for source, number in value.items()}
    told = ServerFacts(
        max_model_len=value.get(running_config.MODELS) if name == "max_model_len" else None,
        server_info=said.get(running_config.SERVER_INFO, {}),
        log=said.get(running_config.LOG, {}),
        launch=commands.get(running_config.LAUNCH, ""),
        process=commands.get(running_config.PROCESS, ""),
    )
    return running_config.settle(said.get(running_config.PAGE, {}), told, said.get(running_config.EXPORTER))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("max_num_seqs", (0, 1, 3, 2, 4, 6)),
        ("max_model_len", (0, 3, 2, 4, 5, 1, 6)),
        ("block_size", (0, 3, 2, 4, 1, 6)),
    ],
)
def test_a_value_is_that_of_the_most_trusted_source(name: str, order: tuple[int, ...]) -> None:
    flag, sources = f"--{name.replace('_', '-')}", [NAMES[at] for at in order]
    for silent, source in enumerate(sources):
        setting = everybody(name, flag, tuple(sources[:silent])).settings[name]
        assert (setting.source, setting.value) == (source, 16 * (NAMES.index(source) + 1))
        assert [each.source for each in setting.others] == sources[silent + 1 :]


def test_an_exporter_that_relays_another_source_is_not_the_source() -> None:
    settled = running_config.settle(
        {}, ServerFacts(launch="vllm serve m --max-num-seqs 4"), {"max_num_seqs": 4.0, "block_size": 16.0}
    )
    assert settled.settings["max_num_seqs"].source == running_config.LAUNCH
    assert settled.settings["max_num_seqs"].others == ()
    assert settled.settings["block_size"].source == running_config.EXPORTER


def test_settings_that_are_words_are_no_numbers_and_give_no_notes() -> None:
    settled = running_config.settle(
        {"kv_cache_dtype": "auto"}, ServerFacts(process="vllm serve m --kv-cache-dtype fp8 --dtype half")
    )
    assert settled.settings["kv_cache_dtype"].value == "fp8"
    assert (settled.numbers, settled.notes("h:1")) == ({}, [])


def test_server_info_is_read_in_the_layout_of_every_release() -> None:
    answer = {
        "vllm_config": {
            "model_config": {"dtype": "torch.bfloat16", "quantization": None, "tokenizer": "hush"},
            "cache_config": {"cache_dtype": "fp8_e4m3"},
            "scheduler_config": {"policy": "priority"},
            "parallel_config": {"distributed_executor_backend": "/srv/own.py", "_api_process_count": 2},
            "attention_config": {"backend": "FLASH_ATTN"},
            "lora_config": {"max_loras": 3},
            "offload_config": {"uva": {"cpu_offload_gb": 4}},
            "speculative_config": {"quantization": "awq"},
            "performance_mode": "throughput",
        },
    }
    more = {"attention_backend": "FLASH_ATTN", "performance_mode": "throughput", "distributed_executor_backend": SET}
    numbers = {"api_server_count": 2, "max_loras": 3, "cpu_offload_gb": 4}
    expected = numbers | more | {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "scheduling_policy": "priority"}
    assert from_server_info(answer) == expected


@pytest.mark.parametrize(
    ("told", "incomplete"),
    [
        (ServerFacts(), "the launch command is unknown"),
        (ServerFacts(launch="vllm serve m"), ""),
        (ServerFacts(process="vllm serve m"), ""),
        (
            ServerFacts(process="vllm serve m --config c.yaml", launch="vllm serve m"),
            "the launch command reads a --config file",
        ),
        (ServerFacts(launch="vllm serve 'm"), "the launch command could not be parsed"),
        (ServerFacts(server_info={"max_num_seqs": 4}), ""),
        (ServerFacts(log={"max_num_seqs": 4}), "the launch command is unknown"),
        (ServerFacts(log={"max_num_seqs": 4}, log_whole=True), ""),
    ],
)
def test_why_the_configuration_is_incomplete(told: ServerFacts, incomplete: str) -> None:
    assert running_config.settle({}, told).incomplete == incomplete


@pytest.mark.parametrize(
    ("flag", "asked", "seen", "differ"),
    [
        ("kv_cache_dtype", "fp8", "auto", ("fp8",)),
        ("kv_cache_dtype", "auto", "fp8", ()),
        ("kv_cache_dtype", "fp8", "fp8", ()),
        ("dtype", "bfloat16", "auto", ()),
        ("dtype", "bfloat16", "float16", ("bfloat16",)),
        ("quantization", "fp8", "auto", ()),
    ],
)
def test_auto_is_open_where_a_command_or_a_file_of_the_model_may_say_more(
    flag: str, asked: str, seen: str, differ: tuple[str, ...]
) -> None:
    told = ServerFacts(launch=f"vllm serve m --{flag.replace('_', '-')} {asked}", log={flag: seen})
    setting = running_config.settle({}, told).settings[flag]
    assert (setting.value, tuple(each.value for each in setting.conflicts)) == (seen, differ)


def test_a_hidden_value_is_trusted_least() -> None:
    told = ServerFacts(process="vllm serve m --max-num-seqs $SEQS --block-size x", log={"max_num_seqs": 7.0})
    settled = running_config.settle({}, told)
    assert (settled.settings["max_num_seqs"].value, settled.settings["max_num_seqs"].conflicts) == (7, ())
    assert (settled.settings["block_size"].value, settled.numbers) == (SET, {"max_num_seqs": 7})


@pytest.mark.parametrize(
    ("told", "device"),
    [
        (ServerFacts(log={"device": "cpu"}), "cpu"),
        (ServerFacts(log={"device": "cuda"}, launch="VLLM_CPU_KVCACHE_SPACE=1 vllm serve m"), "cuda"),
        (ServerFacts(server_info=from_server_info({"vllm_config": {"device_config": {"device_type": "cpu"}}})), "cpu"),
        (ServerFacts(launch="vllm serve m --device cuda:1"), "cuda"),
        (ServerFacts(process="VLLM_CPU_OMP_THREADS_BIND=0-1 vllm serve m"), "cpu"),
        (ServerFacts(version="0.11.0+cpu"), "cpu"),
        (ServerFacts(version="0.32.0", launch="vllm serve m"), ""),
    ],
)
def test_device_is_read_from_any_source_that_has_it(told: ServerFacts, device: str) -> None:
    assert running_config.settle({}, told).device == device


@pytest.mark.parametrize("concurrency", ["1e-320", "1e308", "nan", "inf", "9" * 400, "-1e-300"])
def test_setting_that_vllm_never_writes_is_unknown(concurrency: str) -> None:
    info = {"engine": "0", "kv_cache_size_tokens": "4096", "kv_cache_max_concurrency": concurrency}
    assert running_config.from_page([info], 1) == {"kv_cache_size_tokens": 4096.0, "data_parallel_size": 1.0}
