"""Rules about flags of parallelism, logging, compilation and memory that conflict with each other."""

from diag.lint.conflicts import Conflict, as_rule, is_more
from diag.lint.rule import Example

_TP, _DP = "--tensor-parallel-size", "--data-parallel-size"

_PARALLEL = (
    Conflict(
        "servers_of_a_headless_node",
        "--headless with --api-server-count",
        message="--headless with --api-server-count {api-server-count}",
        holds=lambda target: target.is_on("--headless") and (target.number("--api-server-count") or 0) > 0,
        why="vLLM refuses it: a headless node starts no API server",
        fix="Remove --api-server-count",
        example=Example("vllm serve m --headless --api-server-count 2"),
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
        example=Example("vllm serve m --data-parallel-size 2 --data-parallel-size-local 4"),
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
        example=Example("vllm serve m --data-parallel-size 2 --data-parallel-rank 2"),
    ),
    Conflict(
        "two_balancers",
        "--data-parallel-external-lb conflicts with --data-parallel-hybrid-lb",
        holds=lambda target: target.is_on("--data-parallel-external-lb") and target.is_on("--data-parallel-hybrid-lb"),
        why="vLLM refuses it: requests are balanced in one way",
        fix="Keep one of them",
        example=Example("vllm serve m -dp 2 --data-parallel-external-lb --data-parallel-hybrid-lb"),
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
        example=Example("vllm serve m --tensor-parallel-size 8 --decode-context-parallel-size 3"),
    ),
    Conflict(
        "balanced_experts_without_experts",
        "--enable-eplb without --enable-expert-parallel",
        holds=lambda target: target.is_on("--enable-eplb") and not target.is_on("--enable-expert-parallel"),
        why="vLLM refuses it: it balances experts over ranks",
        fix="Add --enable-expert-parallel, or remove --enable-eplb",
        example=Example("vllm serve m --enable-eplb"),
        removes=("--enable-eplb",),
    ),
    Conflict(
        "numa_nodes_without_binding",
        "--numa-bind-nodes or --numa-bind-cpus without --numa-bind",
        holds=lambda target: (
            (target.has("--numa-bind-nodes") or target.has("--numa-bind-cpus")) and not target.is_on("--numa-bind")
        ),
        why="vLLM refuses it: they say where to bind, and nothing is bound",
        fix="Add --numa-bind",
        example=Example("vllm serve m --numa-bind-nodes 0"),
    ),
)
_LOGGING = (
    Conflict(
        "parser_missing",
        "--enable-auto-tool-choice without --tool-call-parser",
        holds=lambda target: target.is_on("--enable-auto-tool-choice") and not target.has("--tool-call-parser"),
        why="vLLM refuses it: it would not know how to read the model's tool calls",
        fix="Add --tool-call-parser NAME, the one for this model",
        example=Example("vllm serve m --enable-auto-tool-choice"),
    ),
    Conflict(
        "outputs_without_requests",
        "--enable-log-outputs without --enable-log-requests",
        holds=lambda target: target.is_on("--enable-log-outputs") and not target.is_on("--enable-log-requests"),
        why="vLLM refuses it: outputs are logged with their requests",
        fix="Add --enable-log-requests, or remove --enable-log-outputs",
        example=Example("vllm serve m --enable-log-outputs"),
        since="0.11.0",
        removes=("--enable-log-outputs",),
    ),
    Conflict(
        "metrics_without_stats",
        "--enable-per-request-metrics conflicts with --disable-log-stats",
        holds=lambda target: target.is_on("--enable-per-request-metrics") and target.is_on("--disable-log-stats"),
        why="vLLM refuses it: the metrics come from the statistics",
        fix="Remove --disable-log-stats",
        example=Example("vllm serve m --enable-per-request-metrics --disable-log-stats"),
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
            """vllm serve m --attention-backend FLASHINFER --attention-config '{"backend": "FLASH_ATTN"}'"""
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
        example=Example("vllm serve m --max-cudagraph-capture-size 64 -cc.max_cudagraph_capture_size 128"),
    ),
    Conflict(
        "compilation_level",
        "--compilation-config has the key level",
        holds=lambda target: "level" in target.keys("--compilation-config"),
        why="vLLM refuses it: the key was renamed",
        fix="Use the key mode in its place",
        example=Example("""vllm serve m --compilation-config '{"level": 3}'"""),
        since="0.24.0",
    ),
    Conflict(
        "utilization_is_overridden",
        "--kv-cache-memory-bytes overrides --gpu-memory-utilization",
        message="--kv-cache-memory-bytes overrides --gpu-memory-utilization {gpu-memory-utilization}",
        holds=lambda target: target.has("--kv-cache-memory-bytes") and target.has("--gpu-memory-utilization"),
        why="The KV cache has the size that is set in bytes, whatever share of the GPU is given",
        fix="Keep one of them",
        example=Example("vllm serve m --kv-cache-memory-bytes 8G --gpu-memory-utilization 0.9"),
        severity="warning",
        removes=("--gpu-memory-utilization",),
    ),
)
RULES = tuple(map(as_rule, (*_PARALLEL, *_LOGGING, *_COMPILATION)))
