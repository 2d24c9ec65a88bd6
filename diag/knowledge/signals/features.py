"""Signals of optional features: speculative decoding, LoRA adapters, several API servers.

A server without the feature has the value 0; on a release that does not export the metrics, the signal is missing.
"""

from diag.core.incident import Signal
from diag.core.log_events import GRAMMAR_FAILED, GRAMMAR_REJECTED, OUTPUT_CORRUPTED
from diag.knowledge.signals.expressions import FINISHED, ITL, RUNNING, WAITING, configured, counted, gauge
from diag.knowledge.signals.load import ENOUGH

# -- speculative decoding ---------------------------------------------------------------------------------------------

DRAFT_TOKENS = counted("vllm:spec_decode_num_draft_tokens_total")
ACCEPTED = counted("vllm:spec_decode_num_accepted_tokens_total")
DRAFTS = counted("vllm:spec_decode_num_drafts_total")
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
FIRST = 'position="0"'
WORTHWHILE = 0.3
"""The draft acceptance rate below which speculation does not pay off."""

ENOUGH_DRAFTED = 200
"""Draft tokens below which their acceptance rate may be chance."""

speculates = Signal(
    "speculative decoding",
    # every release exports the counters from its start on where it speculates, and only there
    "count by ($by) (last_over_time(vllm:spec_decode_num_draft_tokens_total[$window])) > bool 0"
    f" or 0 * {gauge('max_over_time(', RUNNING)}",
    "the server decodes speculatively: {value}",
    "bool",
)
draft_acceptance_rate = Signal(
    "draft acceptance rate",
    f"{ACCEPTED} / ({DRAFT_TOKENS} >= {ENOUGH_DRAFTED})",
    "draft acceptance rate: {value}",
    "share",
    needs=f"{ENOUGH_DRAFTED} draft tokens",
)
accepted_per_draft = Signal(
    "accepted tokens / draft",
    f"{ACCEPTED} / ({DRAFTS} > 0)",
    "each draft adds {value} accepted tokens to its step",
    "tokens",
)
first_token_acceptance_rate = Signal(
    "acceptance rate of the first draft token",
    f"{counted(PER_POSITION, FIRST)} / ({DRAFTS} > 0)",
    "the first draft token is accepted in {value} of the drafts",
    "share",
)
worthwhile_draft_length = Signal(
    "draft length with a sufficient acceptance rate",
    f"count by ($by) (sum by ($by, position) (increase({PER_POSITION}[$window]))"
    f" / on ($by) group_left () ({DRAFTS} > 0) >= {WORTHWHILE})",
    f"the first {{value}} tokens of a draft are each accepted in at least {100 * WORTHWHILE:g} % of the drafts",
    "tokens",
)

# -- LoRA adapters ----------------------------------------------------------------------------------------------------

LORA = "vllm:lora_requests_info"
RECENT = "300"
"""Seconds. Each series of LORA is a set of adapters that ran together; its value is when they last did. It stays."""


def ran_together(names: int) -> str:
    """The sets of at least that many adapters that ran recently.

    They are read from the label of running adapters. The label of waiting adapters differs between releases: vLLM 0.11
    and earlier list the waiting ones, 0.32 lists the running ones, because its front end learns of a request only when
    it is first scheduled.
    """
    some = f'{{running_lora_adapters=~"(?:[^,]+,){{{names - 1}}}.+"}}'  # each [^,] costs Prometheus 3 a millisecond
    return f"(time() - last_over_time({LORA}{some}[$window]) < {RECENT})"


ADAPTERS = " or ".join(
    f'label_replace({ran_together(place)}, "adapter", "$$1", "running_lora_adapters", '
    f'"(?:[^,]+,){{{place - 1}}}([^,]+).*")'
    for place in range(1, 9)
)
"""One series per adapter and per set that lists it among its first eight adapters."""
SETS = f"count_over_time({LORA}[$window])"
# PromQL cannot read a number from a label, except from a bucket's edge: a histogram whose samples all lie below the
# edge has the edge as its highest quantile.
MAX_LORAS = (
    f'histogram_quantile(1, sum by ($by, le) (label_replace({SETS}, "le", "$$1", "max_lora", "(.*)")'
    f' or label_replace({SETS}, "le", "+Inf", "", "")))'
)
adapters = Signal(
    "LoRA adapters in use",
    f"count by ($by) (count by ($by, adapter) ({ADAPTERS}))",
    "LoRA adapters that ran within the last five minutes: {value}",
    "adapters",
)
adapters_kept = Signal(
    "LoRA adapters to keep in host memory",
    # the larger of both: vLLM refuses to keep fewer adapters than run together
    f"({adapters.promql} > {configured('max_cpu_loras')}) or ({configured('max_cpu_loras')} and {adapters.promql})",
    "host memory has to hold {value} LoRA adapters",
    "adapters",
)
adapters_per_slot = Signal(
    "LoRA adapters in use / --max-loras",
    f"{adapters.promql} / {MAX_LORAS} or 0 * {MAX_LORAS}"
    f" or (0 * {gauge('max_over_time(', RUNNING)} unless count by ($by) (last_over_time({LORA}[$window])))",
    "within five minutes, {value} LoRA adapters ran per adapter slot",
    "ratio",
)
deferred_share_by_reason = Signal(
    "deferred share of waiting requests (vLLM >= 0.20)",
    # 0 where no request waits; missing where requests wait and the release does not export reasons
    f"sum by ($by) (avg_over_time({WAITING}_by_reason{{reason='deferred'}}[$window]))"
    f" / ({gauge('avg_over_time(', WAITING)} > 0) or 0 * ({gauge('max_over_time(', WAITING)} == 0)",
    "{value} of the waiting requests are deferred although there is capacity",
    "share",
)
MORE_THAN_SLOTS = f"({adapters_per_slot.promql.replace('$by', 'instance')}) > 1"
deferred_share = Signal(
    "deferred share of waiting requests",
    # without reasons (before vLLM 0.20) none is deferred unless adapters compete for slots; then nobody knows
    f"{deferred_share_by_reason.promql}"
    f" or (0 * {gauge('avg_over_time(', WAITING)} unless on (instance) ({MORE_THAN_SLOTS}))",
    "{value} of the waiting requests are deferred for a reason other than capacity",
    "share",
    needs="vLLM 0.20, which says why requests wait, since LoRA adapters compete for slots",
)

# -- structured output ------------------------------------------------------------------------------------------------

GRAMMAR_EVENTS = f'diag_vllm_log_events_total{{event=~"{GRAMMAR_FAILED}|{GRAMMAR_REJECTED}"}}'
GRAMMAR_ERRORS = f"sum by ($by) (increase({GRAMMAR_EVENTS}[$window]))"
grammar_errors_per_request = Signal(
    "grammar errors in the log / finished request",
    # a single one in hours is the client's schema, or a token of a draft
    f"{GRAMMAR_ERRORS} * ({GRAMMAR_ERRORS} >= bool 3) / clamp_min({FINISHED}, 1)",
    "{value} lines of the log about a grammar for every finished request",
    "ratio",
    culprit_promql=f"increase({GRAMMAR_EVENTS}[$window]) >= 1",
    culprit_label="{event}",
)

# -- API servers ------------------------------------------------------------------------------------------------------

CORES = 'rate(diag_vllm_process_cpu_seconds_total{role="api_server"}[$window])'
OWN_CORES = "rate(process_cpu_seconds_total[$window])"
IN_ENGINE = f"({counted('vllm:request_queue_time_seconds_sum')} + {counted('vllm:request_inference_time_seconds_sum')})"
LATENCY = counted("vllm:e2e_request_latency_seconds_sum")
FRONT_END = f"(1 - {IN_ENGINE} / ({LATENCY} > 0 and {FINISHED} >= {ENOUGH}))"
"""With fewer finished requests, a single slow one may decide."""

api_server_cores = Signal(
    "CPU cores used by an API server",
    # with --api-server-count above 1 vLLM exports no process_cpu_seconds_total: only the process table has it
    f"max by ($by) ({CORES}) or max by ($by) ({OWN_CORES})",
    "CPU cores used by the busiest API server (a Python process computes on one): {value}",
    "cores",
)
front_end_share = Signal(
    "latency outside the engine / end-to-end latency",
    FRONT_END,
    "finished requests spent {value} of their end-to-end latency outside the engine",
    "share",
    needs=f"{ENOUGH} finished requests",
)
# By Little's law the same clients send 1 / (1 - share) times as many requests once no time is lost in front of the
# engine. Beyond a factor of four, the engine would be the limit.
NEEDED = f"ceil((sum by ($by) ({CORES}) or sum by ($by) ({OWN_CORES})) / clamp_min(1 - {FRONT_END}, 0.25) / 0.7)"
ONE_MORE = f"(1 + (count by ($by) ({CORES} > 0.05) or 1 + 0 * sum by ($by) ({OWN_CORES})))"
api_servers_needed = Signal(
    "API servers needed for this load",
    f"({NEEDED} > {ONE_MORE}) or ({ONE_MORE} and {NEEDED})",
    "this load needs {value} API servers at 70 % of a core each",
    "processes",
)
gap = " or ".join(f"{counted(f'{name}_sum')} / ({counted(f'{name}_count')} > 0)" for name in ITL)
tokens_in_100_ms = Signal(
    "tokens generated per stream in 0.1 s",
    f"0.1 / (({gap}) > 0)",
    "a stream generates {value} tokens in 0.1 s",
    "tokens",
)

# -- NaN in logits, counted where VLLM_COMPUTE_NANS_IN_LOGITS=1 is set ------------------------------------------------

CORRUPTED = counted("vllm:corrupted_requests_total")
CORRUPTED_BY_LOG = counted("diag_vllm_log_events_total", f'event="{OUTPUT_CORRUPTED}"')
requests_corrupted = Signal(
    "corrupted requests (needs VLLM_COMPUTE_NANS_IN_LOGITS=1)",
    f"{CORRUPTED} or ({CORRUPTED_BY_LOG} > 0)",
    "requests with NaN in their logits: {value}",
    "requests",
    window_scaling="peak",
)
corrupted_share = Signal(
    "share of corrupted requests",
    f"{CORRUPTED} / ({FINISHED} > 0)",
    "{value} of the finished requests had NaN in their logits",
    "share",
)
