"""Rules about flags that conflict with each other, as vLLM 0.32 checks them (vllm/config and engine/arg_utils.py).

Only values that the command itself gives are compared: a rule that lacks one of the values reports nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diag.lint.rule import Example, LintRule, LintTarget, Match, Severity, number, removal
from diag.vllm.command.command import Command
from diag.vllm.command.redaction import value
from diag.vllm.flags.registry import known

_BATCH, _SEQS, _LEN = "--max-num-batched-tokens", "--max-num-seqs", "--max-model-len"
_PARTIAL = ("--max-num-partial-prefills", "--max-long-partial-prefills")
_SPECULATION_KEYS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
_ASYNC_METHODS = ("ngram", "suffix", "medusa", "mlp_speculator")


@dataclass(frozen=True)
class Conflict:
    """A conflict that exists if `holds` is true of a command, from the release `since` on and before `until`.

    `{flag}` in `message` and `fix` is the value of --flag; the correction removes the flags `removes`.
    """

    id: str
    title: str
    holds: Callable[[LintTarget], object]
    why: str
    fix: str
    example: Example
    message: str = ""
    since: str = ""
    until: str = ""
    severity: Severity = "error"
    removes: tuple[str, ...] = ()


def is_more(value: float | None, other: float | None) -> bool:
    """Return True if both numbers are known and `value` is above `other`."""
    return value is not None and other is not None and value > other


def _drafts_do_not_fit(target: LintTarget) -> bool:
    tokens = target.keys("--speculative-config").get("num_speculative_tokens") or target.number("--spec-tokens") or 0
    drafts = number(str(tokens)) or 0
    needed = (target.number(_SEQS) or 0) * (drafts + 1)
    return target.is_on("--enable-lora") and drafts > 0 and is_more(needed, target.number(_BATCH))


_SCHEDULING = (
    Conflict(
        "fewer_tokens_than_sequences",
        "--max-num-batched-tokens is below --max-num-seqs",
        message="--max-num-batched-tokens {max-num-batched-tokens} is below --max-num-seqs {max-num-seqs}",
        holds=lambda target: is_more(target.number(_SEQS), target.number(_BATCH)),
        why="vLLM refuses it: a step needs one token for every running sequence",
        fix="Set --max-num-batched-tokens to {max-num-seqs} or more,"
        " or --max-num-seqs to {max-num-batched-tokens} or less",
        example=Example(
            "vllm serve m --max-num-seqs 512 --max-num-batched-tokens 256",
            leaves="vllm serve m --max-num-seqs 256 --max-num-batched-tokens 256",
        ),
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
        example=Example(
            "vllm serve m --no-enable-chunked-prefill --max-num-batched-tokens 2048 --max-model-len 8192",
            leaves="vllm serve m --no-enable-chunked-prefill --max-num-batched-tokens 8192 --max-model-len 8192",
        ),
        since="0.11.1",
    ),
    Conflict(
        "threshold_above_context",
        "--long-prefill-token-threshold is above --max-model-len",
        message="--long-prefill-token-threshold {long-prefill-token-threshold}"
        " is above --max-model-len {max-model-len}",
        holds=lambda target: (
            (target.since("0.27.0") or is_more(target.number(_PARTIAL[0]), 1))
            and is_more(target.number("--long-prefill-token-threshold"), target.number(_LEN))
        ),
        why="vLLM refuses it; before 0.27.0 only with several partial prefills",
        fix="Set --long-prefill-token-threshold below {max-model-len}",
        example=Example(
            "vllm serve m --long-prefill-token-threshold 9000 --max-model-len 8192",
            leaves="vllm serve m --long-prefill-token-threshold 4096 --max-model-len 8192",
        ),
    ),
    Conflict(
        "more_active_than_sequences",
        "--max-num-active-seqs is above --max-num-seqs",
        message="--max-num-active-seqs {max-num-active-seqs} is above --max-num-seqs {max-num-seqs}",
        holds=lambda target: is_more(target.number("--max-num-active-seqs"), target.number(_SEQS)),
        why="vLLM refuses it: the former is a cap below the latter",
        fix="Set --max-num-active-seqs to {max-num-seqs} or less",
        example=Example(
            "vllm serve m --max-num-active-seqs 64 --max-num-seqs 32",
            leaves="vllm serve m --max-num-active-seqs 32 --max-num-seqs 32",
        ),
    ),
    Conflict(
        "no_room_for_drafts",
        "With LoRA and speculative decoding, --max-num-batched-tokens is too small for all draft tokens",
        message="With LoRA and speculative decoding a step of {max-num-batched-tokens} tokens"
        " cannot hold all draft tokens",
        holds=_drafts_do_not_fit,
        why="vLLM refuses it: max_num_seqs x (num_speculative_tokens + 1) has to fit",
        fix="Use a larger --max-num-batched-tokens, or a smaller --max-num-seqs",
        example=Example(
            "vllm serve m --enable-lora --spec-tokens 4 --max-num-seqs 512 --max-num-batched-tokens 2048",
            leaves="vllm serve m --enable-lora --spec-tokens 4 --max-num-seqs 256 --max-num-batched-tokens 2048",
        ),
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
        example=Example(
            "vllm serve m --max-num-batched-tokens 8192 --max-num-seqs 2 --max-model-len 512",
            leaves="vllm serve m --max-num-batched-tokens 1024 --max-num-seqs 2 --max-model-len 512",
        ),
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
        example=Example(
            "vllm serve m --max-num-partial-prefills 4", "0.26.0", leaves="vllm serve m --max-num-partial-prefills 1"
        ),
        since="0.11.0",
        removes=_PARTIAL,
    ),
    Conflict(
        "falls_back_to_v0",
        "More than one partial prefill or scheduler step makes vLLM fall back to V0",
        message="V1 does not support more than one partial prefill or scheduler step",
        holds=lambda target: (
            any(is_more(target.number(flag), 1) for flag in (_PARTIAL[0], "--num-scheduler-steps"))
            and target.command.environment.get("VLLM_USE_V1") != "0"
        ),
        why="vLLM falls back to its V0 engine, or exits where VLLM_USE_V1=1 selects V1",
        fix="Remove the flag that is above 1",
        example=Example(
            "vllm serve m --num-scheduler-steps 8", "0.10.0", leaves="vllm serve m --num-scheduler-steps 1"
        ),
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
        example=Example(
            """vllm serve m --spec-tokens 4 --speculative-config '{"num_speculative_tokens": 5}'""",
            leaves="""vllm serve m --spec-tokens 4 --speculative-config '{"method": "ngram"}'""",
        ),
    ),
    Conflict(
        "async_scheduling_with_draft_method",
        "--async-scheduling conflicts with the method of speculative decoding",
        holds=lambda target: (
            target.is_on("--async-scheduling") and target.keys("--speculative-config").get("method") in _ASYNC_METHODS
        ),
        why="vLLM refuses it; without the flag it disables asynchronous scheduling by itself",
        fix="Remove --async-scheduling",
        example=Example(
            """vllm serve m --async-scheduling --speculative-config '{"method": "ngram"}'""",
            leaves="""vllm serve m --async-scheduling --speculative-config '{"method": "eagle"}'""",
        ),
        since="0.32.0",
        removes=("--async-scheduling",),
    ),
)
_LOGGING = (
    Conflict(
        "parser_missing",
        "--enable-auto-tool-choice without --tool-call-parser",
        holds=lambda target: target.is_on("--enable-auto-tool-choice") and not target.has("--tool-call-parser"),
        why="vLLM refuses it: it would not know how to read the model's tool calls",
        fix="Add --tool-call-parser NAME, the one for this model",
        example=Example(
            "vllm serve m --enable-auto-tool-choice",
            leaves="vllm serve m --enable-auto-tool-choice --tool-call-parser hermes",
        ),
    ),
    Conflict(
        "outputs_without_requests",
        "--enable-log-outputs without --enable-log-requests",
        holds=lambda target: target.is_on("--enable-log-outputs") and not target.is_on("--enable-log-requests"),
        why="vLLM refuses it: outputs are logged with their requests",
        fix="Add --enable-log-requests, or remove --enable-log-outputs",
        example=Example(
            "vllm serve m --enable-log-outputs", leaves="vllm serve m --enable-log-requests --enable-log-outputs"
        ),
        since="0.11.0",
        removes=("--enable-log-outputs",),
    ),
    Conflict(
        "metrics_without_stats",
        "--enable-per-request-metrics conflicts with --disable-log-stats",
        holds=lambda target: target.is_on("--enable-per-request-metrics") and target.is_on("--disable-log-stats"),
        why="vLLM refuses it: the metrics come from the statistics",
        fix="Remove --disable-log-stats",
        example=Example(
            "vllm serve m --enable-per-request-metrics --disable-log-stats",
            leaves="vllm serve m --enable-per-request-metrics",
        ),
        removes=("--disable-log-stats",),
    ),
)
_COMPILATION = (
    Conflict(
        "attention_backend_given_twice",
        "The attention backend is given by --attention-backend and in --attention-config",
        holds=lambda target: target.has("--attention-backend") and target.keys("--attention-config").get("backend"),
        why="vLLM refuses it: they are mutually exclusive",
        fix="Keep one of them",
        example=Example(
            """vllm serve m --attention-backend FLASHINFER --attention-config '{"backend": "FLASH_ATTN"}'""",
            leaves="""vllm serve m --attention-backend FLASHINFER --attention-config '{"flash_attn_version": 3}'""",
        ),
    ),
    Conflict(
        "capture_sizes_given_twice",
        "CUDA-graph sizes are given by a flag of their own and in --compilation-config",
        holds=lambda target: any(
            target.has("--" + key.replace("_", "-")) and target.keys("--compilation-config").get(key)
            for key in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
        ),
        why="vLLM refuses it: they are mutually exclusive",
        fix="Keep one of them",
        example=Example(
            "vllm serve m --max-cudagraph-capture-size 64 -cc.max_cudagraph_capture_size 128",
            leaves="vllm serve m --max-cudagraph-capture-size 64 -cc.mode=3",
        ),
    ),
    Conflict(
        "compilation_level",
        "--compilation-config has the key level",
        holds=lambda target: "level" in target.keys("--compilation-config"),
        why="vLLM refuses it: the key was renamed",
        fix="Use the key mode in its place",
        example=Example(
            """vllm serve m --compilation-config '{"level": 3}'""",
            leaves="""vllm serve m --compilation-config '{"mode": 3}'""",
        ),
        since="0.24.0",
    ),
    Conflict(
        "utilization_is_overridden",
        "--kv-cache-memory-bytes overrides --gpu-memory-utilization",
        message="--kv-cache-memory-bytes overrides --gpu-memory-utilization {gpu-memory-utilization}",
        holds=lambda target: target.has("--kv-cache-memory-bytes") and target.has("--gpu-memory-utilization"),
        why="The KV cache has the size that is set in bytes, whatever share of the GPU is given",
        fix="Keep one of them",
        example=Example(
            "vllm serve m --kv-cache-memory-bytes 8G --gpu-memory-utilization 0.9",
            leaves="vllm serve m --gpu-memory-utilization 0.9",
        ),
        severity="warning",
        removes=("--gpu-memory-utilization",),
    ),
)


def conflict_rule(conflict: Conflict) -> LintRule:
    since, until = conflict.since, conflict.until
    in_general = conflict.fix
    for flag in known():
        in_general = in_general.replace("{" + flag[2:] + "}", f"the value of {flag}")

    def check(target: LintTarget) -> Iterator[Match]:
        in_span = (not since or target.since(since)) and not (until and target.since(until))
        if in_span and conflict.holds(target):
            command = target.command
            removed = [given for flag in conflict.removes for given in command.all(flag)]
            yield Match(_fill_in(conflict.message, command), "", _fill_in(conflict.fix, command), removal(removed))

    releases = f", from vLLM {since} {f'until {until}' if until else 'on'}" if since else ""
    finds = f"{conflict.title}{releases}. Values that the command does not give are not compared."
    return LintRule(
        conflict.id, conflict.severity, conflict.title, finds, conflict.why, in_general, conflict.example, check
    )


def _fill_in(text: str, command: Command) -> str:
    """Replace each {flag} by the value of --flag, 1 if the command does not give it."""
    for flag in known():
        if "{" + flag[2:] + "}" in text:
            given = command.all(flag)[-1:]
            values = " ".join(value(given[0], word) for word in given[0].values) if given else "1"
            text = text.replace("{" + flag[2:] + "}", values)
    return text


RULES = tuple(map(conflict_rule, (*_SCHEDULING, *_LOGGING, *_COMPILATION)))
