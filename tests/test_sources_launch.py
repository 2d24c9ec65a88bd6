"""Launch commands: the flags that are known come out, secrets do not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diag.sources.launch import flags, redact


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
    assert flags(command) == expected


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
