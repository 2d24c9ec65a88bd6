"""Which servers a Prometheus knows, and under which names it stores their metrics."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diag.core.formatting import printable
from diag.core.metric_prefix import ANY, PROBE

SERVES = f"{ANY}({PROBE}|generation_tokens_total)|diag_vllm_up|diag_vllm_info"
_OF_NAME = re.compile(rf"(?!diag_){ANY}")


@dataclass(frozen=True)
class Member:
    """One server: the (job, instance) pairs it is scraped as, its models, and what its metrics' names begin with."""

    targets: frozenset[tuple[str, str]]
    models: frozenset[str]
    prefix: str


def member(series: Sequence[Mapping[str, str]], usual: str) -> Member:
    """The server of these series; `usual` is the prefix that counts where it has several."""
    found = (_OF_NAME.match(labels.get("__name__", "")) for labels in series)
    prefixes = sorted({name[0] for name in found if name})
    return Member(
        prefix=usual if usual in prefixes or not prefixes else prefixes[0],
        targets=frozenset((labels.get("job", ""), labels.get("instance", "")) for labels in series),
        models=frozenset(labels[name] for labels in series for name in ("model_name", "model") if labels.get(name)),
    )


def described(name: str, member: Member) -> str:
    """A server with the jobs and models that it can be selected by."""
    jobs, models = {f"job {job}" for job, _ in member.targets}, {f"model {model}" for model in member.models}
    return printable(f"{name} ({', '.join([*sorted(jobs), *sorted(models)])})")


def is_among(counts: Mapping[str, float], member: Member) -> bool:
    """Whether it was scraped at all, and not only within the day before."""
    return any(instance in counts for _, instance in member.targets)


def by_prefix(members: Mapping[str, Member]) -> dict[str, frozenset[str]]:
    """The servers by the prefix of their metrics."""
    prefixes = sorted({member.prefix for member in members.values()})
    return {
        prefix: frozenset(name for name, member in members.items() if member.prefix == prefix) for prefix in prefixes
    }
