"""Checks of capacity: the estimate of the GPU's memory, and a kept ramp of this launch against the load to come."""

from collections.abc import Iterator
from datetime import UTC, datetime

from diag.core.errors import BadUsage
from diag.core.formatting import gibibytes, number, plural, quantity
from diag.preflight.check import NotChecked, Outcome, PreflightFacts, failed, need, passed, warned
from diag.sources.kept_ramp import settings
from diag.vllm.command.parse import parse
from diag.vllm.flags.registry import release

_OLD_DAYS = 90
_NO_RAMP = "no ramp result is given: diag ramp URL --json > ramp.json, then --ramp ramp.json"
_NO_LOAD = "the load to come is not known: [preflight] concurrency in diag.toml"


def memory_estimate(facts: PreflightFacts) -> Iterator[Outcome]:
    ledger = need(facts.ledger, facts.no_ledger)
    if ledger.verdict == "does not fit":
        yield failed(ledger.reasons[0], " or ".join(facts.fitting[:2]) or "Use a larger GPU")
        return
    if ledger.verdict == "cannot tell" or ledger.tokens is None or ledger.concurrency is None:
        raise NotChecked(ledger.reasons[0] if ledger.reasons else "the size of the KV cache is not known")
    requests = max(ledger.concurrency[0], ledger.requests or 0)  # windows are small again after the prompt
    room = f"{gibibytes(ledger.kv_cache.low, 1)} of KV cache: " if ledger.kv_cache else ""
    message = f"{room}{ledger.tokens.low:,} tokens, {requests:.1f} requests of {ledger.setup.length:,}"
    long = f"{message}: a second long request waits for the first"
    do = "--max-model-len with the longest request that you serve"
    yield warned(long, do) if requests < 1.5 else passed(message)


def memory_share(facts: PreflightFacts) -> Iterator[Outcome]:
    share = facts.contract.preflight.gpu_memory_share
    if facts.command is None or share is None:
        return
    setup = need(facts.ledger, facts.no_ledger).setup
    if setup.kv_cache_bytes is not None:
        raise NotChecked("--kv-cache-memory-bytes sets the KV cache, whatever the share")
    flag, most = "--gpu-memory-utilization", quantity(share, "share")
    message = f"{flag} {setup.utilization:g}, and diag.toml gives this server {most}"
    yield failed(message, f"{flag} {share:g}") if setup.utilization > share else passed(message)


def ramp_result(facts: PreflightFacts) -> Iterator[Outcome]:
    ramp = need(facts.ramp, _NO_RAMP)
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


def concurrency(facts: PreflightFacts) -> Iterator[Outcome]:
    ramp, wanted = need(facts.ramp, _NO_RAMP), need(facts.contract.preflight.concurrency, _NO_LOAD)
    if ramp.ceiling is None:
        yield failed("the ramp served no load within the SLO", "Read the ramp's own advice (diag ramp)")
        return
    most = ramp.ceiling.in_flight
    if wanted > most:
        message = f"{number(wanted)} requests at a time are to come, and the ceiling is {number(most)}"
        yield failed(message, f"Start {-int(-wanted // most)} replicas, or raise the ceiling (diag ramp)")
    else:
        yield passed(f"{number(wanted)} requests at a time, and the ceiling is {number(most)}")


def inter_token_latency(facts: PreflightFacts) -> Iterator[Outcome]:
    ramp, wanted = need(facts.ramp, _NO_RAMP), need(facts.contract.preflight.concurrency, _NO_LOAD)
    slo = facts.contract.itl_seconds
    step = min((step for step in ramp.steps if step.in_flight >= wanted), key=lambda step: step.in_flight, default=None)
    if step is None or step.itl.p99 is None:
        raise NotChecked(f"no step of the ramp has {number(wanted)} requests at a time and an inter-token latency")
    itl, most, load = quantity(step.itl.p99, "seconds"), quantity(slo, "seconds"), number(step.in_flight)
    message = f"p99 {itl} at {load} requests at a time, and the SLO is {most}"
    yield passed(message) if step.itl.p99 <= slo else failed(message, "Lower --max-num-seqs, or start more replicas")
