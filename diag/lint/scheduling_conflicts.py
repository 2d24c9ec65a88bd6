"""Rules about flags of the scheduler and of speculative decoding that conflict with each other."""

import math

from diag.lint.conflicts import Conflict, as_rule, is_more
from diag.lint.rule import Example
from diag.lint.target import LintTarget, number

_BATCH, _SEQS, _LEN = "--max-num-batched-tokens", "--max-num-seqs", "--max-model-len"
_PARTIAL = ("--max-num-partial-prefills", "--max-long-partial-prefills")
_SPECULATION_KEYS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
_ASYNC_METHODS = ("ngram", "suffix", "medusa", "mlp_speculator")


def _draft_tokens(target: LintTarget) -> float:
    tokens = target.keys("--speculative-config").get("num_speculative_tokens") or target.number("--spec-tokens") or 0
    return number(str(tokens)) or 0


def _drafts_do_not_fit(target: LintTarget) -> bool:
    drafts = _draft_tokens(target)
    needed = (target.number(_SEQS) or 0) * (drafts + 1)
    return target.is_on("--enable-lora") and drafts > 0 and is_more(needed, target.number(_BATCH))


def _threshold_above_context(target: LintTarget) -> bool:
    is_checked = target.since("0.27.0") or is_more(target.number(_PARTIAL[0]), 1)
    return is_checked and is_more(target.number("--long-prefill-token-threshold"), target.number(_LEN))


def _falls_back(target: LintTarget) -> bool:
    several = any(is_more(target.number(flag), 1) for flag in (_PARTIAL[0], "--num-scheduler-steps"))
    return several and target.command.environment.get("VLLM_USE_V1") != "0"


_CONFLICTS = (
    Conflict(
        "fewer_tokens_than_sequences",
        "--max-num-batched-tokens is below --max-num-seqs",
        message="--max-num-batched-tokens {max-num-batched-tokens} is below --max-num-seqs {max-num-seqs}",
        holds=lambda target: is_more(target.number(_SEQS), target.number(_BATCH)),
        why="vLLM refuses it: a step needs one token for every running sequence",
        fix="Set --max-num-batched-tokens to {max-num-seqs} or more,"
        " or --max-num-seqs to {max-num-batched-tokens} or less",
        example=Example("vllm serve m --max-num-seqs 512 --max-num-batched-tokens 256"),
    ),
    Conflict(
        "whole_prompts_do_not_fit",
        "Without chunked prefill, --max-num-batched-tokens is below --max-model-len",
        message="Without chunked prefill a step of {max-num-batched-tokens} tokens"
        " cannot hold a prompt of {max-model-len}",
        holds=lambda target: (
            target.is_off("--enable-chunked-prefill") and is_more(target.number(_LEN), target.number(_BATCH))
        ),
        why="vLLM refuses it: max_num_batched_tokens is smaller than max_model_len",
        fix="Remove --no-enable-chunked-prefill, or set --max-num-batched-tokens to {max-model-len}",
        example=Example("vllm serve m --no-enable-chunked-prefill --max-num-batched-tokens 2048 --max-model-len 8192"),
        since="0.11.1",
    ),
    Conflict(
        "threshold_above_context",
        "--long-prefill-token-threshold is above --max-model-len",
        message="--long-prefill-token-threshold {long-prefill-token-threshold}"
        " is above --max-model-len {max-model-len}",
        holds=_threshold_above_context,
        why="vLLM refuses it; before 0.27.0 only with several partial prefills",
        fix="Set --long-prefill-token-threshold below {max-model-len}",
        example=Example("vllm serve m --long-prefill-token-threshold 9000 --max-model-len 8192"),
    ),
    Conflict(
        "more_active_than_sequences",
        "--max-num-active-seqs is above --max-num-seqs",
        message="--max-num-active-seqs {max-num-active-seqs} is above --max-num-seqs {max-num-seqs}",
        holds=lambda target: is_more(target.number("--max-num-active-seqs"), target.number(_SEQS)),
        why="vLLM refuses it: the former is a cap below the latter",
        fix="Set --max-num-active-seqs to {max-num-seqs} or less",
        example=Example("vllm serve m --max-num-active-seqs 64 --max-num-seqs 32"),
    ),
    Conflict(
        "no_room_for_drafts",
        "With LoRA and speculative decoding, --max-num-batched-tokens is too small for all draft tokens",
        message="With LoRA and speculative decoding a step of {max-num-batched-tokens} tokens"
        " cannot hold all draft tokens",
        holds=_drafts_do_not_fit,
        why="vLLM refuses it: max_num_seqs x (num_speculative_tokens + 1) has to fit",
        fix="Use a larger --max-num-batched-tokens, or a smaller --max-num-seqs",
        example=Example("vllm serve m --enable-lora --spec-tokens 4 --max-num-seqs 512 --max-num-batched-tokens 2048"),
    ),
    Conflict(
        "larger_step_than_work",
        "--max-num-batched-tokens is more than --max-num-seqs sequences can fill",
        message="--max-num-batched-tokens {max-num-batched-tokens} is more than {max-num-seqs} sequences of"
        " {max-model-len} tokens can fill",
        holds=lambda target: is_more(
            target.number(_BATCH), (target.number(_SEQS) or math.inf) * (target.number(_LEN) or math.inf)
        ),
        why="vLLM warns of unexpected behaviour, and the profile run reserves memory for such a step",
        fix="Set --max-num-batched-tokens to {max-num-seqs} x {max-model-len} or less",
        example=Example("vllm serve m --max-num-batched-tokens 8192 --max-num-seqs 2 --max-model-len 512"),
        since="0.8.0",
        severity="warning",
    ),
    Conflict(
        "partial_prefills",
        "--max-num-partial-prefills is above 1",
        message="--max-num-partial-prefills {max-num-partial-prefills}: V1 supports one at a time",
        holds=lambda target: is_more(target.number(_PARTIAL[0]), 1) and target.has(_PARTIAL[0]),
        why="vLLM refuses more than one (Concurrent Partial Prefill is not supported)",
        fix="Remove it; --long-prefill-token-threshold keeps long prompts from taking a whole step",
        example=Example("vllm serve m --max-num-partial-prefills 4", "0.26.0"),
        since="0.11.0",
        removes=_PARTIAL,
    ),
    Conflict(
        "falls_back_to_v0",
        "More than one partial prefill or scheduler step makes vLLM fall back to V0",
        message="V1 does not support more than one partial prefill or scheduler step",
        holds=_falls_back,
        why="vLLM falls back to its V0 engine, or exits where VLLM_USE_V1=1 selects V1",
        fix="Remove it",
        example=Example("vllm serve m --num-scheduler-steps 8", "0.10.0"),
        since="0.8.0",
        until="0.11.0",
        severity="warning",
        removes=(*_PARTIAL, "--num-scheduler-steps"),
    ),
    Conflict(
        "speculation_given_twice",
        "--spec-method, --spec-model or --spec-tokens repeats a key of --speculative-config",
        holds=lambda target: any(
            target.has(flag) and key in target.keys("--speculative-config") for flag, key in _SPECULATION_KEYS.items()
        ),
        why="vLLM refuses it: they are mutually exclusive",
        fix="Keep --speculative-config",
        example=Example("""vllm serve m --spec-tokens 4 --speculative-config '{"num_speculative_tokens": 5}'"""),
    ),
    Conflict(
        "async_scheduling_with_draft_method",
        "--async-scheduling conflicts with the method of speculative decoding",
        holds=lambda target: (
            target.is_on("--async-scheduling") and target.keys("--speculative-config").get("method") in _ASYNC_METHODS
        ),
        why="vLLM refuses it; without the flag it disables asynchronous scheduling by itself",
        fix="Remove --async-scheduling",
        example=Example("""vllm serve m --async-scheduling --speculative-config '{"method": "ngram"}'"""),
        since="0.32.0",
        removes=("--async-scheduling",),
    ),
)
RULES = tuple(map(as_rule, _CONFLICTS))
