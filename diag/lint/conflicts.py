"""Rules about flags that contradict each other, as vLLM 0.32 checks them (vllm/config and engine/arg_utils.py).

Only what the command itself says is compared: a rule with an unknown side is silent.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from diag.lint.finding import LintFinding, Severity, at_least, number, ranks, removal
from diag.vllm.command.parse import Command
from diag.vllm.flags.registry import known

Holds = Callable[["CommandFacts"], object]


@dataclass(frozen=True)
class CommandFacts:
    """A command's values by flag: numbers, switches, and the keys of its JSON objects."""

    command: Command
    version: str

    def n(self, flag: str) -> float | None:
        """A number above zero; None where it is not given, or is none."""
        value = number(self.command.get(flag))
        return value if value is not None and value > 0 else None

    def size(self, flag: str) -> int:
        """A number of parallel ranks, 1 where it is not given."""
        return ranks(self.command, flag)

    def on(self, flag: str) -> bool:
        """Whether a switch is on."""
        return bool(self.command.switched(flag))

    def off(self, flag: str) -> bool:
        """Whether a switch is off, and was said to be."""
        return self.command.switched(flag) is False

    def has(self, flag: str) -> bool:
        """Whether the flag is given, in any way."""
        return self.command.get(flag) is not None and flag in known() and known()[flag].in_release(self.version)

    def keys(self, flag: str) -> Mapping[str, object]:
        """What a flag of JSON holds, its dotted form too."""
        found: dict[str, object] = {}
        for each in self.command.given:
            if each.name == flag and each.option:
                text = " ".join(each.values)
                found |= {each.option.key: text} if each.option.key else _object(text)
        return found


def _object(text: str) -> dict[str, object]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True)
class Conflict:
    """`holds` is whether a command has it; `{flag}` in the texts is the value of --flag. `since` a release it is so."""

    rule: str
    holds: Holds
    what: str
    why: str
    instead: str
    since: str = ""
    severity: Severity = "error"
    removes: tuple[str, ...] = ()


def _more(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and one > other


def _speculative(facts: CommandFacts) -> float:
    tokens = facts.keys("--speculative-config").get("num_speculative_tokens") or facts.n("--spec-tokens") or 0
    return number(str(tokens)) or 0


_SPECULATION_KEYS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
_ASYNC_METHODS = ("ngram", "suffix", "medusa", "mlp_speculator")
_BATCH, _SEQS, _LEN = "--max-num-batched-tokens", "--max-num-seqs", "--max-model-len"
_TP, _DP = "--tensor-parallel-size", "--data-parallel-size"

CONTRADICTIONS = (
    Conflict(
        "fewer_tokens_than_sequences",
        lambda of: _more(of.n(_SEQS), of.n(_BATCH)),
        "{max-num-batched-tokens} tokens a step are fewer than {max-num-seqs} sequences",
        "vLLM refuses it: a step needs a token for every running sequence",
        "--max-num-batched-tokens {max-num-seqs} or more, or --max-num-seqs {max-num-batched-tokens} or fewer",
    ),
    Conflict(
        "whole_prompts_do_not_fit",
        lambda of: of.off("--enable-chunked-prefill") and _more(of.n(_LEN), of.n(_BATCH)),
        "without chunked prefill a step of {max-num-batched-tokens} tokens holds no prompt of {max-model-len}",
        "vLLM refuses it: max_num_batched_tokens is smaller than max_model_len",
        "remove --no-enable-chunked-prefill, or --max-num-batched-tokens {max-model-len}",
        "0.11.1",
    ),
    Conflict(
        "threshold_above_context",
        lambda of: (
            _more(of.n("--long-prefill-token-threshold"), of.n(_LEN))
            and (at_least(of.version, "0.27.0") or _more(of.n("--max-num-partial-prefills"), 1))
        ),
        "a prompt is long from {long-prefill-token-threshold} tokens on, and none is longer than {max-model-len}",
        "vLLM refuses it",
        "--long-prefill-token-threshold below {max-model-len}",
    ),
    Conflict(
        "more_active_than_sequences",
        lambda of: _more(of.n("--max-num-active-seqs"), of.n(_SEQS)),
        "--max-num-active-seqs {max-num-active-seqs} is above --max-num-seqs {max-num-seqs}",
        "vLLM refuses it: the former is a cap below the latter",
        "--max-num-active-seqs {max-num-seqs} or fewer",
    ),
    Conflict(
        "no_room_for_drafts",
        lambda of: (
            of.on("--enable-lora")
            and _speculative(of)
            and _more((of.n(_SEQS) or 0) * (_speculative(of) + 1), of.n(_BATCH))
        ),
        "with LoRA and speculation a step of {max-num-batched-tokens} tokens is too small for all drafts",
        "vLLM refuses it: max_num_seqs x (num_speculative_tokens + 1) has to fit",
        "a larger --max-num-batched-tokens, or a smaller --max-num-seqs",
    ),
    Conflict(
        "parser_missing",
        lambda of: of.on("--enable-auto-tool-choice") and not of.has("--tool-call-parser"),
        "--enable-auto-tool-choice without --tool-call-parser",
        "vLLM refuses it: it would not know how to read the model's tool calls",
        "add --tool-call-parser NAME, the one for this model",
    ),
    Conflict(
        "outputs_without_requests",
        lambda of: of.on("--enable-log-outputs") and not of.on("--enable-log-requests"),
        "--enable-log-outputs without --enable-log-requests",
        "vLLM refuses it",
        "add --enable-log-requests, or remove it",
        "0.11.0",
        removes=("--enable-log-outputs",),
    ),
    Conflict(
        "metrics_without_stats",
        lambda of: of.on("--enable-per-request-metrics") and of.on("--disable-log-stats"),
        "--enable-per-request-metrics with --disable-log-stats",
        "vLLM refuses it: the metrics come from the statistics",
        "remove --disable-log-stats",
        removes=("--disable-log-stats",),
    ),
    Conflict(
        "servers_of_a_headless_node",
        lambda of: of.on("--headless") and (of.n("--api-server-count") or 0) > 0,
        "--headless with --api-server-count {api-server-count}",
        "vLLM refuses it: a headless node starts no API server",
        "remove --api-server-count",
        removes=("--api-server-count",),
    ),
    Conflict(
        "more_local_ranks_than_ranks",
        lambda of: _more(of.n("--data-parallel-size-local"), of.size(_DP)),
        "--data-parallel-size-local {data-parallel-size-local} is above --data-parallel-size",
        "vLLM refuses it: it counts the ranks of this node among all",
        "--data-parallel-size with the ranks of all nodes",
    ),
    Conflict(
        "rank_out_of_range",
        lambda of: of.has("--data-parallel-rank") and (of.n("--data-parallel-rank") or 0) >= of.size(_DP) > 1,
        "--data-parallel-rank {data-parallel-rank} of {data-parallel-size} ranks: they count from 0",
        "vLLM refuses it",
        "a rank below --data-parallel-size {data-parallel-size}",
    ),
    Conflict(
        "two_balancers",
        lambda of: of.on("--data-parallel-external-lb") and of.on("--data-parallel-hybrid-lb"),
        "--data-parallel-external-lb with --data-parallel-hybrid-lb",
        "vLLM refuses it: requests are balanced in one way",
        "keep one of them",
    ),
    Conflict(
        "context_ranks_do_not_divide",
        lambda of: (
            of.size(_TP) % of.size("--decode-context-parallel-size") and of.size("--prefill-context-parallel-size") == 1
        ),
        "--decode-context-parallel-size {decode-context-parallel-size} does not divide --tensor-parallel-size",
        "vLLM refuses it: both share the same GPUs",
        "a divisor of --tensor-parallel-size",
    ),
    Conflict(
        "balanced_experts_without_experts",
        lambda of: of.on("--enable-eplb") and not of.on("--enable-expert-parallel"),
        "--enable-eplb without --enable-expert-parallel",
        "vLLM refuses it: it balances experts over ranks",
        "add --enable-expert-parallel, or remove it",
        removes=("--enable-eplb",),
    ),
    Conflict(
        "numa_nodes_without_binding",
        lambda of: (of.has("--numa-bind-nodes") or of.has("--numa-bind-cpus")) and not of.on("--numa-bind"),
        "--numa-bind-nodes or --numa-bind-cpus without --numa-bind",
        "vLLM refuses it",
        "add --numa-bind",
    ),
    Conflict(
        "backend_said_twice",
        lambda of: of.has("--attention-backend") and of.keys("--attention-config").get("backend"),
        "--attention-backend and the backend of --attention-config",
        "vLLM refuses it: they are mutually exclusive",
        "keep one of them",
    ),
    Conflict(
        "capture_sizes_said_twice",
        lambda of: any(
            of.has("--" + key.replace("_", "-")) and of.keys("--compilation-config").get(key)
            for key in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
        ),
        "CUDA-graph sizes by a flag of their own and in --compilation-config",
        "vLLM refuses it: they are mutually exclusive",
        "keep one of them",
    ),
    Conflict(
        "compilation_level",
        lambda of: "level" in of.keys("--compilation-config"),
        "--compilation-config with the key level",
        "vLLM refuses it: the key was renamed",
        "mode in its place",
        "0.24.0",
    ),
    Conflict(
        "speculation_said_twice",
        lambda of: any(
            of.has(flag) and key in of.keys("--speculative-config") for flag, key in _SPECULATION_KEYS.items()
        ),
        "--spec-method, --spec-model or --spec-tokens repeats a key of --speculative-config",
        "vLLM refuses it: they are mutually exclusive",
        "keep --speculative-config",
    ),
    Conflict(
        "asynchronous_with_these_drafts",
        lambda of: of.on("--async-scheduling") and of.keys("--speculative-config").get("method") in _ASYNC_METHODS,
        "--async-scheduling with this method of speculation",
        "vLLM refuses it; without the flag it would switch asynchronous scheduling off by itself",
        "remove --async-scheduling",
        "0.32.0",
        removes=("--async-scheduling",),
    ),
    Conflict(
        "partial_prefills",
        lambda of: _more(of.n("--max-num-partial-prefills"), 1) and of.has("--max-num-partial-prefills"),
        "--max-num-partial-prefills {max-num-partial-prefills}: V1 supports one at a time",
        "vLLM refuses more than one (Concurrent Partial Prefill is not supported)",
        "remove it; --long-prefill-token-threshold keeps long prompts from taking a whole step",
        "0.11.0",
        removes=("--max-num-partial-prefills", "--max-long-partial-prefills"),
    ),
    Conflict(
        "falls_back_to_v0",
        lambda of: (
            (_more(of.n("--max-num-partial-prefills"), 1) or _more(of.n("--num-scheduler-steps"), 1))
            and not at_least(of.version, "0.11.0")
            and of.command.environment.get("VLLM_USE_V1") != "0"
        ),
        "more than one partial prefill, or scheduler step, is not supported by V1",
        "vLLM falls back to its V0 engine, or ends where VLLM_USE_V1=1 asks for V1",
        "remove it",
        "0.8.0",
        "warning",
        ("--max-num-partial-prefills", "--max-long-partial-prefills", "--num-scheduler-steps"),
    ),
    Conflict(
        "larger_step_than_work",
        lambda of: _more(of.n(_BATCH), (of.n(_SEQS) or math.inf) * (of.n(_LEN) or math.inf)),
        "a step of {max-num-batched-tokens} tokens is more than {max-num-seqs} sequences of {max-model-len} can fill",
        "vLLM warns of unexpected behaviour; the profile run reserves memory for it",
        "--max-num-batched-tokens {max-num-seqs} x {max-model-len} or less",
        "0.8.0",
        "warning",
    ),
    Conflict(
        "utilization_is_overridden",
        lambda of: of.has("--kv-cache-memory-bytes") and of.has("--gpu-memory-utilization"),
        "--kv-cache-memory-bytes overrides --gpu-memory-utilization {gpu-memory-utilization}",
        "the KV pool has the bytes that were ordered, whatever share is given",
        "keep one of them",
        severity="warning",
        removes=("--gpu-memory-utilization",),
    ),
)


def contradictions(command: Command, version: str) -> Iterator[LintFinding]:
    """Every contradiction in a command that this release minds."""
    facts = CommandFacts(command, version)
    for each in CONTRADICTIONS:
        if (not each.since or at_least(version, each.since)) and each.holds(facts):
            yield _found(each, command)


def _found(one: Conflict, command: Command) -> LintFinding:
    what, instead = (_filled(text, command) for text in (one.what, one.instead))
    gone = [given for flag in one.removes for given in command.all(flag)]
    return LintFinding(one.rule, one.severity, what, one.why, instead, removal(gone))


def _filled(text: str, command: Command) -> str:
    for flag in known():
        if "{" + flag[2:] + "}" in text:
            text = text.replace("{" + flag[2:] + "}", command.get(flag) or "1")
    return text
