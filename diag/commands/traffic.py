"""How a running or recorded server was started, and the traffic that it had."""

import math
from pathlib import Path
from typing import NamedTuple

from diag import promql
from diag.commands.observe import ObserveOptions, observe
from diag.core.contract import Contract
from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.sources.observation import Observation

_MEAN_TOKENS = "sum(increase(vllm:request_{0}_tokens_sum[{1}s])) / sum(increase(vllm:request_{0}_tokens_count[{1}s]))"
_RUNNING = "sum(max_over_time(vllm:num_requests_running[{0}s]))"
_OUTPUT = "sum(rate(vllm:generation_tokens_total[{0}s]))"


class Traffic(NamedTuple):
    """What one server had: the most requests running together, mean tokens of one with its answer, output tokens/s."""

    launch: str
    version: str
    running: int
    tokens: int
    output_rate: float


def is_server(target: str) -> bool:
    """Whether a target is a URL or a recording, not a model or a command."""
    return target.startswith(("http://", "https://")) or (Path(target) / "recording.toml").is_file()


def traffic(target: str) -> Traffic:
    """The traffic of one server; BadUsage where it had none, or how it was started is not known."""
    seen = observe(ObserveOptions([target]), Contract())
    if len(seen.instances) != 1:
        raise BadUsage(
            f"{printable(target)} has {len(seen.instances)} servers: their traffic is compared one at a time"
        )
    name = seen.instances[0]
    if name not in seen.launch:
        raise BadUsage(f"how {printable(target)} was started is not known: give its launch command instead")
    window = max(1, round((seen.instants[-1] - seen.instants[0]) / 1000 + seen.interval))
    lengths = [_last(seen, _MEAN_TOKENS.format(kind, window)) for kind in ("prompt", "generation")]
    running, rate = (_last(seen, expression.format(window)) for expression in (_RUNNING, _OUTPUT))
    if not (running and rate and all(lengths)):
        raise BadUsage(
            f"{printable(target)} finished no request while it was observed: there is no traffic to size for"
        )
    return Traffic(seen.launch[name], seen.versions.get(name, ""), round(running), math.ceil(sum(lengths)), rate)


def _last(seen: Observation, expression: str) -> float:
    """The value at the last instant; 0 where there is none."""
    found = promql.evaluate(expression, seen.samples, seen.instants[-1:])
    value = float(found.values[0][0]) if len(found.labels) and found.present[0][0] else 0.0
    return value if math.isfinite(value) else 0.0
