"""Every PromQL expression that the incidents ask."""

from collections.abc import Iterator

from diag.core.contract import Contract
from diag.core.incident import Incident, Signal
from diag.diagnosis.query_cache import ENGINES, GPUS, INSTANCES
from diag.knowledge import signals
from diag.knowledge.catalog import load
from diag.knowledge.formulas import conjunction, formula

INCIDENTS = load()
ENGINE, INSTANCE = ("instance", "engine"), ("instance",)


def every_signal(incident: Incident) -> Iterator[Signal]:
    """Yield the signals of its conditions and of its fixes."""
    yield from (each.signal for each in incident.every_condition)
    for fix in incident.fixes:
        yield from (each.signal for each in fix.only_if)
        if isinstance(fix.value, Signal):
            yield fix.value


def expressions(window: str) -> list[str]:
    """Every signal and every incident's whole query, each once."""
    texts = [formula(s, each.per, window, Contract()) for each in INCIDENTS for s in every_signal(each)]
    texts += [conjunction(each, window, Contract()) for each in INCIDENTS]
    shared = (
        signals.progress,
        signals.nvlink_share,
        signals.batch,
        signals.requests_in_flight,
        signals.requests_in_flight_peak,
        signals.steps_per_second,
    )
    texts += [formula(each, ENGINE, window, Contract()) for each in shared]
    bare = (signals.endpoint_without_vllm.promql, signals.serves.promql, ENGINES, INSTANCES, GPUS)
    texts += [formula(each, INSTANCE, window, Contract()) for each in bare]
    return list(dict.fromkeys(text.written_out() for text in texts))
