"""Launch commands: the flags that are known come out, secrets do not."""

from pathlib import Path

import pytest

from diag.vllm.running_config import SET, read_launch


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve m --max-num-seqs 64", {"max_num_seqs": 64}),
        ("vllm serve m --max-num-seqs=64", {"max_num_seqs": 64}),
        ("vllm serve m --max_num_seqs 64", {"max_num_seqs": 64}),
        ("vllm serve m --max-model-len 8k", {"max_model_len": 8000}),
        ("vllm serve m --max-model-len 8K", {"max_model_len": 8192}),
        ("vllm serve m --max-model-len 25.6k", {"max_model_len": 25600}),
        ("vllm serve m --max-model-len auto", {}),
        ("vllm serve m --max-model-len -1", {}),
        ("vllm serve m --max-model-len", {}),
        ("vllm serve m -tp 2 -pp=3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
        ("vllm serve m -dp 4", {"data_parallel_size": 4}),
        ("vllm serve m --gpu-memory-utilization .85", {"gpu_memory_utilization": 0.85}),
        ("vllm serve m --device-memory-utilization .85", {"gpu_memory_utilization": 0.85}),
        ("vllm serve m --watermark 0.05", {"watermark": 0.05}),
        ("vllm serve m --enforce-eager --port 80", {"enforce_eager": 1}),
        ("vllm serve m --no-enforce-eager", {"enforce_eager": 0}),
        ("vllm serve m --no-enable-prefix-caching", {"enable_prefix_caching": 0}),
        ("vllm serve m --enable-chunked-prefill False", {"enable_chunked_prefill": 0}),
        ("vllm serve m --enable-chunked-prefill=true", {"enable_chunked_prefill": 1}),
        ("vllm serve m --no-max-num-seqs 4", {}),
        ("vllm serve m --max-num-seqs 4 --max-num-seqs 5", {"max_num_seqs": 5}),
        ("VLLM_X=1 python -m vllm.entrypoints.openai.api_server \\\n  --block-size 32", {"block_size": 32}),
        ("bash -c 'vllm serve m --block-size 32'", {"block_size": 32}),
        ("vllm serve m --served-model-name '--max-num-seqs 4'", {}),
        ("", {}),
    ],
)
def test_flags_are_read(command: str, expected: dict[str, float]) -> None:
    assert read_launch(command).flags == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve m --kv-cache-dtype fp8 --dtype=bfloat16", {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
        ("vllm serve m --dtype auto", {}),
        ("vllm serve m --quantization /etc/passwd", {"quantization": SET}),
        ("vllm serve m --quantization hf_abcdefgh1234", {"quantization": SET}),
        (
            "vllm serve m --distributed-executor-backend our.company.serving.executors.ray.OurRayExecutor",
            {"distributed_executor_backend": SET},
        ),
        (
            "vllm serve m --max-num-seqs=1,024 --watermark x --block-size $SIZE",
            {"max_num_seqs": SET, "watermark": SET, "block_size": SET},
        ),
        ("vllm serve m --distributed-executor-backend ray", {"distributed_executor_backend": "ray"}),
        ("vllm serve m --served-model-name secret --port 80", {}),
        ("vllm serve m -asc 2 -dpl 3", {"api_server_count": 2, "data_parallel_size_local": 3}),
        ("vllm serve m --kv-cache-memory 5G", {"kv_cache_memory_bytes": 5 * 2**30}),
        ("vllm serve m --long-prefill-token-threshold.x 5", {}),
        ("vllm serve m --enforce-eager --max-num-seqs 2 --no-enforce-eager", {"enforce_eager": 0, "max_num_seqs": 2}),
        ("start-our-server --max-num-seqs 5", {"max_num_seqs": 5}),
    ],
)
def test_words_and_abbreviations_are_read(command: str, expected: dict[str, float | str]) -> None:
    assert read_launch(command).flags == expected


@pytest.mark.parametrize(
    ("command", "incomplete"),
    [
        ("", "the launch command is unknown"),
        ("vllm serve m --max-num-seqs 5", ""),
        ("vllm serve m --config-format hf", ""),
        ("vllm serve m --config x.yaml", "the launch command reads a --config file"),
        ("vllm serve m --config=x.yaml", "the launch command reads a --config file"),
        ("vllm serve m '--config' x.yaml", "the launch command reads a --config file"),
        ("start-our-server --max-num-seqs 5", "the launch command is a wrapper around vLLM"),
        ("vllm serve m --max-num-seqs $SEQS", "the launch command contains shell variables"),
        ("vllm serve m $MORE", "the launch command contains shell variables"),
        ("HOME=$HOME vllm serve m", ""),
    ],
)
def test_incomplete_command_has_a_reason(command: str, incomplete: str) -> None:
    assert read_launch(command).incomplete == incomplete


def test_no_file_is_opened_for_a_command_of_another_host(tmp_path: Path) -> None:
    script, flags = tmp_path / "start.sh", tmp_path / "flags.yaml"
    script.write_text("vllm serve m --max-num-seqs 7", encoding="utf-8")
    flags.write_text("max-num-seqs: 7", encoding="utf-8")
    assert read_launch(str(script)).flags == {}
    assert read_launch(f"vllm serve m --config {flags} --block-size 32").flags == {"block_size": 32}
    assert read_launch(f"sh -c 'vllm serve m --config={flags} --block-size 32'").flags == {"block_size": 32}


def test_the_environment_that_matters_is_read_without_secrets_and_places() -> None:
    variables = (
        "CUDA_VISIBLE_DEVICES=0,1 VLLM_API_KEY=hush NCCL_DEBUG=INFO VLLM_CACHE_ROOT=/srv/x PATH=/bin A=1"
        " VLLM_HOST_IP=10.1.2.3 VLLM_DP_MASTER_IP=node-1 NCCL_COMM_ID=node-1:2950 VLLM_X=h.corp.com VLLM_Y=fe80::1"
        " NCCL_IB_HCA=mlx5_0:1,mlx5_1:1 PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,garbage_collection_threshold:0.8"
    )
    assert read_launch(f"{variables} vllm serve m").environment == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,garbage_collection_threshold:0.8",
        **dict.fromkeys(("VLLM_CACHE_ROOT", "VLLM_HOST_IP", "VLLM_DP_MASTER_IP", "NCCL_COMM_ID", "VLLM_X"), "(set)"),
        "VLLM_Y": "(set)",
    }
