"""Flags and variables that were removed, with what replaces them, and flags that no longer have an effect: data.

From the source of 59 releases, 0.6.0 - 0.33.0, and the release notes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

V1 = "0.8.0"
"""From here on V1 is the engine unless VLLM_USE_V1=0 says otherwise, from 0.11.0 on it is the only one."""
V1_ONLY = "0.11.0"


@dataclass(frozen=True)
class ReplacedFlag:
    """`flags` replace it ("" in them: the old value); none where the flag is only removed.

    `advice` is what to do where the command cannot be corrected mechanically.
    """

    why: str
    flags: tuple[str, ...] = ()
    advice: str = ""


_SPECULATION = "Speculation is configured by one JSON object since 0.8.2"
_DECODING = "Structured outputs are configured by one JSON object since 0.11.0"
_EPLB = "Expert balancing is configured by one JSON object since 0.10.2"
INTO: Mapping[str, tuple[str, str, str]] = {
    "--speculative-model": ("--speculative-config", "model", _SPECULATION),
    "--num-speculative-tokens": ("--speculative-config", "num_speculative_tokens", _SPECULATION),
    "--speculative-draft-tensor-parallel-size": ("--speculative-config", "draft_tensor_parallel_size", _SPECULATION),
    "--speculative-max-model-len": ("--speculative-config", "max_model_len", _SPECULATION),
    "--speculative-model-quantization": ("--speculative-config", "quantization", _SPECULATION),
    "--speculative-disable-by-batch-size": ("--speculative-config", "disable_by_batch_size", _SPECULATION),
    "--ngram-prompt-lookup-max": ("--speculative-config", "prompt_lookup_max", _SPECULATION),
    "--ngram-prompt-lookup-min": ("--speculative-config", "prompt_lookup_min", _SPECULATION),
    "--guided-decoding-backend": ("--structured-outputs-config", "backend", _DECODING),
    "--guided-decoding-disable-fallback": ("--structured-outputs-config", "disable_fallback", _DECODING),
    "--guided-decoding-disable-any-whitespace": ("--structured-outputs-config", "disable_any_whitespace", _DECODING),
    "--guided-decoding-disable-additional-properties": (
        "--structured-outputs-config",
        "disable_additional_properties",
        _DECODING,
    ),
    "--eplb-window-size": ("--eplb-config", "window_size", _EPLB),
    "--eplb-step-interval": ("--eplb-config", "step_interval", _EPLB),
    "--eplb-log-balancedness": ("--eplb-config", "log_balancedness", _EPLB),
    "--num-redundant-experts": ("--eplb-config", "num_redundant_experts", _EPLB),
}
"""A removed flag: the flag that takes it as a key of its JSON object, the key, and why."""
KEYS_UNTIL: Mapping[str, str] = {"disable_by_batch_size": "0.16.0", "disable_fallback": "0.16.0"}
"""The last release that is known to take a key; 0.24.0 refuses these."""
BACKENDS_OF: Mapping[str, tuple[str, ...]] = {
    "disable_any_whitespace": ("xgrammar", "guidance"),
    "disable_additional_properties": ("guidance",),
}
"""A key of --structured-outputs-config that is refused unless the backend is one of these."""

_V0 = "Only the V0 engine had it"
_ROPE = "The model's own configuration is overridden instead"
_ROPE_ADVICE = (
    "Use --hf-overrides with rope_parameters, the whole of them (rope_type, factor, rope_theta ...), and with"
    " max_position_embeddings where the context grows"
)
REPLACED: Mapping[str, ReplacedFlag] = {
    "--num-scheduler-steps": ReplacedFlag("V1 has no multi-step scheduling; it schedules asynchronously instead"),
    "--multi-step-stream-outputs": ReplacedFlag("V1 has no multi-step scheduling"),
    "--swap-space": ReplacedFlag("V1 never swaps the KV cache to the CPU: it recomputes"),
    "--preemption-mode": ReplacedFlag("V1 preempts by recomputation only"),
    "--max-num-partial-prefills": ReplacedFlag(
        "V1 never supported more than one; --long-prefill-token-threshold keeps long prompts from taking a whole step"
    ),
    "--max-long-partial-prefills": ReplacedFlag("V1 never supported partial prefills side by side"),
    "--scheduler-delay-factor": ReplacedFlag(_V0),
    "--num-lookahead-slots": ReplacedFlag(_V0),
    "--use-v2-block-manager": ReplacedFlag(_V0),
    "--disable-async-output-proc": ReplacedFlag(_V0),
    "--disable-frontend-multiprocessing": ReplacedFlag(_V0),
    "--max-seq-len-to-capture": ReplacedFlag(
        "V1 captures CUDA graphs by batch size, not by length: --max-cudagraph-capture-size bounds them"
    ),
    "--max-context-len-to-capture": ReplacedFlag("V1 captures CUDA graphs by batch size, not by length"),
    "--disable-log-requests": ReplacedFlag("Since 0.10.1 requests are logged only with --enable-log-requests"),
    "--enable-reasoning": ReplacedFlag("--reasoning-parser alone enables it"),
    "--device": ReplacedFlag("vLLM detects the platform"),
    "--calculate-kv-scales": ReplacedFlag("The scales come with the checkpoint"),
    "--rope-scaling": ReplacedFlag(_ROPE, advice=_ROPE_ADVICE),
    "--rope-theta": ReplacedFlag(_ROPE, advice=_ROPE_ADVICE),
    "--cuda-graph-sizes": ReplacedFlag("It was renamed", ("--cudagraph-capture-sizes", "")),
    "--chat-template-text-format": ReplacedFlag("It was renamed", ("--chat-template-content-format", "")),
    "--override-pooler-config": ReplacedFlag("It was renamed", ("--pooler-config", "")),
    "--disable-mm-preprocessor-cache": ReplacedFlag("A cache of 0 GB does the same", ("--mm-processor-cache-gb", "0")),
    "--enable-multimodal-encoder-data-parallel": ReplacedFlag(
        "It became one of several modes", ("--mm-encoder-tp-mode", "data")
    ),
}
_POOLING = "--task was split into --runner and --convert"
TASKS: Mapping[str, ReplacedFlag] = {
    "generate": ReplacedFlag(_POOLING, ("--runner", "generate")),
    "auto": ReplacedFlag("vLLM detects the task"),
    "embed": ReplacedFlag(_POOLING, ("--runner", "pooling", "--convert", "embed")),
    "embedding": ReplacedFlag(_POOLING, ("--runner", "pooling", "--convert", "embed")),
    "classify": ReplacedFlag(_POOLING, ("--runner", "pooling", "--convert", "classify")),
    "score": ReplacedFlag(_POOLING, ("--runner", "pooling", "--convert", "classify")),
    "reward": ReplacedFlag(_POOLING, ("--runner", "pooling")),
}
"""By the value of --task."""
LARGEST_SIZE = ReplacedFlag("A single number was the largest size", ("--max-cudagraph-capture-size", ""))
"""What --cuda-graph-sizes with a single value became."""
POOLER = ReplacedFlag(
    "It was renamed, and some of its keys were removed",
    advice="Use --pooler-config with use_activation in the place of normalize or softmax",
)
"""What --override-pooler-config with one of those keys became."""


@dataclass(frozen=True)
class IneffectiveFlag:
    """A flag that the parser accepts and that has no effect since the release `first`."""

    first: str
    why: str


INEFFECTIVE: Mapping[str, IneffectiveFlag] = {
    "--swap-space": IneffectiveFlag(V1, REPLACED["--swap-space"].why),
    "--preemption-mode": IneffectiveFlag(V1, REPLACED["--preemption-mode"].why),
    "--max-seq-len-to-capture": IneffectiveFlag(V1, REPLACED["--max-seq-len-to-capture"].why),
    "--num-lookahead-slots": IneffectiveFlag(V1, _V0),
    "--use-v2-block-manager": IneffectiveFlag(V1, _V0),
    "--disable-log-requests": IneffectiveFlag("0.10.1", REPLACED["--disable-log-requests"].why),
    "--show-hidden-metrics-for-version": IneffectiveFlag("0.15.0", "No hidden metric is left to show"),
    "--max-parallel-loading-workers": IneffectiveFlag("0.32.0", "vLLM logs at startup that it is ignored"),
    "--disable-cascade-attn": IneffectiveFlag("0.32.0", "Cascade attention was removed"),
}


@dataclass(frozen=True)
class EnvironmentVariable:
    """The releases that read an environment variable ("": from the first, to the last), and what there is in others.

    `flag` takes its value, `variable` is another name of it.
    """

    first: str
    last: str
    instead: str
    flag: str = ""
    variable: str = ""


NEVER = "never"
ATTENTION_BACKENDS = {
    *("CPU_ATTN", "CUTLASS_MLA", "FLASHINFER", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN", "FLASH_ATTN_MLA"),
    *("FLEX_ATTENTION", "ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_ATTN", "TRITON_ATTN", "TRITON_MLA"),
}
"""Names that --attention-backend takes from 0.16.0 to 0.32.0 at least; FLASH_ATTN_VLLM_V1 became FLASH_ATTN."""
VARIABLES: Mapping[str, EnvironmentVariable] = {
    "VLLM_USE_V1": EnvironmentVariable("", "0.11.0", "V1 is the only engine"),
    "VLLM_ATTENTION_BACKEND": EnvironmentVariable("", "0.14.1", "--attention-backend sets it", "--attention-backend"),
    "VLLM_EXECUTE_MODEL_TIMEOUT": EnvironmentVariable(
        NEVER, "", "Its name is VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", variable="VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
    ),
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": EnvironmentVariable("0.9.2", "", "This release has a fixed timeout"),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": EnvironmentVariable("", "0.31.0", "V1 reads VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
    "VLLM_RPC_TIMEOUT": EnvironmentVariable("", "0.22.1", "Nothing replaces it"),
    "VLLM_ENGINE_READY_TIMEOUT_S": EnvironmentVariable("0.14.0", "", "This release has a fixed timeout"),
    "VLLM_LOG_STATS_INTERVAL": EnvironmentVariable("0.10.1", "", "This release logs statistics every 10 s"),
    "VLLM_DISABLE_PYNCCL": EnvironmentVariable("0.11.1", "", "This release cannot disable NCCL with it"),
    "VLLM_ALLREDUCE_USE_SYMM_MEM": EnvironmentVariable("0.10.2", "", "This release does not have this all-reduce yet"),
    "VLLM_ALLREDUCE_USE_FLASHINFER": EnvironmentVariable(
        "0.17.0", "", "This release does not have this all-reduce yet"
    ),
}
