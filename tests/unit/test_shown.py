"""The shown parts of a launch command: vLLM's flags and harmless values, nothing else."""

import pytest

from diag.vllm.command.free_text import hidden
from diag.vllm.command.redaction import VARIABLES
from diag.vllm.command.shown import shown

LEAKS = (
    *(
        f"{name}=SENTINEL vllm serve m"
        for name in ("JWT", "BEARER", "COOKIE", "CREDS", "PIN", "SALT", "VLLM_X", "NCCL_X")
    ),
    "SLACK_WEBHOOK=https://hooks.example.com/services/T/B/SENTINEL vllm serve m",
    "CONNECTION='Server=h;Uid=u;Pw=SENTINEL' vllm serve m",
    "export CONNECTION='host=h pw=SENTINEL'; vllm serve m",
    "VLLM_LOGGING_PREFIX=SENTINEL vllm serve m",
    "vllm serve 'https://u:SENTINEL@b.example.com/m?X-Amz-Signature=SENTINEL#SENTINEL'",
    "vllm serve m --otlp-traces-endpoint 'http://u:SEN/SENTINEL@h/p'",
    "ARGS='--api-key SENTINEL'; vllm serve m $ARGS",
    "ARGS='--api-key SENTINEL' vllm serve m $ARGS",
    'A=(--port 1 --api-key SENTINEL)\nvllm serve m "${A[@]}"',
    "K=SENTINEL; vllm serve m --api-key $K",
    *(f"vllm serve m --api-key {dash}SENTINEL" for dash in ("", "-", "--", "\u2013", "'a b ")),
    "vllm serve m --api-key 'a b SENTINEL'",
    *(f"vllm serve m {dash}api-key SENTINEL" for dash in ("\u2013", "\u2014", "-\u2013")),
    "vllm serve m \u2014api-key=SENTINEL",
    "vllm serve m --served-model-name a \u2013\u2013api-key SENTINEL",
    "ssh h <<EOF\nexport JWT=SENTINEL\nvllm serve m --api-key SENTINEL\nEOF",
    "cat > k <<EOF\nSENTINEL\nEOF\nvllm serve m",
    "bash <<EOF\nlogin -x SENTINEL\nvllm serve m\nEOF",
    "mysql -pSENTINEL; vllm serve m",
    "echo SENTINEL | login --stdin && vllm serve m 2> SENTINEL | tee SENTINEL # SENTINEL",
    "curl -b SENTINEL u | vllm serve m",
    "sshpass -pSENTINEL ssh SENTINEL@h 'vllm serve m'",
    "timeout 5 sshpass -p SENTINEL ssh h vllm serve m",
    "env -S 'X=SENTINEL' vllm serve m",
    "docker run -e JWT=SENTINEL --label x=SENTINEL -v SENTINEL:/b --name SENTINEL vllm/vllm-openai --model m",
    "docker run --env=JWT=SENTINEL --entrypoint SENTINEL vllm/vllm-openai --model m",
    "vllm serve m SENTINEL",
    "vllm serve m --unknown-flag SENTINEL --other=SENTINEL --SENTINEL -- SENTINEL",
    "vllm serve m --max-num-seqsSENTINEL 3 -OSENTINEL -cc.SENTINEL=1",
    "vllm serve m --max-num-seqs SENTINEL --enforce-eager=SENTINEL --port ${X:-SENTINEL} --seed $(echo SENTINEL)",
    'vllm serve m --kv-transfer-config \'{"kv_connector": "X", "kv_connector_extra_config": {"a": "SENTINEL"}}\'',
    'vllm serve m --speculative-config \'{"method": "ngram", "model": "SENTINEL", "model": "m"}\'',
    "vllm serve m --hf-overrides '{\"SENTINEL\": 1}' --model-loader-extra-config '[\"SENTINEL\"]'",
    "vllm serve m --served-model-name hf_SENTINELabcdefghij --revision 0123456789abcdef0123456789SENTINEL",
    "vllm serve m '--api-key SENTINEL' '--dtype SENTINEL'",
    "vllm serve m --api-key 'SENTINEL",
    "MAX_MODEL_LEN=SENTINEL APPTAINERENV_JWT=SENTINEL API_KEY=SENTINEL vllm serve m",
    "vllm serve org/m@SENTINEL --download-dir hf_cacheSENTINELabcdefgh",
    "vllm serve org/m --download-dir hf_models_SENTINEL --seed 1",
    "vllm serve org/m@SENTINEL0123456789abcdef0123456789abcdef01 --seed 1",
    "APPTAINERENV_VLLM_API_KEY=SENTINEL SINGULARITYENV_HF_TOKEN=SENTINEL SSL_KEYFILE=SENTINEL vllm serve m",
    'KV_TRANSFER_CONFIG=\'{"token": "SENTINEL"}\' SEED=SENTINEL ADDITIONAL_CONFIG=SENTINEL vllm serve m',
    "start-ours --secret SENTINEL --max-num-seqs 4",
    "SENTINEL --max-num-seqs 4",
    "sleep SENTINEL",
)


@pytest.mark.parametrize(
    "command",
    [
        f"vllm serve org/m@{'0123456789' * 4} --seed 1",
        "MAX_MODEL_LEN=8192 QUANTIZATION=awq APPTAINERENV_HF_HOME=/data/hf_cache vllm serve m",
        "apptainer exec --nv --cleanenv --containall vllm serve m",
        "docker create --gpus all vllm/vllm-openai:v0.25.1 --model m",
    ],
)
def test_what_is_no_secret_is_shown(command: str) -> None:
    assert shown(command) == command


@pytest.mark.parametrize("command", LEAKS)
def test_no_secret_is_shown(command: str) -> None:
    line = shown(command)
    assert "SENTINEL" not in line
    assert shown(line) == line


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("vllm serve m --api-key abc --port 80", 'vllm serve m --api-key "${VLLM_API_KEY:?}" --port 80'),
        ("vllm serve m --mxfp4-backend x", 'vllm serve m --mxfp4-backend "${WORD_5:?}"'),
        ("vllm serve m --b3kq9z-x", 'vllm serve m "${WORD_4:?}"'),
        ("vllm serve m --api-key -abc", 'vllm serve m --api-key "${VLLM_API_KEY:?}"'),
        ("vllm serve m --api-key a b", 'vllm serve m --api-key "${VLLM_API_KEY:?}" "${VLLM_API_KEY_2:?}"'),
        ("JWT=a NCCL_DEBUG=INFO vllm serve m", 'JWT="${JWT:?}" NCCL_DEBUG=INFO vllm serve m'),
        ("export HF_TOKEN=a; S=8; vllm serve m -tp $S", 'HF_TOKEN="${HF_TOKEN:?}" vllm serve m -tp 8'),
        ("docker run -e HF_TOKEN --gpus all vllm/vllm-openai:v0.9 --model m",
         'docker run -e HF_TOKEN="${HF_TOKEN:?}" --gpus all vllm/vllm-openai:v0.9 --model m'),
        ("ssh -p 22 h 'vllm serve m'", "ssh -p 22 \"${WORD_4:?}\" 'vllm serve m'"),
        ("ssh h 'docker exec -it c sh -c \"vllm serve m\"'",
         """ssh "${WORD_2:?}" 'docker exec -it "${WORD_4:?}" sh -c '"'"'vllm serve m'"'"''"""),
        ("vllm serve https://u:p@h/m?a=b#c", "vllm serve https://h/m"),
        (
            "vllm serve m --otlp-traces-endpoint http://h:4317?a=b",  # without it the server would not be the same
            'vllm serve m --otlp-traces-endpoint "${OTLP_TRACES_ENDPOINT:?}"',
        ),
        ("vllm serve /home/alice/m", "vllm serve ~/m"),
        ("vllm serve m --no-such-thing 1", 'vllm serve m --no-such-thing "${WORD_5:?}"'),
        ("ours --max-num-seqs 8 --api-key a", '"${PROGRAM:?}" --max-num-seqs 8 --api-key "${VLLM_API_KEY:?}"'),
        ("echo hello", ""),
    ],
)  # fmt: skip
def test_hidden_value_is_replaced_by_a_variable(command: str, line: str) -> None:
    assert shown(command) == line
    assert shown(line) == line


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m --max-num-batched-tokens 2048 --long-prefill-token-threshold 256 --tokenizer t --enforce-eager",
        "VLLM_CPU_OMP_THREADS_BIND='0|1' RANK=1 venv/bin/python -m vllm.entrypoints.openai.api_server --model m",
        "vllm serve org/Llama-3.1-8B-Instruct-AWQ-INT4 --served-model-name 'a b' c --no-enable-prefix-caching -O3",
        """vllm serve m --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}' -cc.mode=3""",
        """vllm serve m --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'""",
        "vllm serve org/m --revision 5f0b02c75b57c5855da9ae460ce51323ea669d8a --lora-modules a=/models/a b=/models/b",
        "numactl --cpunodebind=0 --membind 0 nice -n 10 vllm serve m --max-model-len 8k --gpu-memory-utilization .85",
        "docker run --rm -it --gpus all --ipc=host -p 8000:8000 vllm/vllm-openai:v0.9.2 --model m --max-model-len auto",
        'vllm serve "$MODEL" --port ${PORT:-8000} "$@" --download-dir ~/models --otlp-traces-endpoint http://h:4317',
    ],
)
def test_the_flags_of_vllm_stay_as_they_are(command: str) -> None:
    assert shown(command) == command


def test_variable_named_like_a_secret_is_not_harmless() -> None:
    words = ("KEY", "TOKEN", "SECRET", "PASS", "AUTH", "CREDENTIAL", "URL", "INSTRUCTIONS")
    harmless = {
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE",
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS",
    }
    found = {name for name in VARIABLES for word in words if word in name.split("_") or f"{word}S" in name.split("_")}
    assert {name for name in found if "THRESHOLD" not in name} <= harmless


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("get https://u:p@h/x failed", "get https://h/x failed"),
        ("get https://u:p/w@h/x failed", "get https://… failed"),
        ("get https://h/x?sig=abc#d failed", "get https://h/x failed"),
        ("HF_TOKEN=abc {'api_key': 'abc'} hf_abcdefghijkl", "HF_TOKEN=REDACTED {'api_key': 'REDACTED'} REDACTED"),
        ("Bearer abcdefgh /home/alice/x", "Bearer REDACTED ~/x"),
    ],
)
def test_apparent_secret_in_free_text_is_hidden(text: str, expected: str) -> None:
    assert hidden(text) == expected
