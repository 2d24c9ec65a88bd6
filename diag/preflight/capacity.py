"""Checks of capacity: the estimate of the GPU's memory, and a kept ramp of this launch against the load to come."""

from collections.abc import Iterator
from datetime import UTC, datetime

from diag.core.errors import BadUsage
from diag.core.formatting import gibibytes, number, plural, quantity
from diag.preflight.check import NotChecked, Outcome, PreflightFacts, check, failed, passed, warned
from diag.sources.kept_ramp import RampResult, settings
from diag.vllm.command.parse import parse
from diag.vllm.flags.registry import release
from diag.vllm.memory.ledger import KV_CACHE


@check(
    "memory",
    "Weights, activations and KV cache fit the GPU",
    reads="the launch, the model's config.json and the GPU: the estimate of diag budget",
    why="vLLM exits if one request of the longest context, or the states of --max-num-seqs requests, do not fit",
    source="docs/sizing.md",
)
def memory_estimate(facts: PreflightFacts) -> Iterator[Outcome]:
    if facts.running:
        return
    found = facts.ledger
    if found is None:
        raise NotChecked(facts.no_ledger)
    if found.verdict == "does not fit":
        yield failed(found.reasons[0], " or ".join(facts.fitting[:2]) or "Use a larger GPU")
        return
    if found.verdict == "cannot tell" or found.tokens is None or found.concurrency is None:
        raise NotChecked(found.reasons[0] if found.reasons else "the size of the KV cache is not known")
    rows = {row.name: row.size for row in found.rows}
    size, requests = rows[KV_CACHE], found.concurrency[0]
    room = f"{gibibytes(size.low, 1)} of KV cache: " if size else ""
    message = f"{room}{found.tokens.low:,} tokens, {requests:.1f} requests of {found.setup.length:,}"
    if requests < 1.5:
        message += ": a second long request waits for the first"
        yield warned(message, "--max-model-len with the longest request that you serve")
    else:
        yield passed(message)


@check(
    "memory",
    "The share of the GPU that this server may take",
    reads="[preflight] gpu_memory_share in diag.toml, and --gpu-memory-utilization",
    why="on a shared GPU a server that takes more than its share ends the others, or itself",
    source="docs/preflight.md",
)
def memory_share(facts: PreflightFacts) -> Iterator[Outcome]:
    share = facts.contract.preflight.gpu_memory_share
    if facts.command is None or share is None:
        return
    if facts.ledger is None:
        raise NotChecked(facts.no_ledger)
    setup = facts.ledger.setup
    if setup.kv_cache_bytes is not None:
        raise NotChecked("--kv-cache-memory-bytes sets the KV cache, whatever the share")
    message = (
        f"--gpu-memory-utilization {setup.utilization:g}, and diag.toml gives this server {quantity(share, 'share')}"
    )
    if setup.utilization > share:
        yield failed(message, f"--gpu-memory-utilization {share:g}")
    else:
        yield passed(message)


MEMORY_CHECKS = (memory_estimate, memory_share)


_OLD_DAYS = 90
_CHECKLIST = "docs/capacity.md"


def _ramp(facts: PreflightFacts) -> RampResult:
    if facts.ramp is None:
        raise NotChecked("no ramp result is given: diag ramp URL --json > ramp.json, then --ramp ramp.json")
    return facts.ramp


@check(
    "capacity",
    "A ramp of this model, release, GPU and these flags",
    reads="the file of --ramp or of [preflight] ramp in diag.toml",
    why="a ceiling holds for what it was measured on: another model, release, GPU or flag has another one",
    source=_CHECKLIST,
)
def ramp_result(facts: PreflightFacts) -> Iterator[Outcome]:
    ramp = _ramp(facts)
    days = (datetime.now(UTC) - ramp.measured).days
    other = []
    if facts.command is not None:
        if ramp.model and facts.command.model and ramp.model != facts.command.model:
            other.append(f"model {ramp.model}, not {facts.command.model}")
        if ramp.launch:
            try:
                then, now = settings(parse(ramp.launch)), settings(facts.command)
            except BadUsage:
                then = now = {}
            changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
            other += [f"other values of {', '.join(changed[:4])}"] if changed else []
    if ramp.version and release(ramp.version) != release(facts.version):
        other.append(f"vLLM {ramp.version}, not {facts.version}")
    if ramp.gpus and facts.gpu_name and facts.gpu_name not in ramp.gpus:
        other.append(f"{ramp.gpus[0]}, not {facts.gpu_name}")
    if other:
        yield warned(f"the ramp was measured with {'; '.join(other)}", "Run diag ramp with this launch")
    elif days > _OLD_DAYS:
        yield warned(f"the ramp is {plural(days, 'day')} old", "Run diag ramp again")
    else:
        yield passed(f"a ramp of this launch, {plural(days, 'day')} old")


@check(
    "capacity",
    "The load to come against the ceiling",
    reads="[preflight] concurrency in diag.toml, and the ceiling of the ramp",
    why="beyond the ceiling requests wait longer than the SLO allows",
    source=_CHECKLIST,
)
def concurrency(facts: PreflightFacts) -> Iterator[Outcome]:
    ramp, wanted = _ramp(facts), _wanted(facts)
    if ramp.ceiling is None:
        yield failed("the ramp served no load within the SLO", "Read the ramp's own advice (diag ramp)")
        return
    most = ramp.ceiling.in_flight
    if wanted > most:
        message = f"{number(wanted)} requests at a time are to come, and the ceiling is {number(most)}"
        yield failed(message, f"Start {-int(-wanted // most)} replicas, or raise the ceiling (diag ramp)")
    else:
        yield passed(f"{number(wanted)} requests at a time, and the ceiling is {number(most)}")


@check(
    "capacity",
    "Inter-token latency at the load to come",
    reads="the 99th percentile in the ramp's first step with that many requests at a time, and [contract] itl_seconds",
    why="the SLO of a stream is what its readers notice",
    source=_CHECKLIST,
)
def inter_token_latency(facts: PreflightFacts) -> Iterator[Outcome]:
    ramp, wanted, slo = _ramp(facts), _wanted(facts), facts.contract.itl_seconds
    step = min((step for step in ramp.steps if step.in_flight >= wanted), key=lambda step: step.in_flight, default=None)
    if step is None or step.itl.p99 is None:
        raise NotChecked(f"no step of the ramp has {number(wanted)} requests at a time and an inter-token latency")
    itl, most, load = quantity(step.itl.p99, "seconds"), quantity(slo, "seconds"), number(step.in_flight)
    message = f"p99 {itl} at {load} requests at a time, and the SLO is {most}"
    yield passed(message) if step.itl.p99 <= slo else failed(message, "Lower --max-num-seqs, or start more replicas")


def _wanted(facts: PreflightFacts) -> float:
    if facts.contract.preflight.concurrency is None:
        raise NotChecked("the load to come is not known: [preflight] concurrency in diag.toml")
    return facts.contract.preflight.concurrency


CHECKS = (ramp_result, concurrency, inter_token_latency)
