"""The work of a running server as samples: by hand, and where too little is known of it."""

import pytest
from support.paths import MODELS

from diag.core.metric_families import families
from diag.vllm.running_config import ServerFacts, settle
from diag.vllm.work import gpu_samples, server_samples


def work(flags: str = "", name: str = "llama-3.1-8b", **facts: object) -> dict[str, float]:
    """The samples of a server, by family and labels; all of it comes from its command unless `facts` say more."""
    given = {"launch": f"vllm serve {MODELS / name} {flags}", "version": "0.32.0"} | facts
    server = ServerFacts(**given)  # type: ignore[arg-type]
    samples = server_samples(settle({}, server), server)
    assert all(len(labels) == len(families()[family].labels) for family, labels, _ in samples)
    return {" ".join([family.removeprefix("diag_vllm_"), *labels]): value for family, labels, value in samples}


def test_capacity_series_of_a_dense_model_match_a_manual_calculation() -> None:
    found = work("--tensor-parallel-size 2")
    assert found["weight_bytes every_step"] == pytest.approx(8.03e9 - 128_256 * 4096, rel=0.001)
    assert (found["weight_bytes experts"], found["experts_per_token_ratio"]) == (0, 1)
    assert found["kv_cache_bytes_per_token"] == 65_536
    assert found["all_reduce_bytes_per_token"] == 32 * 2 * 4096 * 2


def test_stages_share_the_layers() -> None:
    whole, half = work(), work("--pipeline-parallel-size 2")
    assert all(half[name] == whole[name] / 2 for name in whole if "ratio" not in name)


def test_only_layers_that_attend_to_everything_count_for_the_context() -> None:
    """Gemma 3 27B: 10 of 62 layers, 16 KV heads of 128."""
    assert work(name="gemma-3-27b")["kv_cache_bytes_per_token"] == 10 * 2 * 16 * 128 * 2


def test_running_configuration_overrides_the_command() -> None:
    logged = {"tensor_parallel_size": 2.0, "kv_cache_dtype": "fp8", "dtype": "torch.float32"}
    assert work(log=logged)["kv_cache_bytes_per_token"] == 131_072 // 4
    assert work(log=logged)["weight_bytes every_step"] == pytest.approx(work()["weight_bytes every_step"], rel=0.001)


def test_the_root_of_v1_models_stands_in_for_a_command_where_all_settings_are_known() -> None:
    root = str(MODELS / "llama-3.1-8b")
    logged = {"tensor_parallel_size": 2.0}
    assert work(launch="", root=root, log=logged, log_whole=True) == work("--tensor-parallel-size 2")
    assert work(launch="", root=root, log=logged) == {}


@pytest.mark.parametrize(
    "launch",
    [
        "",
        "./start.sh",
        "vllm serve nobody/has-this",
        f"vllm serve {MODELS / 'llama-3.1-8b'} --config other.yaml",
        f"vllm serve {MODELS / 'llama-3.1-8b'} --hf-overrides '{{\"num_hidden_layers\": 2}}'",
        f"vllm serve {MODELS / 'llama-3.1-8b'} --kv-cache-dtype turbo",
        f"vllm serve {MODELS / 'mixtral-8x7b'} --data-parallel-size 2",
        "vllm serve 'unclosed",
    ],
)
def test_unknown_properties_of_a_server_have_no_samples(launch: str) -> None:
    assert work(launch=launch) == {}


def test_a_gpu_without_a_data_sheet_has_no_samples() -> None:
    assert list(gpu_samples("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ("0", "u"))) == []
