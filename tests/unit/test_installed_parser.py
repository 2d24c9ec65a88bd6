"""The rules of `diag lint` and a real vLLM: what one refuses or accepts the other refuses or accepts."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from support.live import model, server
from support.paths import TESTS
from support.rows import each_row

from diag.commands.lint import judge
from diag.core.errors import BadUsage
from diag.lint.rule import LintTarget
from diag.lint.rules import corrected, lint
from diag.vllm.command.parse import read
from diag.vllm.flags import installed_parser as ask
from diag.vllm.flags.registry import described

ORACLE = TESTS / "support" / "live" / "engine_config.py"
ACCEPTED = """
--port 8000
--max_num_seqs 8
--max-num-seqs=8
--max-num-se 8
--max-num-seqs 1_000
--max-num-seqs +8
--max-num-seqs " 8"
--enable-prefix-caching
--no-enable-prefix-caching
--no_enable_prefix_caching
--enforce-eager --no-enforce-eager
--max-num-seqs 8 --max-num-seqs 16
-tp 1
-tp=1
-q None
-O3
-O 3
-O=1
-cc '{"cudagraph_mode": "NONE"}'
-cc.cudagraph_mode=NONE
--compilation-config.cudagraph_mode NONE
--compilation_config.pass_config.fuse_allreduce_rms true
--max-model-len 1k
--max-model-len 1K
--max-model-len auto
--max-model-len -1
--max-model-len 8k --max-num-batched-tokens 4k
--gpu-memory-utilization 1
--gpu-memory-utilization .5
--device-memory-utilization 0.5
--kv-cache-memory 1G
--kv-cache-dtype fp8
--dtype half
--served-model-name a b c
--api-key a b
--enable-lora --lora-modules x=y
--enable-lora --max-loras 4 --max-cpu-loras 4
--quantization fp8
--cudagraph-capture-sizes 1 2 4
--max-cudagraph-capture-size 0
--middleware a.b --middleware c.d
--allowed-origins '["*"]'
--hf-overrides '{"a": 1}'
--mm-processor-kwargs '{"a": 1}'
--limit-mm-per-prompt '{"image": 2}'
--override-generation-config '{"temperature": 0.5}'
--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
--speculative-config.method ngram --speculative-config.num_speculative_tokens 3 --speculative-config.prompt_lookup_max 3
NGRAM
--max-num-batched-tokens 128 --max-num-seqs 128
--max-num-batched-tokens 8192 --max-num-seqs 2 --max-model-len 512
--long-prefill-token-threshold 200 --max-model-len 1024
--enable-auto-tool-choice --tool-call-parser hermes
--enable-log-outputs --enable-log-requests
--distributed-executor-backend mp
--watermark 0.05
--stream-interval 5
--max-logprobs -1
--seed -1
--data-parallel-size 2 --data-parallel-size-local 0
--hf-token
--hf-token abc
-n 1 -r 0
--disable-cascade-attn
--moe-backend deep-gemm
--dcp-comm-backend None
--safetensors-prefetch-block-size 16M
--no-async-scheduling
--disable-access-log-for-endpoints /health,/metrics
"""
REFUSED = """
ambiguous_flag               --max-num 8
switch_with_a_value          --enable-prefix-caching true
switch_with_a_value          --enable-prefix-caching=true
switch_with_a_value          --enforce-eager false
no_such_negation             --no-headless
no_such_negation             --no-disable-log-stats
unknown_flag                 -tp1
unknown_flag                 --gpu-memory-utilisation 0.5
value_of_wrong_type        -O fast
value_out_of_range           -O7
value_of_wrong_type        --compilation-config 3
value_of_wrong_type        --compilation-config '{"a'
value_of_wrong_type        --max-model-len 0.5K
value_of_wrong_type        --max-model-len 1.5
value_out_of_range           --max-model-len -2
value_out_of_range           --max-model-len 0
context_above_the_model      --max-model-len 99999999
value_of_wrong_type        --max-num-seqs 1k
value_of_wrong_type        --max-num-seqs eight
value_of_wrong_type        --max-num-seqs None
value_of_wrong_type        --cudagraph-capture-sizes 1 x
value_of_wrong_type        --kv-offloading-size abc
value_of_wrong_type        --gpu-memory-utilization 90%
value_of_wrong_type        --port 80a
value_of_wrong_type        --seed 1e3
value_of_wrong_type        --allowed-origins x
value_of_wrong_type        --mm-processor-kwargs x
value_of_wrong_type        --limit-mm-per-prompt image=2
value_missing                --max-num-seqs
value_missing                --cudagraph-capture-sizes
value_missing                --config
value_out_of_range           --max-num-seqs 0
value_out_of_range           --max-num-seqs -5
value_out_of_range           --gpu-memory-utilization 1.7
value_out_of_range           --gpu-memory-utilization 0
value_out_of_range           --gpu-memory-utilization -.5
value_out_of_range           --watermark 1
value_out_of_range           --watermark -0.1
value_out_of_range           --block-size 0
value_out_of_range           --stream-interval 0
value_out_of_range           --tensor-parallel-size 0
value_out_of_range           --data-parallel-rpc-port 70000
value_out_of_range           --kv-cache-metrics --kv-cache-metrics-sample 0
value_out_of_range           --max-logprobs -2
value_out_of_range           --cpu-offload-gb -1
value_out_of_range           --max-loras 0 --enable-lora
value_out_of_range           --max-num-queued-reqs -1
value_out_of_range           --max-num-scheduled-tokens 0
value_out_of_range           --prefill-schedule-interval 0
value_out_of_range           --ubatch-size -1
value_out_of_range           --nnodes 0
not_a_choice                 --kv-cache-dtype fp7
not_a_choice                 --scheduling-policy sjf
not_a_choice                 --dtype fp16
not_a_choice                 --enable-lora --max-lora-rank 7
removed_flag                 --swap-space 4
removed_flag                 --num-scheduler-steps 8
removed_flag                 --speculative-model X --num-speculative-tokens 5
removed_flag                 --task embed
removed_flag                 --disable-log-requests
removed_flag                 --enable-reasoning
removed_flag                 --cuda-graph-sizes 1 2
optimization_level_with_settings                  -O.mode=3
optimization_level_with_settings                  -O.cudagraph_mode NONE
optimization_level_with_settings                  -O '{"mode": 3}'
compilation_level            -cc.level 3
word_too_many                extra
word_too_many                --dtype auto extra
flag_and_value_in_one_word   '--dtype auto'
no_such_executor             --distributed-executor-backend nccl
heads_do_not_divide          --tensor-parallel-size 3
experts_of_a_dense_model     --enable-expert-parallel
fewer_tokens_than_sequences  --max-num-batched-tokens 64 --max-num-seqs 128
whole_prompts_do_not_fit  --no-enable-chunked-prefill --max-model-len 1k --max-num-batched-tokens 512 --max-num-seqs 8
threshold_above_context      --long-prefill-token-threshold 2000 --max-model-len 1024
more_active_than_sequences   --max-num-active-seqs 64 --max-num-seqs 32
parser_missing               --enable-auto-tool-choice
outputs_without_requests     --enable-log-outputs
metrics_without_stats        --enable-per-request-metrics --disable-log-stats
more_local_ranks_than_ranks  --data-parallel-size-local 4 --data-parallel-size 2
rank_out_of_range            --data-parallel-rank 3 --data-parallel-size 2
two_balancers                --data-parallel-external-lb --data-parallel-hybrid-lb
context_ranks_do_not_divide  --decode-context-parallel-size 3 --tensor-parallel-size 2
balanced_experts_without_experts  --enable-eplb
balanced_experts_of_one_rank  --enable-expert-parallel --enable-eplb
redundant_experts_without_balancing  -tp 2 --enable-expert-parallel --eplb-config '{"num_redundant_experts": 2}'
external_balancer_without_ranks  --data-parallel-external-lb
hybrid_balancer_without_local_ranks  -dp 4 --data-parallel-hybrid-lb
ranks_do_not_fill_the_nodes   --nnodes 3 -tp 4
more_adapters_than_in_memory  --enable-lora --max-loras 4 --max-cpu-loras 2
checkpoint_not_quantized     --quantization awq
checkpoint_not_quantized     --quantization gptq_marlin
quantization_removed         --quantization bitsandbytes
quantization_removed         --quantization gguf
numa_nodes_without_binding   --numa-bind-nodes 0
numa_nodes_without_binding   --numa-bind-cpus 0-3
attention_backend_given_twice           --attention-backend TRITON_ATTN -ac.backend FLASH_ATTN
capture_sizes_given_twice     --cudagraph-capture-sizes 1 2 -cc.cudagraph_capture_sizes '[1,2]'
speculation_given_twice       --spec-tokens 3 --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'
async_scheduling_with_draft_method  --async-scheduling NGRAM
no_room_for_drafts           --enable-lora --max-num-seqs 64 --max-num-batched-tokens 100 NGRAM
"""
NGRAM = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'"""
CORRECTED = """
--cuda-graph-sizes 512
--cuda-graph-sizes 1 2 4
--guided-decoding-backend xgrammar:no-fallback --guided-decoding-disable-any-whitespace
--guided-decoding-backend guidance --guided-decoding-disable-additional-properties
--guided-decoding-disable-fallback
--speculative-model [ngram] --num-speculative-tokens 5 --ngram-prompt-lookup-max 4 --speculative-disable-by-batch-size 9
--task embed --override-pooler-config '{"pooling_type": "MEAN"}'
-O.cudagraph_mode=NONE
-O.cudagraph_mode NONE
-O '{"cudagraph_mode": "NONE"}'
--eplb-window-size 1000 --eplb-step-interval 3000 --eplb-log-balancedness
--disable-mm-preprocessor-cache --enable-multimodal-encoder-data-parallel --chat-template-text-format string
"""
accepted = ACCEPTED.replace("NGRAM", NGRAM).strip().splitlines()
refused = [tuple(line.split(maxsplit=1)) for line in REFUSED.replace("NGRAM", NGRAM).strip().splitlines()]

mended = CORRECTED.strip().splitlines()


def after(words: str) -> str:
    """The correction of a command."""
    one = read(f"vllm serve m {words}", version=described())
    return shlex.join(corrected(one, lint(LintTarget(one, described())))[3:])


def errors(words: str, model: str = "m") -> set[str]:
    """Return the errors of the rules; with a model's folder, also those from its config.json."""
    text = f"vllm serve {model} {words}"
    found = (
        judge(text, described()).findings
        if model != "m"
        else lint(LintTarget(read(text, version=described()), described()))
    )
    return {each.rule for each in found if each.severity == "error"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.write(folder, "tiny")
    return str(folder)


@pytest.fixture(scope="module")
def answers(tiny: str) -> dict[str, str]:
    """Why the real vLLM refuses each command, "" where it does not; one process for all of them."""
    words = [*accepted, *(text for _, text in refused), *map(after, mended)]
    asked = json.dumps([[tiny, *shlex.split(each)] for each in words])
    told = {**os.environ, **server.ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [server.PYTHON, "-I", str(ORACLE), str(ask.SCRIPT)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True, env=told)
    return dict(zip(words, json.loads(done.stdout), strict=True))


@each_row("words", accepted)
def test_command_accepted_by_vllm_is_no_error(words: str) -> None:
    assert not errors(words)


NEED_A_MODEL = {
    "context_above_the_model",
    "heads_do_not_divide",
    "experts_of_a_dense_model",
    "checkpoint_not_quantized",
}


@each_row(("rule", "words"), [each for each in refused if each[0] not in NEED_A_MODEL])
def test_command_refused_by_vllm_is_an_error(rule: str, words: str) -> None:
    assert rule in errors(words)


@pytest.mark.live
@server.needed
class TestARealVllm:
    @each_row("words", accepted)
    def test_parser_accepts_commands_that_lint_accepts(self, words: str, answers: dict[str, str], tiny: str) -> None:
        assert answers[words] == ""
        assert not errors(words, tiny)

    @each_row(("rule", "words"), refused)
    def test_parser_refuses_commands_that_lint_refuses(
        self, rule: str, words: str, answers: dict[str, str], tiny: str
    ) -> None:
        assert answers[words]
        assert rule in errors(words, tiny)

    @each_row("words", mended)
    def test_parser_accepts_corrections_of_lint(self, words: str, answers: dict[str, str]) -> None:
        assert errors(words)
        assert answers[after(words)] == ""


# -- its parser, asked by diag ----------------------------------------------------------------------------------------


@pytest.mark.live
@server.needed
def test_correction_refused_by_the_parser_is_not_printed() -> None:
    good, bad = (
        judge(f"vllm serve m --override-pooler-config '{text}'", described(), python=server.PYTHON).corrected
        for text in ('{"pooling_type": "MEAN"}', '{"never_heard_of": 1}')
    )
    assert (bool(good), bad) == (True, "")


@pytest.mark.live
@server.needed
def test_installed_parser_is_used_only_for_its_own_release() -> None:
    good, bad, unasked, other = (
        judge("vllm serve m --port 1", python=server.PYTHON),
        judge('vllm serve m --structured-outputs-config \'{"backend": "bad"}\'', python=server.PYTHON),
        judge("vllm serve m --port $PORT", python=server.PYTHON),
        judge("vllm serve m --port 1", "0.20.0", python=server.PYTHON),
    )
    assert (good.version, good.version_source, good.parser_error) == (described(), "installed", "")
    assert [each.rule for each in bad.findings if each.severity == "error"] == ["refused_by_the_parser"]
    assert "backend" in bad.findings[0].message
    assert unasked.parser_error is None
    assert any("variables" in each for each in unasked.not_checked)
    assert other.parser_error is None


@pytest.mark.live
@server.needed
def test_parser_error_has_no_secret() -> None:
    told = judge("vllm serve m --api-kye verysecretvalue", python=server.PYTHON)
    assert told.parser_error
    assert "verysecretvalue" not in repr(told)


# -- an interpreter without a vLLM ------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", ["/nowhere/python", sys.executable, "/bin/echo"])
def test_interpreter_without_vllm_is_reported_in_one_sentence(python: str) -> None:
    with pytest.raises(BadUsage, match=r"\A[^\n]*: vLLM's parser cannot be run with it[^\n]*\Z"):
        ask.check(python, [["m"]])


def test_rules_apply_if_the_installed_parser_fails() -> None:
    told = judge("vllm serve m --swap-space 4", "0.32.0", python="/nowhere/python")
    assert told.status == 2
    assert any("/nowhere/python: vLLM's parser" in each for each in told.not_checked)
