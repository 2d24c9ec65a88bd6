"""Signals of optional features: speculative decoding, LoRA, structured output, API servers, multimodal items.

A server without the feature has the value 0; on a release that does not export the metrics, the signal is missing.
"""

from diag.core import log_events as events
from diag.knowledge.signals.expressions import ANY_MEMBER, any_of, parts, signal
from diag.knowledge.signals.load import ENOUGH
from diag.knowledge.signals.log import HEARSAY_TIME, lately, since_start
from diag.knowledge.signals.peers import MODEL, PEERS
from diag.vllm.routes import GENERATING_ROUTES

WORTHWHILE = 0.3
"""The draft acceptance rate below which speculation does not pay off."""
ENOUGH_DRAFTED = 200
"""Draft tokens below which their acceptance rate may be chance."""
SHORT_CONTEXT, LONG_CONTEXT = 4096, 16_384
"""Tokens per running request: what drafts are trained on, and where drafts trained on short texts are lost."""
RECENT = "300"
"""Seconds. A series of vllm:lora_requests_info is a set of adapters that ran together; its value is the last time."""
ADAPTER_SETS = 'vllm:lora_requests_info{running_lora_adapters!=""}'
MOST_LISTED = 8
"""Adapters of a set that are read."""
GRAMMAR_EVENTS = f'diag_vllm_log_events_total{{event=~"{events.GRAMMAR_FAILED}|{events.GRAMMAR_REJECTED}"}}'
TOOL_PARSES = "vllm:tool_call_parser_invocations_total"
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


PARTS = parts(
    f"""
    # -- speculative decoding
    draft_tokens: tokens = sum by ($by) (increase(vllm:spec_decode_num_draft_tokens_total[$window]))
    accepted_tokens: tokens = sum by ($by) (increase(vllm:spec_decode_num_accepted_tokens_total[$window]))
    drafts: drafts = sum by ($by) (increase(vllm:spec_decode_num_drafts_total[$window]))
    # -- LoRA adapters
    # The formulas read the label of running adapters. The label of waiting adapters differs between releases: vLLM 0.11
    # and earlier list waiting adapters in it, 0.32 running ones, because its front end sees a request only when it is
    # first scheduled.
    adapters_ran_together: seconds = time() - last_over_time({ADAPTER_SETS}[$window]) < {RECENT}
    adapter_sets_with_their_first = {_adapter_at_place(1, "$adapters_ran_together")}
    # one series for each adapter and each set that lists it among its first eight adapters
    adapters_listed_early = {" or ".join(map(_adapter_at_place, range(2, 5)))}
    adapters_listed_late = {" or ".join(map(_adapter_at_place, range(5, MOST_LISTED + 1)))}
    adapters_running = $adapter_sets_with_their_first or $adapters_listed_early or $adapters_listed_late
    adapter_sets: samples = count_over_time(vllm:lora_requests_info[$window])
    # PromQL cannot read a number from a label, except from a bucket's edge: a histogram whose samples all lie below the
    # edge has the edge as its highest quantile.
    adapter_slots: adapters =
        histogram_quantile(1,
          sum by ($by, le) (label_replace($adapter_sets, "le", "$$1", "max_lora", "(.*)")
            or label_replace($adapter_sets, "le", "+Inf", "", "")))
    # Busy adapters may keep every slot: requests of the others are deferred throughout and never run, so that those
    # that finish say nothing of the queue. Requests that wait for a KV transfer or a grammar do finish.
    deferred_throughout: bool =
        sum by ($by) (min_over_time(vllm:num_requests_waiting_by_reason{{reason='deferred'}}[$window])) >= bool 1
    adapters_starve: bool =
        $deferred_throughout * ($queue_time_of_finished < bool 0.5 * $queue_time_by_gauges)
        * ($lora_adapters_in_use == bool $adapter_slots)
    more_adapters_than_slots: ratio = ($lora_adapters_in_use_per_max_loras by (instance)) > 1
    deferred_mean: requests =
        sum by ($by) (avg_over_time(vllm:num_requests_waiting_by_reason{{reason='deferred'}}[$window]))
    deferred_for_no_transfer: requests = $deferred_mean > 0 unless $external_cache_queries > 0
    # -- structured output
    grammar_errors: lines = sum by ($by) (increase({GRAMMAR_EVENTS}[$window]))
    # -- tool calls: one count for each answer that the parser has searched, but for each delta of a stream
    tool_calls_found: calls = sum by ($by) (last_over_time({TOOL_PARSES}{{outcome="tool_call"}}[$window]))
    tokens_since_start: tokens = sum by ($by) (last_over_time(vllm:generation_tokens_total[$window]))
    answers_since_start: answers = sum by ($by) (last_over_time(vllm:request_success_total[$window]))
    answers_without_tool_call: answers =
        sum by ($by) (last_over_time({TOOL_PARSES}{{mode="non_streaming",{CHAT}}}[$window]))
        + sum by ($by) (last_over_time({TOOL_PARSES}{{mode="streaming",{CHAT}}}[$window]))
          / clamp_min($tokens_since_start / ($answers_since_start > 0), 1)
    # -- API servers
    api_server_process_cores: cores = rate(diag_vllm_process_cpu_seconds_total{{role="api_server"}}[$window])
    own_process_cores: cores = rate(process_cpu_seconds_total[$window])
    seconds_in_engine: seconds =
        $queue_seconds_total + sum by ($by) (increase(vllm:request_inference_time_seconds_sum[$window]))
    # with fewer finished requests, one slow request may decide
    front_end_share: share = 1 - $seconds_in_engine / ($end_to_end_seconds_total > 0 and $finished_requests >= {ENOUGH})
    # Little's law: the same clients send 1 / (1 - share) times as many requests once no time is lost in front of the
    # engine. Beyond a factor of four, the engine would be the limit.
    api_servers_for_the_load: processes =
        ceil((sum by ($by) ($api_server_process_cores) or sum by ($by) ($own_process_cores))
          / clamp_min(1 - $front_end_share, 0.25) / 0.7)
    one_more_api_server: processes =
        1 + (count by ($by) ($api_server_process_cores > 0.05) or 1 + 0 * sum by ($by) ($own_process_cores))
    itl_mean: seconds = $itl_sum / ($itl_count > 0)
    # -- NaN in logits, counted where VLLM_COMPUTE_NANS_IN_LOGITS=1 is set
    corrupted_requests: requests = sum by ($by) (increase(vllm:corrupted_requests_total[$window]))
    corrupted_of_model: requests = $corrupted_requests by ($by, {MODEL})
    clean_of_model = $corrupted_of_model == 0 and $finished_requests by ($by, {MODEL}) >= {ENOUGH}
    clean_peers: engines =
        max by ($by) (0 * $corrupted_of_model
          + on ({MODEL}) group_left () (count {PEERS} ($clean_of_model)
            or 0 * (count {PEERS} ($corrupted_of_model) > 1)))
    # -- requests that fail before the scheduler has seen them: a request passes the API server, a socket and the
    # engine's input thread before a gauge counts it. One that is lost there is in flight for its client only: its HTTP
    # request ends and the engine finishes none, or the probe fails.
    time_of_claimed_cache_miss: unix time =
        max by ($by) (last_over_time({HEARSAY_TIME}{{event="{events.MULTIMODAL_CACHE_MISS}"}}[$window]))
    # a dead thread stays dead until the next start
    input_thread_died: bool =
        {since_start(events.INPUT_THREAD_DIED)}
        or ($time_of_{events.INPUT_THREAD_DIED} > bool 0)
    # more than once: the requests of one batch may be counted a moment after the engine has finished them
    completions_counted_again: bool = max by ($by) (changes({COMPLETIONS}[$window])) > bool 1
    completions: responses = sum by ($by) (increase({COMPLETIONS}[$window]))
    no_request_reaches_the_engine: bool =
        {any_of(http="(($completions > bool 2.5) * $completions_counted_again)", probe="($probe_success == bool 0)")}
        * ($requests_in_flight_peak == bool 0) * ($tokens_and_requests_processed == bool 0)
    multimodal_cache_queries: items = sum by ($by) (last_over_time(vllm:mm_cache_queries_total[$window]))
    engine_cores: cores ({ANY_MEMBER}) =
        max by ($by) (rate(diag_vllm_process_cpu_seconds_total{{role="engine"}}[$window]))
    input_thread_spins: bool = ($engine_cores > bool {FULL_CORE}) * ($multimodal_cache_queries > bool 0)
    cache_miss_claimed_recently: bool = {lately("time_of_claimed_cache_miss", RECENTLY)}
    cache_miss_logged_recently: bool = {lately(f"time_of_{events.MULTIMODAL_CACHE_MISS}", RECENTLY)}
    cache_miss_killed_the_thread: bool = $input_thread_died * ($time_of_{events.MULTIMODAL_CACHE_MISS} > bool 0)
    unreached_after_a_cache_miss: bool =
        {any_of(spin="$input_thread_spins", hearsay="$cache_miss_claimed_recently")} * $no_request_reaches_the_engine
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

speculates = signal(
    # every release exports the counters from its start on if it speculates, and only then
    "speculative decoding: bool ="
    " count by ($by) (last_over_time(vllm:spec_decode_num_draft_tokens_total[$window])) > bool 0"
    " or 0 * $requests_running_peak",
    "the server decodes speculatively: {value}",
    context=True,
)
draft_acceptance_rate = signal(
    f"draft acceptance rate: share = $accepted_tokens / ($draft_tokens >= {ENOUGH_DRAFTED})",
    "draft acceptance rate: {value}",
    needs=f"{ENOUGH_DRAFTED} draft tokens",
)
accepted_per_draft = signal(
    "accepted tokens / draft: tokens = $accepted_tokens / ($drafts > 0)",
    "each draft adds {value} accepted tokens to its step",
)
first_token_acceptance_rate = signal(
    "acceptance rate of the first draft token: share ="
    ' sum by ($by) (increase(vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}[$window]))'
    " / ($drafts > 0)",
    "the first draft token is accepted in {value} of the drafts",
)
# Acceptance beside the context of the running requests, in periods of two minutes: in each of them all requests count.
acceptance_at_short_contexts = signal(
    "draft acceptance rate at short contexts: share ="
    f" avg_over_time(($draft_acceptance_rate[2m] and $tokens_held_per_running_request[2m] < {SHORT_CONTEXT})"
    "[$window:2m])",
    f"draft acceptance rate while requests hold fewer than {SHORT_CONTEXT:,} tokens on average: {{value}}",
    context=True,
    needs=f"two minutes with contexts below {SHORT_CONTEXT:,} tokens",
)
acceptance_at_long_contexts = signal(
    "draft acceptance rate at long contexts: share ="
    f" avg_over_time(($draft_acceptance_rate[2m] and $tokens_held_per_running_request[2m] >= {LONG_CONTEXT})"
    "[$window:2m])",
    f"draft acceptance rate while requests hold {LONG_CONTEXT:,} tokens and more on average: {{value}}",
    needs=f"two minutes with contexts of {LONG_CONTEXT:,} tokens",
)
acceptance_kept_at_length = signal(
    "draft acceptance rate at long / at short contexts: share ="
    " $draft_acceptance_rate_at_long_contexts / ($draft_acceptance_rate_at_short_contexts > 0)",
    "at long contexts, {value} of the draft acceptance rate at short ones is left",
    needs=f"two minutes with contexts below {SHORT_CONTEXT:,} tokens, and two with {LONG_CONTEXT:,} and more",
)
draft_length = signal(
    "draft length: tokens = $draft_tokens / ($drafts > 0)",
    "a draft has {value} tokens on average",
)
worthwhile_draft_length = signal(
    "draft length with a sufficient acceptance rate: tokens = count by ($by)"
    " (sum by ($by, position) (increase(vllm:spec_decode_num_accepted_tokens_per_pos_total[$window]))"
    f" / on ($by) group_left () ($drafts > 0) >= {WORTHWHILE})",
    f"the first {{value}} tokens of a draft are each accepted in at least {100 * WORTHWHILE:g} % of the drafts",
)

# -- LoRA adapters ----------------------------------------------------------------------------------------------------

adapters = signal(
    "LoRA adapters in use: adapters = count by ($by) (count by ($by, adapter) ($adapters_running))",
    "LoRA adapters that ran within the last five minutes: {value}",
)
adapter_slots = signal(
    "LoRA adapter slots: adapters = $adapter_slots",
    "a batch holds requests of at most {value} LoRA adapters",
)
slots_for_adapters = signal(
    "slots for LoRA adapters: adapters = (2 * $adapter_slots and $adapters_starve == 1) or $lora_adapters_in_use",
    "slots for the LoRA adapters in use, twice as many as today where some never get one: {value}",
)
adapters_kept = signal(
    # the larger of both: vLLM refuses to keep fewer adapters than run together
    "LoRA adapters to keep in host memory: adapters ="
    " ($slots_for_lora_adapters > $config_max_cpu_loras) or ($config_max_cpu_loras and $slots_for_lora_adapters)",
    "host memory has to hold {value} LoRA adapters",
)
adapters_per_slot = signal(
    # slots are known and no adapter ran lately: PromQL does not tell an empty list of adapters from a missing label
    "LoRA adapters in use / --max-loras: ratio ="
    " ($lora_adapters_in_use + ($adapters_starve or 0 * $lora_adapters_in_use)) / $adapter_slots or 0 * $adapter_slots"
    # vLLM exports its adapters only if it serves some; without them, a deferred request has to wait for a KV transfer
    " or (0 * $requests_running_peak unless count by ($by) (last_over_time(vllm:lora_requests_info[$window]))"
    " unless $deferred_for_no_transfer)",
    "within five minutes, {value} LoRA adapters ran per adapter slot (one more if requests of others never run)",
)
requests_deferred = signal(
    "requests deferred (mean): requests = $deferred_mean",
    "mean number of requests that wait for a KV transfer, a grammar or a LoRA slot: {value}",
)
deferred_share_by_reason = signal(
    # 0 where no request waits; missing where requests wait and the release does not export reasons
    "deferred share of waiting requests (vLLM >= 0.20): share ="
    " $deferred_mean / ($deferred_mean + $requests_waiting_mean > 0) or 0 * $deferred_mean"
    " or 0 * ($requests_waiting_peak == 0)",
    "{value} of the waiting requests are deferred although there is capacity",
)
deferred_share = signal(
    # without reasons (before vLLM 0.20) no request is deferred unless adapters compete for slots; then it is unknown
    "deferred share of waiting requests: share ="
    f" ${deferred_share_by_reason.id} or (0 * $requests_waiting_mean unless on (instance) $more_adapters_than_slots)",
    "{value} of the waiting requests are deferred for a reason other than capacity",
    needs="vLLM 0.20, which exports the reasons why requests wait, since LoRA adapters compete for slots",
)

# -- structured output ------------------------------------------------------------------------------------------------

grammar_errors_per_request = signal(
    # a single one in hours is the client's schema, or a token of a draft
    "grammar errors in the log / finished request: ratio ="
    " $grammar_errors * ($grammar_errors >= bool 3) / clamp_min($finished_requests, 1)",
    "{value} lines of the log about a grammar for every finished request",
    culprit_promql=f"increase({GRAMMAR_EVENTS}[$window]) >= 1",
    culprit_label="{event}",
)

# -- tool calls --------------------------------------------------------------------------------------------------------

tool_calls_found = signal(
    "tool calls found since the start: calls = $tool_calls_found",
    "since the start, the tool-call parser has found {value} calls",
    context=True,
)
answers_without_tool_call = signal(
    # before 0.24 and without --tool-call-parser there is no counter, and no answer is searched that it would count
    "answers searched for tool calls in vain since the start: answers ="
    " $answers_without_tool_call or 0 * $requests_running_peak",
    "since the start, the tool-call parser has searched about {value} answers and found no call in them",
)
tool_parser_errors = signal(
    "errors of the tool-call parser / finished request: ratio ="
    f" sum by ($by) (increase({TOOL_ERRORS}[$window])) / ($finished_requests >= 3)",
    "{value} errors of the tool-call parser for every finished request",
)

# -- API servers ------------------------------------------------------------------------------------------------------

api_server_cores = signal(
    # with --api-server-count above 1 vLLM exports no process_cpu_seconds_total: only the process table has it
    "CPU cores used by an API server: cores ="
    " max by ($by) ($api_server_process_cores) or max by ($by) ($own_process_cores)",
    "CPU cores used by the busiest API server (a Python process computes on one): {value}",
    group=ANY_MEMBER,
)
front_end_share = signal(
    "latency outside the engine / end-to-end latency: share = $front_end_share",
    "finished requests spent {value} of their end-to-end latency outside the engine",
    needs=f"{ENOUGH} finished requests",
)
api_servers_needed = signal(
    "API servers needed for this load: processes ="
    " ($api_servers_for_the_load > $one_more_api_server) or ($one_more_api_server and $api_servers_for_the_load)",
    "this load needs {value} API servers at 70 % of a core each",
)
tokens_in_100_ms = signal(
    "tokens generated per stream in 0.1 s: tokens = 0.1 / ($itl_mean > 0)",
    "a stream generates {value} tokens in 0.1 s",
)

# -- NaN in logits, counted where VLLM_COMPUTE_NANS_IN_LOGITS=1 is set ------------------------------------------------

requests_corrupted = signal(
    "corrupted requests (needs VLLM_COMPUTE_NANS_IN_LOGITS=1): requests = $corrupted_requests"
    f' or (sum by ($by) (increase(diag_vllm_log_events_total{{event="{events.OUTPUT_CORRUPTED}"}}[$window])) > 0)',
    "requests with NaN in their logits: {value}",
    window_scaling="peak",
)
corrupted_share = signal(
    "share of corrupted requests: share = $corrupted_requests / ($finished_requests > 0)",
    "{value} of the finished requests had NaN in their logits",
)

clean_peers = signal(
    "peers of the same model without NaN: engines = $clean_peers",
    f"other engines of the same model that finished {ENOUGH} requests without NaN: {{value}}",
)
kv_scales_missing = signal(
    "FP8 KV cache without scales: bool ="
    f" 0 * $corrupted_requests + on (instance) group_left () ${events.KV_SCALES_MISSING}_in_this_start",
    "the log says that the checkpoint has no scales for the FP8 KV cache: {value}",
)
cast_to_float16 = signal(
    "bfloat16 model in float16: bool ="
    f" 0 * $corrupted_requests + on (instance) group_left () ${events.FLOAT16_CAST}_in_this_start",
    "the log says that a bfloat16 model is cast to float16: {value}",
)

# -- requests that fail before the scheduler ---------------------------------------------------------------------------

requests_unreached = signal(
    "requests that do not reach the scheduler: bool = "
    + any_of(thread="$input_thread_died", unreached="$no_request_reaches_the_engine"),
    "requests arrive over HTTP and none reaches the scheduler: {value}",
)
multimodal_cache_lost = signal(
    "multimodal items lost between the caches: bool = "
    + any_of(
        log="$cache_miss_logged_recently",
        thread="$cache_miss_killed_the_thread",
        unreached="$unreached_after_a_cache_miss",
    )
    + " or 0 * ($multimodal_cache_queries == 0)",
    "the log names an item that the engine's multimodal cache lacks, or its input thread spins: {value}",
)
failed_before_the_scheduler = signal(
    "requests that failed before the scheduler: requests ="
    f' sum by ($by) (increase(diag_vllm_log_events_total{{event="{events.REQUEST_PREPROCESSING_FAILED}"}}[$window]))',
    "requests that the engine failed before its scheduler saw them: {value}",
    window_scaling="peak",
)
