"""Rules about tensor, pipeline, data and expert parallelism, as vllm/config/parallel.py and arg_utils.py check them."""

from collections.abc import Iterator
from dataclasses import replace

from diag.core.errors import BadUsage
from diag.core.formatting import gibibytes, plural, quantity
from diag.lint.conflicts import Conflict, conflict_rule, is_more
from diag.lint.memory import memory_setup
from diag.lint.rule import Example, LintTarget, Match, number, rule
from diag.vllm.deployments import deployment
from diag.vllm.gpus import find
from diag.vllm.memory.ledger import BUDGET, WEIGHTS, ledger

_TP, _PP, _DP = (f"--{kind}-parallel-size" for kind in ("tensor", "pipeline", "data"))
_CONTEXT = "--prefill-context-parallel-size"


def _world(target: LintTarget) -> int:
    """Return the number of ranks on all nodes; 0 if one of the sizes is unknown."""
    flags = (_TP, _PP, _DP, _CONTEXT)
    sizes = [number(target.command.get(flag)) for flag in flags if target.command.get(flag) is not None]
    absent = all(target.lacks(flag) for flag in flags if target.command.get(flag) is None)
    world = 1.0
    for size in sizes:
        world *= size or 0
    return int(world) if absent else 0


def _is_one_rank(target: LintTarget) -> bool:
    """Return True if neither tensor nor data parallelism is given, and experts have one rank."""
    return target.lacks(*(flag for flag in (_TP, _DP, _CONTEXT) if number(target.command.get(flag)) != 1))


_CONFLICTS = (
    Conflict(
        "servers_of_a_headless_node",
        "--headless with --api-server-count",
        message="--headless with --api-server-count {api-server-count}",
        holds=lambda target: target.is_on("--headless") and (target.number("--api-server-count") or 0) > 0,
        why="vLLM refuses it: a headless node starts no API server",
        fix="Remove --api-server-count",
        example=Example("vllm serve m --headless --api-server-count 2", leaves="vllm serve m --headless"),
        removes=("--api-server-count",),
    ),
    Conflict(
        "more_local_ranks_than_ranks",
        "--data-parallel-size-local is above --data-parallel-size",
        message="--data-parallel-size-local {data-parallel-size-local}"
        " is above --data-parallel-size {data-parallel-size}",
        holds=lambda target: is_more(target.number("--data-parallel-size-local"), target.ranks(_DP)),
        why="vLLM refuses it: the ranks of this node are among all ranks",
        fix="Set --data-parallel-size to the ranks of all nodes",
        example=Example(
            "vllm serve m --data-parallel-size 2 --data-parallel-size-local 4",
            leaves="vllm serve m --data-parallel-size 4 --data-parallel-size-local 2",
        ),
    ),
    Conflict(
        "rank_out_of_range",
        "--data-parallel-rank is not below --data-parallel-size",
        message="--data-parallel-rank {data-parallel-rank} of {data-parallel-size} ranks: they count from 0",
        holds=lambda target: (
            target.has("--data-parallel-rank") and (target.number("--data-parallel-rank") or 0) >= target.ranks(_DP) > 1
        ),
        why="vLLM refuses it: ranks count from 0",
        fix="Use a rank below {data-parallel-size}",
        example=Example(
            "vllm serve m --data-parallel-size 2 --data-parallel-rank 2",
            leaves="vllm serve m --data-parallel-size 2 --data-parallel-rank 1",
        ),
    ),
    Conflict(
        "two_balancers",
        "--data-parallel-external-lb conflicts with --data-parallel-hybrid-lb",
        holds=lambda target: target.is_on("--data-parallel-external-lb") and target.is_on("--data-parallel-hybrid-lb"),
        why="vLLM refuses it: requests are balanced in one way",
        fix="Keep one of them",
        example=Example(
            "vllm serve m -dp 2 --data-parallel-external-lb --data-parallel-hybrid-lb",
            leaves="vllm serve m -dp 2 --data-parallel-size-local 1 --data-parallel-hybrid-lb",
        ),
    ),
    Conflict(
        "context_ranks_do_not_divide",
        "--decode-context-parallel-size does not divide --tensor-parallel-size",
        message="--decode-context-parallel-size {decode-context-parallel-size} does not divide"
        " --tensor-parallel-size {tensor-parallel-size}",
        holds=lambda target: (
            target.ranks(_TP) % target.ranks("--decode-context-parallel-size")
            and target.ranks("--prefill-context-parallel-size") == 1
        ),
        why="vLLM refuses it: both share the same GPUs",
        fix="Use a divisor of --tensor-parallel-size",
        example=Example(
            "vllm serve m --tensor-parallel-size 8 --decode-context-parallel-size 3",
            leaves="vllm serve m --tensor-parallel-size 8 --decode-context-parallel-size 4",
        ),
    ),
    Conflict(
        "balanced_experts_without_experts",
        "--enable-eplb without --enable-expert-parallel",
        holds=lambda target: target.is_on("--enable-eplb") and not target.is_on("--enable-expert-parallel"),
        why="vLLM refuses it: it balances experts over ranks",
        fix="Add --enable-expert-parallel, or remove --enable-eplb",
        example=Example(
            "vllm serve m --enable-eplb", leaves="vllm serve m -tp 2 --enable-expert-parallel --enable-eplb"
        ),
        removes=("--enable-eplb",),
    ),
    Conflict(
        "numa_nodes_without_binding",
        "--numa-bind-nodes or --numa-bind-cpus without --numa-bind",
        holds=lambda target: (
            (target.has("--numa-bind-nodes") or target.has("--numa-bind-cpus")) and not target.is_on("--numa-bind")
        ),
        why="vLLM refuses it: the options choose NUMA nodes or CPUs, but nothing is bound to them",
        fix="Add --numa-bind",
        example=Example("vllm serve m --numa-bind-nodes 0", leaves="vllm serve m --numa-bind --numa-bind-nodes 0"),
    ),
    Conflict(
        "balanced_experts_of_one_rank",
        "--enable-eplb with a single rank",
        holds=lambda target: (
            target.is_on("--enable-eplb") and target.is_on("--enable-expert-parallel") and _is_one_rank(target)
        ),
        why="vLLM refuses it: EPLB requires tensor or data parallelism",
        fix="Remove --enable-eplb, or use several ranks",
        example=Example(
            "vllm serve m --enable-expert-parallel --enable-eplb",
            leaves="vllm serve m --enable-expert-parallel --enable-eplb --data-parallel-size 2",
        ),
        since="0.16.0",
        removes=("--enable-eplb",),
    ),
    Conflict(
        "redundant_experts_without_balancing",
        "--eplb-config has redundant experts, without --enable-eplb",
        holds=lambda target: (
            (number(str(target.keys("--eplb-config").get("num_redundant_experts"))) or 0) > 0
            and target.lacks("--enable-eplb")
        ),
        why="vLLM refuses it: only EPLB places redundant experts",
        fix="Add --enable-eplb, or remove num_redundant_experts",
        example=Example(
            """vllm serve m -tp 2 --enable-expert-parallel --eplb-config '{"num_redundant_experts": 2}'""",
            leaves="""vllm serve m -tp 2 --enable-expert-parallel --enable-eplb"""
            """ --eplb-config '{"num_redundant_experts": 2}'""",
        ),
        since="0.16.0",
    ),
    Conflict(
        "expert_parallel_of_one_rank",
        "--enable-expert-parallel with a single rank",
        holds=lambda target: (
            target.is_on("--enable-expert-parallel")
            and not target.is_on("--enable-eplb")
            and (not target.shape or not target.shape.family or target.shape.experts)
            and _is_one_rank(target)
        ),
        why="The experts are distributed over the ranks of tensor and data parallelism: with one rank nothing changes",
        fix="Remove it, or use several ranks",
        example=Example(
            "vllm serve m --enable-expert-parallel",
            leaves="vllm serve m --enable-expert-parallel --tensor-parallel-size 2",
        ),
        severity="warning",
        removes=("--enable-expert-parallel",),
    ),
    Conflict(
        "external_balancer_without_ranks",
        "--data-parallel-external-lb without --data-parallel-size above 1",
        holds=lambda target: (
            target.is_on("--data-parallel-external-lb") and (target.lacks(_DP) or number(target.command.get(_DP)) == 1)
        ),
        why="vLLM refuses it: there is one rank, and nothing to balance",
        fix="Remove it, or set --data-parallel-size and --data-parallel-rank",
        example=Example(
            "vllm serve m --data-parallel-external-lb",
            leaves="vllm serve m -dp 2 --data-parallel-rank 0 --data-parallel-external-lb",
        ),
        since="0.16.0",
        removes=("--data-parallel-external-lb",),
    ),
    Conflict(
        "hybrid_balancer_without_local_ranks",
        "--data-parallel-hybrid-lb without --data-parallel-size-local",
        holds=lambda target: (
            target.is_on("--data-parallel-hybrid-lb")
            and not target.is_on("--data-parallel-external-lb")
            and target.lacks("--data-parallel-size-local", "--data-parallel-rank", "--nnodes")
        ),
        why="vLLM refuses it: each node balances requests over its own ranks and has to know how many they are",
        fix="Set --data-parallel-size-local to the ranks of this node",
        example=Example(
            "vllm serve m -dp 4 --data-parallel-hybrid-lb",
            leaves="vllm serve m -dp 4 --data-parallel-size-local 2 --data-parallel-hybrid-lb",
        ),
        since="0.16.0",
    ),
    Conflict(
        "ranks_do_not_fill_the_nodes",
        "--nnodes does not divide the number of ranks",
        message="--nnodes {nnodes} does not divide the ranks: tensor x pipeline x data parallelism",
        holds=lambda target: (
            target.ranks("--nnodes") > 1 and _world(target) and _world(target) % target.ranks("--nnodes")
        ),
        why="vLLM refuses it: every node has the same number of ranks",
        fix="Use parallel sizes whose product is a multiple of --nnodes",
        example=Example("vllm serve m -tp 4 --nnodes 3", leaves="vllm serve m -tp 4 -pp 3 --nnodes 3"),
        since="0.28.0",
    ),
)


@rule(
    "warning",
    "Tensor parallelism spans nodes",
    "A tensor-parallel size above the number of ranks that each of the --nnodes nodes has.",
    "Every layer ends in an all-reduce between all ranks of the group, and over a network that takes many times as long"
    " as over NVLink, unless NVLink joins the nodes as well (GB200 NVL72)",
    "Use tensor parallelism inside a node, and pipeline parallelism between nodes",
    Example(
        "vllm serve m --tensor-parallel-size 16 --nnodes 2",
        leaves="vllm serve m --tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2",
    ),
)
def tensor_parallel_across_nodes(target: LintTarget) -> Iterator[Match]:
    tensor, nodes, world = target.ranks(_TP), target.ranks("--nnodes"), _world(target)
    local = world // nodes
    if nodes > 1 and 0 < local < tensor and not world % nodes:
        inside = f"--tensor-parallel-size {local} --pipeline-parallel-size {world // target.ranks(_DP) // local}"
        yield Match(
            f"--tensor-parallel-size {tensor} spans nodes: each of {nodes} nodes has {plural(local, 'rank')}",
            fix=f"Use {inside}" if target.ranks(_DP) == 1 else "",
        )


_ROOMY = 0.5
"""Share of one GPU's budget up to which the weights leave most of it to the KV cache, without any parallelism."""


@rule(
    "info",
    "Tensor parallelism for a model that fits one GPU",
    f"A tensor-parallel size above 1 for a model whose weights take at most {100 * _ROOMY:.0f} % of one GPU's budget,"
    " and whose longest request fits one GPU by the memory ledger.",
    "Tensor parallelism makes a token faster; replicas serve more tokens with the same GPUs, because they send nothing"
    " to each other",
    "For throughput use --data-parallel-size in the place of --tensor-parallel-size; keep it where the inter-token"
    " latency of single requests counts",
    Example(
        "vllm serve ./model --max-model-len 8k --tensor-parallel-size 2",
        requires="./model is Llama 3 8B and this host has two H100",
        leaves="vllm serve ./model --max-model-len 8k --data-parallel-size 2",
    ),
)
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


RULES = (
    *map(conflict_rule, _CONFLICTS),
    tensor_parallel_across_nodes,
    tensor_parallel_of_a_small_model,
)
