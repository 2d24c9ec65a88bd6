"""Rules about flags that conflict, as vLLM 0.32 checks them (vllm/config, engine/arg_utils.py), and about parallelism.

Only values that the command itself gives are compared: a rule that lacks one of the values reports nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from diag.core.errors import BadUsage
from diag.core.formatting import gibibytes, plural, quantity
from diag.lint.host import memory_setup
from diag.lint.rule import Case, LintRule, LintTarget, Match, number, removal, rule, text_of, texts
from diag.lint.terms import all_hold
from diag.vllm.command.redaction import value
from diag.vllm.deployments import deployment
from diag.vllm.flags.registry import known
from diag.vllm.gpus import find
from diag.vllm.memory.ledger import BUDGET, WEIGHTS, ledger

_BATCH, _SEQS, _LEN = "--max-num-batched-tokens", "--max-num-seqs", "--max-model-len"
_PARTIAL = "--max-num-partial-prefills"
_TP, _PP, _DP = (f"--{kind}-parallel-size" for kind in ("tensor", "pipeline", "data"))
_CONTEXT = "--prefill-context-parallel-size"
_ROOMY = 0.5
"""Share of one GPU's budget up to which the weights leave most of it to the KV cache, without any parallelism."""


def _is_more(value: float | None, other: float | None) -> bool:
    """Return True if both numbers are known and `value` is above `other`."""
    return value is not None and other is not None and value > other


def _drafts_do_not_fit(target: LintTarget) -> bool:
    tokens = target.keys("--speculative-config").get("num_speculative_tokens") or target.number("--spec-tokens") or 0
    drafts = number(str(tokens)) or 0
    needed = (target.number(_SEQS) or 0) * (drafts + 1)
    return target.is_on("--enable-lora") and drafts > 0 and _is_more(needed, target.number(_BATCH))


def _world(target: LintTarget) -> int:
    """Return the number of ranks on all nodes; 0 if one of the sizes is unknown."""
    flags = (_TP, _PP, _DP, _CONTEXT)
    sizes = [number(target.command.get(flag)) for flag in flags if target.command.get(flag) is not None]
    absent = all(target.lacks(flag) for flag in flags if target.command.get(flag) is None)
    return math.prod(int(size or 0) for size in sizes) if absent else 0


def _is_one_rank(target: LintTarget) -> bool:
    """Return True if neither tensor nor data parallelism is given, and experts have one rank."""
    return target.lacks(*(flag for flag in (_TP, _DP, _CONTEXT) if number(target.command.get(flag)) != 1))


CONDITIONS: Mapping[str, Callable[[LintTarget], object]] = {
    "threshold_above_context": lambda target: (
        (target.since("0.27.0") or _is_more(target.number(_PARTIAL), 1))
        and _is_more(target.number("--long-prefill-token-threshold"), target.number(_LEN))
    ),
    "no_room_for_drafts": _drafts_do_not_fit,
    "larger_step_than_work": lambda target: _is_more(
        target.number(_BATCH), (target.number(_SEQS) or math.inf) * (target.number(_LEN) or math.inf)
    ),
    "context_ranks_do_not_divide": lambda target: (
        target.ranks(_TP) % target.ranks("--decode-context-parallel-size")
        and target.ranks("--prefill-context-parallel-size") == 1
    ),
    "balanced_experts_of_one_rank": lambda target: (
        target.is_on("--enable-eplb") and target.is_on("--enable-expert-parallel") and _is_one_rank(target)
    ),
    "expert_parallel_of_one_rank": lambda target: (
        target.is_on("--enable-expert-parallel")
        and not target.is_on("--enable-eplb")
        and (not target.shape or not target.shape.family or target.shape.experts)
        and _is_one_rank(target)
    ),
    "ranks_do_not_fill_the_nodes": lambda target: (
        target.ranks("--nnodes") > 1 and _world(target) and _world(target) % target.ranks("--nnodes")
    ),
}
"""The condition of each conflict that is no term of rules.toml, by its id.

It holds from the release `since` of rules.toml on and before `until`.
"""


def _conflict(id: str, holds: Callable[[LintTarget], object]) -> LintRule:
    """Return the rule of a conflict.

    `{flag}` in its message and its fix is the value of --flag; the correction removes the flags `removes`.
    """
    text = text_of(id)
    cases = text.cases or (Case(()),)

    def check(target: LintTarget) -> Iterator[Match]:
        in_span = (not text.since or target.since(text.since)) and not (text.until and target.since(text.until))
        case = next((case for case in cases if all_hold((*text.when, *case.when), target)), None) if in_span else None
        if case and holds(target):
            message, fix = case.message or text.message, case.fix or text.fix
            for flag in known():
                if "{" + flag[2:] + "}" in message + fix:
                    option = target.command.all(flag)[-1:]
                    values = " ".join(value(option[0], word) for word in option[0].values) if option else "1"
                    message, fix = (part.replace("{" + flag[2:] + "}", values) for part in (message, fix))
            removed = [option for flag in text.removes for option in target.command.all(flag)]
            yield Match(message, "", fix, removal(removed))

    in_general = text.fix
    for flag in known():
        in_general = in_general.replace("{" + flag[2:] + "}", f"the value of {flag}")
    releases = f", from vLLM {text.since} {f'until {text.until}' if text.until else 'on'}" if text.since else ""
    finds = text.finds or f"{text.title}{releases}. Values that the command does not give are not compared."
    return LintRule(**{**vars(text), "finds": finds, "fix": in_general}, check=check)


CONFLICTS = tuple(
    _conflict(text.id, CONDITIONS.get(text.id, lambda _: True))
    for text in texts().values()
    if text.when or text.cases or text.id in CONDITIONS
)


@rule(topic="parallel")
def tensor_parallel_across_nodes(target: LintTarget) -> Iterator[Match]:
    tensor, nodes, world = target.ranks(_TP), target.ranks("--nnodes"), _world(target)
    local = world // nodes
    if nodes > 1 and 0 < local < tensor and not world % nodes:
        inside = f"--tensor-parallel-size {local} --pipeline-parallel-size {world // target.ranks(_DP) // local}"
        yield Match(
            f"--tensor-parallel-size {tensor} spans nodes: each of {nodes} nodes has {plural(local, 'rank')}",
            fix=f"Use {inside}" if target.ranks(_DP) == 1 else "",
        )


@rule(topic="parallel", roomy=f"{100 * _ROOMY:.0f}")
def tensor_parallel_of_a_small_model(target: LintTarget) -> Iterator[Match]:
    tensor, shape, planned = target.ranks(_TP), target.shape, memory_setup(target)
    is_alone = target.lacks(_PP, "--nnodes", "--decode-context-parallel-size", "--enable-expert-parallel")
    if tensor < 2 or not is_alone or shape is None or planned is None or not shape.family:
        return
    gpu = find(target.used_gpus()[0].name)
    try:
        single = ledger(shape, replace(planned, tensor=1))
        reached = deployment(shape, ledger(shape, planned), gpu, None) if gpu else None
    except BadUsage:
        return
    sizes = {row.name: row.size for row in single.rows}
    weights, budget = sizes[WEIGHTS], sizes[BUDGET]
    if single.verdict != "fits" or not weights or not budget or weights.high > _ROOMY * budget.low:
        return
    why = ""
    if reached and reached.decode and reached.prefill:
        shares = [quantity(ceiling.link_share, "share") for ceiling in (reached.prefill, reached.decode)]
        why = (
            f"With --tensor-parallel-size {tensor} all-reduces take at least {shares[0]} of a prefill step and"
            f" {shares[1]} of a decode step; replicas send nothing to each other: more tokens with the same GPUs"
        )
    replicas = f"--data-parallel-size {tensor * target.ranks(_DP)}"
    yield Match(
        f"--tensor-parallel-size {tensor}, and the model fits one GPU: its weights take {gibibytes(weights.high, 1)} of"
        f" {gibibytes(budget.low, 1)}",
        why,
        f"For throughput use {replicas} in its place; keep it where the inter-token latency of single requests counts",
    )
