"""Launch commands: the flags that are known come out, secrets do not."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diag.sources.launch import read, redact


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
    assert read(command).flags == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve m --kv-cache-dtype fp8 --dtype=bfloat16", {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
        ("vllm serve m --dtype auto", {}),
        ("vllm serve m --quantization /etc/passwd", {}),
        ("vllm serve m --quantization hf_abcdefgh1234", {}),
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
    assert read(command).flags == expected


@pytest.mark.parametrize(
    ("command", "unread"),
    [
        ("", "it is not known"),
        ("vllm serve m --max-num-seqs 5", ""),
        ("vllm serve m --config-format hf", ""),
        ("vllm serve m --config x.yaml", "it reads more flags from a file (--config)"),
        ("vllm serve m --config=x.yaml", "it reads more flags from a file (--config)"),
        ("vllm serve m '--config' x.yaml", "it reads more flags from a file (--config)"),
        ("start-our-server --max-num-seqs 5", "it is no command of vLLM's own"),
        ("vllm serve m --max-num-seqs $SEQS", "it has variables of a shell in it"),
        ("vllm serve m $MORE", "it has variables of a shell in it"),
        ("HOME=$HOME vllm serve m", ""),
    ],
)
def test_a_command_that_is_not_the_whole_story_says_why(command: str, unread: str) -> None:
    assert read(command).unread == unread


def test_no_file_is_opened_for_a_command_that_may_be_anothers(tmp_path: Path) -> None:
    script, flags = tmp_path / "start.sh", tmp_path / "flags.yaml"
    script.write_text("vllm serve m --max-num-seqs 7", encoding="utf-8")
    flags.write_text("max-num-seqs: 7", encoding="utf-8")
    assert read(str(script)).flags == {}
    assert read(f"vllm serve m --config {flags} --block-size 32").flags == {"block_size": 32}
    assert read(f"sh -c 'vllm serve m --config={flags} --block-size 32'").flags == {"block_size": 32}


def test_the_environment_that_matters_is_read_without_secrets_and_places() -> None:
    variables = "CUDA_VISIBLE_DEVICES=0,1 VLLM_API_KEY=hush NCCL_DEBUG=INFO VLLM_CACHE_ROOT=/srv/x PATH=/bin A=1"
    assert read(f"{variables} vllm serve m").environment == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "VLLM_CACHE_ROOT": "(set)",
    }


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve m --api-key abc --port 80", "vllm serve m --api-key REDACTED --port 80"),
        ("vllm serve m --api-key abc def --port 80", "vllm serve m --api-key REDACTED REDACTED --port 80"),
        ("vllm serve m --api-key=abc", "vllm serve m --api-key=REDACTED"),
        ("vllm serve m --hf_token 'a b'", "vllm serve m --hf_token REDACTED"),
        ("vllm serve m --ssl-keyfile /etc/x.key", "vllm serve m --ssl-keyfile REDACTED"),
        ("vllm serve m --some-password x", "vllm serve m --some-password REDACTED"),
        ("HF_TOKEN=abc  VLLM_API_KEY='x y' vllm serve m", "HF_TOKEN=REDACTED  VLLM_API_KEY=REDACTED vllm serve m"),
        ("docker run -e HF_TOKEN=abc i", "docker run -e HF_TOKEN=REDACTED i"),
        ("docker run --env=AWS_SECRET_ACCESS_KEY=x i", "docker run --env=AWS_SECRET_ACCESS_KEY=REDACTED i"),
        ("vllm serve s3://key:p@ss@host/m", "vllm serve s3://REDACTED@host/m"),
        ("vllm serve /home/alice/m --x /Users/bob/y", "vllm serve ~/m --x ~/y"),
        (
            """vllm serve --x '{"my_password": "x y", "a": 1}'""",
            """vllm serve --x '{"my_password": "REDACTED", "a": 1}'""",
        ),
        ("vllm serve m --x hf_abcdefgh1234", "vllm serve m --x REDACTED"),
        ("curl -H 'Authorization: Bearer abcdef123' u", "curl -H 'Authorization: Bearer REDACTED' u"),
        ("bash -c 'vllm serve m --api-key abc'", "bash -c 'vllm serve m --api-key REDACTED'"),
        ("vllm serve m --api-key 'abc", "vllm serve m --api-key REDACTED"),
    ],
)
def test_secrets_are_taken_out(command: str, expected: str) -> None:
    assert redact(command) == expected


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m --max-num-batched-tokens 2048 --long-prefill-token-threshold 256 --tokenizer t --enforce-eager",
        "VLLM_CPU_OMP_THREADS_BIND=0|1  python -m vllm --dbo-decode-token-threshold 32 --enable-auto-tool-choice",
        "vllm serve m  \\\n  --served-model-name 'a b' --disable-log-stats",
    ],
)
def test_what_is_no_secret_stays_as_it_is(command: str) -> None:
    assert redact(command) == command


@settings(deadline=None)
@given(st.text(st.sampled_from("ab -='\"\\{}:/@\n"), max_size=40))
def test_redacting_twice_is_redacting_once(command: str) -> None:
    assert redact(redact(command)) == redact(command)


@settings(deadline=None)
@given(
    st.text("abcdefgh", min_size=12),
    st.sampled_from(["--api-key {}", "--api-key={}", "X_TOKEN={} vllm", "http://u:{}@h/"]),
)
def test_no_secret_survives(secret: str, where: str) -> None:
    assert secret not in redact(f"vllm serve m {where.format(secret)}")
