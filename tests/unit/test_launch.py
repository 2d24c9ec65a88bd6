"""Launch commands: the flags that are known come out, secrets do not."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diag.core.errors import BadUsage
from diag.vllm.command.script import statements
from diag.vllm.command.secrets import redact
from diag.vllm.server.launch import SET, read


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
    assert read(command).flags == expected


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
def test_a_command_that_is_not_the_whole_story_says_why(command: str, incomplete: str) -> None:
    assert read(command).incomplete == incomplete


def test_no_file_is_opened_for_a_command_that_may_be_anothers(tmp_path: Path) -> None:
    script, flags = tmp_path / "start.sh", tmp_path / "flags.yaml"
    script.write_text("vllm serve m --max-num-seqs 7", encoding="utf-8")
    flags.write_text("max-num-seqs: 7", encoding="utf-8")
    assert read(str(script)).flags == {}
    assert read(f"vllm serve m --config {flags} --block-size 32").flags == {"block_size": 32}
    assert read(f"sh -c 'vllm serve m --config={flags} --block-size 32'").flags == {"block_size": 32}


def test_the_environment_that_matters_is_read_without_secrets_and_places() -> None:
    variables = (
        "CUDA_VISIBLE_DEVICES=0,1 VLLM_API_KEY=hush NCCL_DEBUG=INFO VLLM_CACHE_ROOT=/srv/x PATH=/bin A=1"
        " VLLM_HOST_IP=10.1.2.3 VLLM_DP_MASTER_IP=node-1 NCCL_COMM_ID=node-1:2950 VLLM_X=h.corp.com VLLM_Y=fe80::1"
        " NCCL_IB_HCA=mlx5_0:1,mlx5_1:1 PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,garbage_collection_threshold:0.8"
    )
    assert read(f"{variables} vllm serve m").environment == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,garbage_collection_threshold:0.8",
        **dict.fromkeys(("VLLM_CACHE_ROOT", "VLLM_HOST_IP", "VLLM_DP_MASTER_IP", "NCCL_COMM_ID", "VLLM_X"), "(set)"),
        "VLLM_Y": "(set)",
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
        ("HF_TOKEN = abc vllm serve m", "HF_TOKEN = REDACTED vllm serve m"),
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
        ("ssh h 'vllm serve m --api-key abc'", "ssh h 'vllm serve m --api-key REDACTED'"),
        ("vllm serve m --api-key 'abc", "vllm serve m --api-key REDACTED"),
        ("vllm serve m --hf-tok abc --swap-space 4", "vllm serve m --hf-tok REDACTED --swap-space 4"),
        ("vllm serve m --api abc --port 80", "vllm serve m --api REDACTED --port 80"),
        ("vllm serve --hf-token abc m", "vllm serve --hf-token REDACTED m"),
        ("vllm serve m --api-key -abc --port 80", "vllm serve m --api-key REDACTED --port 80"),
        ("vllm serve m '--api-key' 'abc'", "vllm serve m '--api-key' REDACTED"),
        ("vllm serve m '--api-key=abc' \\\n --port 80", "vllm serve m --api-key=REDACTED \\\n --port 80"),
        ("vllm serve m --api-key \\\n abc \\\n --port 80", "vllm serve m --api-key \\\n REDACTED \\\n --port 80"),
        ("vllm serve m --api-key=$(echo abc)", "vllm serve m --api-key=REDACTED"),
        ("vllm serve m --api-key $(cat $(ls /k)) --port 80", "vllm serve m --api-key REDACTED --port 80"),
        (
            "vllm serve $(get --token abc) --x `get --token abc`",
            "vllm serve $(get --token REDACTED) --x `get --token REDACTED`",
        ),
        ("VLLM_API_KEY=abc;vllm serve m", "VLLM_API_KEY=REDACTED;vllm serve m"),
        ("docker login --password-stdin\nvllm serve m", "docker login --password-stdin\nvllm serve m"),
        ("vllm serve m --api-key\nabc", "vllm serve m --api-key\nREDACTED"),
        ("vllm serve m --api-key # abc", "vllm serve m --api-key #"),
        ("(vllm serve m --api-key abc) && echo b", "(vllm serve m --api-key REDACTED) && echo b"),
        (
            "echo $T | docker login --password-stdin; vllm serve m",
            "echo $T | docker login --password-stdin; vllm serve m",
        ),
        (
            "VLLM_API_KEY=abc; vllm serve m --api-key a|b",
            "VLLM_API_KEY=REDACTED; vllm serve m --api-key REDACTED|REDACTED",
        ),
        ("sshpass -p abc ssh -p 22 h vllm serve m", "sshpass -p REDACTED ssh -p 22 h vllm serve m"),
        ("sshpass -p'a b' ssh h && curl -s -u me:abc 'u v'", "sshpass -pREDACTED ssh h && curl -s -u REDACTED 'u v'"),
        ("ssh root:abc@h docker run vllm:v1@sha256:ab", "ssh REDACTED@h docker run vllm:v1@sha256:ab"),
        ('docker run --env "HF_TOKEN=$HF_TOKEN" -p 8000:8000 i', "docker run --env HF_TOKEN=REDACTED -p 8000:8000 i"),
        ('sh -c "VLLM_API_KEY=abc vllm serve $M"', 'sh -c VLLM_API_KEY="REDACTED vllm serve $M"'),
        ("""vllm serve m --x '{"key": 98765, "a": 1}'""", """vllm serve m --x '{"key": "REDACTED", "a": 1}'"""),
        ("vllm serve m --x /home/alice/a\\ b", "vllm serve m --x ~/a\\ b"),
        ("""vllm serve m --x "{'api_keys': ['b']}" """, """vllm serve m --x "{'api_keys': 'REDACTED'}" """),
        (
            """vllm serve m --x '{"a": "{\\"a_key\\": \\"b\\"}", "eos_token_id": 4}'""",
            """vllm serve m --x '{"a": "{\\"a_key\\": \\"REDACTED\\"}", "eos_token_id": 4}'""",
        ),
        (
            "curl -H 'X-Api-Key: abc d' -H 'Authorization: token abc' u",
            "curl -H 'X-Api-Key: REDACTED' -H 'Authorization: token REDACTED' u",
        ),
        ("vllm serve 'https://h/m?token=abc&x=1'", "vllm serve 'https://h/m?token=REDACTED&x=1'"),
        (
            """vllm serve --allowed-origins '["https://h?a=1&key=abc"]'""",
            """vllm serve --allowed-origins '["https://h?a=1&key=REDACTED"]'""",
        ),
        ("vllm serve s3://AKIAABCDEFGHIJKLMNOP/m", "vllm serve s3://REDACTED/m"),
        ("vllm serve m --x eyJhbGciOiJI.eyJzdWIi.abc_d", "vllm serve m --x REDACTED"),
        ("# don't\nvllm serve m --x 'y' # my token is abc", "# don't\nvllm serve m --x 'y' #"),
        ("vllm serve '/home/alice/my m' --x='/home/alice/y'", "vllm serve ~/'my m' --x=~/y"),
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
        "vllm serve m --hf_overrides '{\"max_tokens\": 3}' --allow-credentials --disable-log-stats",
        "vllm serve m --x '' a",
        "vllm serve --allow-credentials m",
        "curl http://h; docker run -u 1000 vllm/vllm-openai m",
        "# don't forget the pool\nvllm serve m --x 'y'",
    ],
)
def test_what_is_no_secret_stays_as_it_is(command: str) -> None:
    assert redact(command) == command


PIECES = (
    *("a", "b c", " ", "=", "-", "'", '"', "\\", ":", "/", "@", "\n", ";", "|", "#", "$X", "$(a b)", "~"),
    *("--api-key", "--hf-tok", "HF_TOKEN=", '{"key": 12}', "'--x'", "/home/al/", "sh -c ", "sshpass -p", "X-Key: "),
)


@given(st.text(st.sampled_from("ab -='\"\\{}:/@\n"), max_size=40))
def test_redacting_twice_is_redacting_once(command: str) -> None:
    assert redact(redact(command)) == redact(command)


def words(command: str) -> list[int] | None:
    """How many there are in each statement; None where it cannot be read."""
    try:
        return [len(each) for _, each in statements(command)]
    except BadUsage:
        return None


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_a_redacted_command_has_as_many_words_and_nothing_more_to_redact(text: str) -> None:
    command = text.replace("\n", " ")  # an option without a value at the end of a line: the next word may be it
    before = words(command)
    once = redact(command)
    assert before is None or (words(once), redact(once)) == (before, once)


@given(
    st.text("abcdefgh", min_size=12),
    st.sampled_from(["--api-key {}", "--api-key={}", "X_TOKEN={} vllm", "http://u:{}@h/"]),
)
def test_no_secret_survives(secret: str, where: str) -> None:
    assert secret not in redact(f"vllm serve m {where.format(secret)}")
