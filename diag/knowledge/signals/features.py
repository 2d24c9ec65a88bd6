"""Signals of optional features: speculative decoding, LoRA, structured output, API servers, multimodal items.

A server without the feature has the value 0; on a release that does not export the metrics, the signal is missing.
"""

from diag.core import log_events as events
from diag.core.metric_prefix import metric
from diag.knowledge.signals.expressions import declared
from diag.knowledge.signals.log import lately
from diag.vllm.routes import GENERATING_ROUTES

WORTHWHILE = 0.3
"""The draft acceptance rate below which speculation does not pay off."""
ENOUGH_DRAFTED = 200
"""Draft tokens below which their acceptance rate may be chance."""
SHORT_CONTEXT, LONG_CONTEXT = 4096, 16_384
"""Tokens per running request: what drafts are trained on, and where drafts trained on short texts are lost."""
RECENT = "300"
"""Seconds. A series of ADAPTER_SETS is a set of adapters that ran together; its value is the last time."""
ADAPTER_SETS = metric('lora_requests_info{running_lora_adapters!=""}')
MOST_LISTED = 8
"""Adapters of a set that are read."""
SAYS_WHY = "0[.][2-9][0-9].*|[1-9][0-9]*[.].*"
"""Releases of vLLM that export the reasons why requests wait."""
GRAMMAR_EVENTS = f'diag_vllm_log_events_total{{event=~"{events.GRAMMAR_FAILED}|{events.GRAMMAR_REJECTED}"}}'
TOOL_PARSES = metric("tool_call_parser_invocations_total")
CHAT = 'outcome="no_tool_call",request_type!="responses"'
"""The Responses API has the parser search answers of requests without tools as well."""
TOOL_ERRORS = f'diag_vllm_log_events_total{{event="{events.TOOL_PARSER_FAILED}"}}'
ENOUGH_SEARCHED = 100
"""Answers among which a model that calls tools at all has called one."""
RECENTLY = 300
"""Seconds for which a lost item counts: the caches disagree about it until the engine starts again."""
FULL_CORE = 0.9
COMPLETIONS = f'http_requests_total{{handler=~"{GENERATING_ROUTES}",status!~"4.."}}'


def _adapter_at_place(place: int, sets: str = "$adapter_sets_with_their_first") -> str:
    """Return the sets with the adapter that they list at this place; a set of fewer adapters stays as it is."""
    listed = f"(?:[^,]+,){{{place - 1}}}([^,]+).*"
    return f'label_replace({sets}, "adapter", "$$1", "running_lora_adapters", "{listed}")'


PARTS, SIGNALS = declared(
    vars(),
    f"""
    adapter_sets_with_their_first = {_adapter_at_place(1, "$adapters_ran_together")}
    # one series for each adapter and each set that lists it among its first eight adapters
    adapters_listed_early = {" or ".join(map(_adapter_at_place, range(2, 5)))}
    adapters_listed_late = {" or ".join(map(_adapter_at_place, range(5, MOST_LISTED + 1)))}
    cache_miss_logged_recently: bool = {lately(f"time_of_{events.MULTIMODAL_CACHE_MISS}", RECENTLY)}
    """,
    *(
        f"""
    # a line of the start: a later start without it has begun after it
    {event}_in_this_start: bool =
        ($time_of_{event} by (instance) > bool 0)
        * (($time_of_{event} by (instance) >= bool $latest_start_time by (instance))
          or ($time_of_{event} by (instance) > bool 0))
    """
        for event in (events.KV_SCALES_MISSING, events.FLOAT16_CAST)
    ),
)
