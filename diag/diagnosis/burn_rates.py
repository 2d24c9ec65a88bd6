"""An SLO that is violated slowly, which no short look shows: judged over its alert's windows, as the alert does."""

from collections.abc import Iterator

from diag.core.incident import BurnRateWindow, Incident, seconds
from diag.diagnosis.query_cache import QueryCache, Window

SCRAPED_BEFORE = "max by ($by) (count_over_time(up[$window] offset $window))"


def slow_burns(incident: Incident, queries: QueryCache) -> Iterator[tuple[Incident, Window]]:
    """The incident with each lower burn rate that its alert has, and the window to judge it over.

    Only where samples are older than the short window: a rate over 6 h of which 30 s were seen is that of 30 s.
    """
    own = queries.contract.limit(incident.symptoms[0].limit)
    for burn in incident.burns:
        short = Window(seconds(burn.short), burn.short)
        if burn.factor < own and queries.ask(SCRAPED_BEFORE, ("instance",), short, queries.source.instants[-1:]):
            yield _burning(incident, burn), Window(seconds(burn.long), burn.long)


def _burning(incident: Incident, burn: BurnRateWindow) -> Incident:
    """Both windows must hold: the long one is what counts, the short one that it goes on."""
    whole, *rest = incident.over(burn).symptoms
    lately = whole.signal._replace(
        name=f"{whole.signal.name} over {burn.short}", promql=f"${whole.signal.id}[{burn.short}]"
    )
    named = whole.signal._replace(name=f"{whole.signal.name} over {burn.long}")
    both = (whole._replace(signal=named), whole._replace(signal=lately))
    return incident._replace(symptoms=(*both, *rest), burns=())
