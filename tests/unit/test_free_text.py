"""Secrets in free text: none of a corpus is shown, hardly an ordinary word is hidden, in time linear in the text."""

import json
import re
import shlex
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from random import Random

import pytest
from support.paths import DATA, LOGS, RECORDINGS
from support.rows import each_row
from support.sampling import sampled
from support.secrets import CHOSEN, RANDOM, corpus, is_shown, rarer

from diag.core.errors import BadUsage
from diag.vllm.command import secret_search
from diag.vllm.command.free_text import hidden, hidden_lines

ORDINARY = """\
git 3f786850e387550fdab836ed7e6dc881de23001b and 5f0b02c75b57c5855da9ae460ce51323ea669d8a, 0.11.0rc2.dev123+g1a2b3c4d5
image vllm/vllm-openai@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
GPU-4d2ef0b1-7c1e-4a1b-9d0e-2f5b8c6a7d90 MIG-8f6c1a2b-3d4e-5f60-7182-93a4b5c6d7e8 0x7f3c2a1b4c50 00000000:3B:00.0
request chatcmpl-9f3ccc2a1b4c5d6e7f8091a2b3c4d5e6 and cmpl-6b1f4e0c9d8a47b2a3f5e6d7c8b9a0f1-0 was aborted
/root/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a16976918f6564b8830bc894c89659
/root/.cache/vllm/torch_compile_cache/9ce0c1ff45/rank_0_0/backbone and torch_aot_compile/\
04ca8b0d5d4c1a2f3e4d5c6b7a8990817263545f6e7d8c9b0a1f2e3d4c5b6a79/model
neuralmagic/Meta-Llama-3.1-405B-Instruct-FP8-dynamic Qwen/Qwen2.5-VL-72B-Instruct-AWQ deepseek-ai/DeepSeek-R1-0528
unsloth/gpt-oss-20b-GGUF nvidia/Llama-3_3-Nemotron-Super-49B-v1_5-NVFP4 RedHatAI/Qwen3-30B-A3B-quantized.w4a16
Qwen2VLForConditionalGeneration Llama4ForConditionalGeneration Phi3SmallForCausalLM FlashAttnMLAMetadataBuilder
_ZN4vllm25paged_attention_v1_kernelIttLi128ELi16ELi128ELNS_18Fp8KVCacheDataTypeE0ELb0EEEvPT_PKS2_PKT0_S8_ifPKiSA_
sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas
nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT void cutlass::device_kernel<flash::enable_sm90<FlashAttnFwdSm90>>(Params)
E=64,N=1408,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8.json VLLM_USE_TRITON_FLASH_ATTN=0 NCCL_P2P_DISABLE=1
triton_poi_fused__to_copy_add_mul_rsqrt_0 libcudart.so.12 cu128-cp312-cp312-manylinux_2_28_x86_64.whl
2026-11-24T16:02:09.123456789Z --max-num-batched-tokens 8192 --kv-cache-dtype fp8_e4m3
--tensor-parallel-size=8 max_tokens=128 eos_token='</s>' api_key=None
the --api-key is not set, and --hf-token must be given; KeyError: 'model.layers.0.self_attn.qkv_proj.weight_scale'
Bearer tokens and basic authentication; 70 tokens/s; token 5 of 9; docker run -u 1000:1000; https://h:8443/v1/models
cache_key: /root/.cache/8b0e7153bf7c3706d85c524e440066559a6656c90bd5482a90a29b9fa5ff5180/rank_0, dispatch_key = CUDA
ENV VLLM_USE_V1 1 and ENV PATH /usr/local/bin; no API key provided: the server is open; the enclave: none
vllm-llama-3-3-70b-instruct-decode-7f9c8d6b5c-x2k4q 10.0.0.1:8000 [fe80::1]:8000 user@host key-value-pairs
"""
"""Ordinary text, of which no word may be hidden."""


def lost(text: str) -> list[str]:
    """The words of a text that are hidden or changed."""
    return list((Counter(text.split()) - Counter(hidden(text).split())).elements())


def test_no_secret_of_the_corpus_is_shown() -> None:
    found = list(corpus(300))
    assert len(found) == 300
    assert len({secret.text for secret in found}) > 295
    assert [secret for secret in found if is_shown(secret.secret, hidden(secret.text))] == []


def test_no_word_of_ten_characters_is_a_secret_by_itself() -> None:
    """`hidden` shows them without a search: the shortest form of one word has eleven."""
    begins = ("", "sk_", "rk_", "hf_", "ghp_", "gho_", "eyJ", "AKIA", "ASIA", "dapi", "SK", "sbp_", "glpat_", "npm_")
    random = Random(10)
    ends = ["".join(random.choices("aZ09bQ_7xK", k=10)) for _ in range(100)]
    words = {(begin + end)[:size] for begin in begins for end in ends for size in (1, 5, 9, 10)}
    assert [word for word in words if secret_search.hidden(word) != word] == []


def test_no_secret_of_a_rarer_form_is_shown() -> None:
    """Nor if the lines of the text are hidden one by one, as those of a log are."""
    found = list(rarer(300))
    assert len({secret.text for secret in found}) > 290
    assert [secret for secret in found if is_shown(secret.secret, hidden(secret.text))] == []
    for head in ("", "(APIServer pid=7) INFO 11-21 19:00:00 [args.py:5] "):
        lines = {secret: [head + line for line in secret.text.split("\n")] for secret in found}
        assert [each for each in found if is_shown(each.secret, "\n".join(hidden_lines(lines[each])))] == []


def _notations() -> Iterator[tuple[str, bool]]:
    """The texts of tests/data/secret_notations.tsv, and whether the secret is known to be shown."""
    for line in (DATA / "secret_notations.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            kind, _, text = line.partition("\t")
            yield re.sub(r"\\[ntr0]", lambda sign: SIGNS[sign[0]], text), kind.startswith("!")


SIGNS = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\0": "\0"}


@pytest.mark.slow
def test_of_the_notations_of_programs_all_but_the_named_ones_hide_a_chosen_word() -> None:
    """A word that somebody chose, so that only its name or place tells; whole, and line by line."""
    texts = list(_notations())
    assert len(texts) > 1430
    assert sum(shown for _, shown in texts) <= 1  # a list of tokens, which are a text's here
    for secret in ("swordfish", "hunter2hunter", "Tr0ub4dor-x9"):
        filled = [(text.replace("§", secret), shown) for text, shown in texts]
        leaks = [
            text
            for text, shown in filled
            if not shown and secret in hidden(text) + "".join(hidden_lines(text.split("\n")))
        ]
        assert leaks == []


def test_the_corpus_would_show_a_leak() -> None:
    assert all(is_shown(secret.secret, secret.text) for secret in (*corpus(300), *rarer(300)))


def test_what_is_hidden_stays_as_it_is() -> None:
    texts = [hidden(secret.text) for secret in corpus(300)]
    assert [text for text in texts if hidden(text) != text] == []


@each_row("line", ORDINARY.splitlines())
def test_ordinary_words_are_not_hidden(line: str) -> None:
    assert lost(line) == []


@pytest.mark.slow
def test_four_of_seventy_thousand_ordinary_words_of_logs_are_hidden() -> None:
    files = [*LOGS.glob("*"), *RECORDINGS.glob("*/server.log")]
    lines = {line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()}
    assert sum(len(line.split()) for line in lines) > 70_000
    secret = {"['sk-hush-hush-hush'],", "api_key='sk-hush-hush-hush',"}  # two that a log of the tests has
    ordinary = {word for line in lines for word in lost(line) if word not in secret}
    # a hash of 32 digits by itself, which may as well be a key, twice, and two queries
    assert len(ordinary) == 4, ordinary


@pytest.mark.parametrize("kind", RANDOM)
def test_hardly_a_random_word_is_taken_for_an_ordinary_one(kind: str) -> None:
    random = Random(kind)
    words = [RANDOM[kind](random) for _ in range(500)]
    missed = [word for word in words if is_shown(word, hidden(f"got {word} here"))]
    assert len(missed) <= 5, missed


ODD = (
    *("SECa'SECbSEC", 'SECa"SECb', "SECx SECy SECz", "SECa,SECb;SECc", "SECa&SECb", "SECa)SECb]SECc}", "SECa\\SECb"),
    *("<SECa>SECb", "{SECa}SECb", "-SECdash", "--SECdash", "SECa@SECb", "SECa#SECb", "SECa?SECb=SECc", "SECa/SECb"),
    *("SECa:SECb", "SECa%2FSECb", "(SECa", "[SECa", "SECa$SECb", "SEC`a`SEC", "SECa\nSECb", "is SECa", "SECa, SECb"),
    *("SECa', 'SECb", 'SECa" SECb', "\\SECa\\", "SECa\\'SECb", "SECa\\", "None SEC", "${X:?} SEC"),
)
"""Secrets with the signs of every notation in them."""
NOTATIONS: dict[str, Callable[[str], str]] = {
    "dict": lambda secret: f"{{'api_key': {secret!r}, 'port': 8000}}",
    "JSON": lambda secret: json.dumps({"x": 1, "api_key": secret, "port": 8000}),
    "JSON in JSON": lambda secret: json.dumps({"body": json.dumps({"api_key": secret, "port": 8})}),
    "keyword": lambda secret: f"f(api_key={secret!r}, port=8000)",
    "list of a keyword": lambda secret: f"f(api_key={['a', secret]!r}, port=8000)",
    "nested dict": lambda secret: str({"credentials": {"a": {"b": 1}, "c": [secret]}, "port": 8000}),
    "export": lambda secret: f"export HF_TOKEN={shlex.quote(secret)}; vllm serve m",
    "flag": lambda secret: f"vllm serve m --api-key {shlex.quote(secret)} --port 80",
    "flag joined": lambda secret: f"vllm serve m --api-key={shlex.quote(secret)} --port 80",
    "command": lambda secret: str(["vllm", "serve", "--api-key", secret, "--port", "80"]),
    "command joined": lambda secret: str(["vllm", "serve", f"--api-key={secret}", "--port", "80"]),
    "second value of a flag": lambda secret: str(["vllm", "serve", "--api-key", "a", f"x{secret}", "--port", "80"]),
    "pair": lambda secret: str([("token", secret), ("port", "80")]),
    "pair of bytes": lambda secret: str([(b"authorization", secret.encode()), (b"port", b"80")]),
    "header of curl": lambda secret: f"curl -H {shlex.quote(f'X-Api-Key: {secret}')} http://h",
}


@each_row("notation, secret", [*product(NOTATIONS, ODD)])
def test_a_secret_is_hidden_to_its_end_whatever_signs_it_has(notation: str, secret: str) -> None:
    assert "SEC" not in hidden(NOTATIONS[notation](secret))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm serve m --api-key a b --port 80", "vllm serve m --api-key REDACTED REDACTED --port 80"),
        ("{'api_key': ['a', 'b'], 'hf_token': None}", "{'api_key': REDACTED, 'hf_token': None}"),
        ('--api-key "${VLLM_API_KEY:?}" --port 80', '--api-key "${VLLM_API_KEY:?}" --port 80'),
        ("Authorization: Digest username=b, response=c", "Authorization: REDACTED"),
        ("password: correct horse battery", "password: REDACTED"),
        ("TOKEN=$(cat /run/x y) vllm", "TOKEN=REDACTED vllm"),
        ("machine h login me password pw", "machine h login me password REDACTED"),
        ("see https:/u:p@h:1/x?y=1#z, or u:p@h", "see https:/h:1/x, or h"),
        (
            "as documented: api_key='token-abc123', not token-abc1234",
            "as documented: api_key='token-abc123', not token-abc1234",
        ),
        (
            f"the header was {b64encode(b'me:pw7xyz').decode()}, or {b'me:pw7x'.hex()}",
            "the header was REDACTED, or REDACTED",
        ),
        (f"the digest was {b64encode(b'a sum: ok').decode()}", f"the digest was {b64encode(b'a sum: ok').decode()}"),
    ],
)
def test_the_text_around_a_secret_stays(text: str, expected: str) -> None:
    assert hidden(text) == expected


HOSTILE = (
    *("a", '"', "\\", '"a": [', "token=", '"token": [', "({", 'token="', "--api-key x ", "http://", "u:p@", "a://b?"),
    *("-----BEGIN A-----", "aB3x", "0123456789abcdef", " ", "token" + " " * 50, '("token", ', "login a password "),
    *(
        "cookie: \\",
        "-u a:",
        "Bearer ",
        "token: bearer ",
        "eyJabcde",
        "_-",
        "/?a=",
        "'token' : ",
        '\\"token\\": ',
        "w.",
    ),
    *("'--api-key', 'x', ", "tokentoken-", "token:\n", "/a", "login\t"),
)


@pytest.mark.slow
@sampled("piece", HOSTILE, 10)
def test_the_time_is_linear_in_the_text(piece: str) -> None:
    for text in ((piece * 2**16)[: 2**16], "token=" + (piece * 2**16)[: 2**16], "token='" + " " * 2**16 + piece):
        begin = time.process_time()
        hidden(text)
        assert time.process_time() - begin < 1.0  # quadratic ones take minutes


SECRET_PARTS = ("sekretuser", "sekretpw", "sekretsig", "sekretfragment")


@pytest.mark.parametrize(
    "address",
    [
        "https://sekretuser:sekretpw@h/p?sig=sekretsig#sekretfragment",
        "https:/sekretuser:sekretpw@h/p?sig=sekretsig",
        "--https://sekretuser:sekretpw@h",
        "sekretuser:sekretpw@h/p?sig=sekretsig",
        "https://sekretuser:sekret/pw?x@h/sekretsig",
        "https://sekretuser:sekretpw…",
        "s3://h/p?sig=sekretsig@x/sekretpw",
    ],
)
def test_no_error_shows_user_query_and_fragment_of_an_address(address: str) -> None:
    said = str(BadUsage(f"{address}: it cannot be read; {address}, is the name right?"))
    assert not [part for part in (*SECRET_PARTS[1:], "sekret/pw") if part in said]
    assert "it cannot be read; " in said
    assert said.endswith(", is the name right?") or said.endswith("is the name right?")


assert CHOSEN.keys().isdisjoint(RANDOM)
