"""The API server is the bottleneck: one Python process uses a full CPU core while the engine has time to spare."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported

SCALE_OUT = "https://docs.vllm.ai/en/latest/configuration/optimization/"
CASE = "https://github.com/vllm-project/vllm/issues/4806"

FULL_CORE = signals.api_server_cores.at_least(0.9, documented("one Python process computes on one core", SCALE_OUT))
incident = Incident(
    id="api_server_bound",
    title="API server CPU-bound",
    severity="warning",
    per=("instance",),
    hold="2m",
    cause="""
        One process accepts requests, renders and tokenises prompts, and turns every generated token into text. It is a
        Python process and computes on one core. Once that core is fully used, new requests reach the engine late and
        generated tokens are sent late, while the GPU idles: more GPUs or a higher --max-num-seqs have no effect.
    """,
    impact="TTFT rises and streams stutter although the GPU has capacity to spare",
    symptoms=(
        FULL_CORE,
        signals.front_end_share.above(
            0.3, measured("at most 6 % on every server that is not CPU-bound", "api_server_bound")
        ),
    ),
    supports=(signals.utilization.below(0.8, reported("100 % of a core with GPU utilisation at 60-75 %", CASE)),),
    looks_like=(
        LookAlike(
            "queue_saturation",
            distinguish="Requests queue inside the engine.",
            requires=signals.queue_time_share.below(
                0.25, judged("requests that queue in the engine are not held up by the API server")
            ),
        ),
        LookAlike(
            "an API server without CPU time",
            distinguish="The host has too few cores and other processes take them: the API server uses less than one "
            "core, and more API servers would share the same cores.",
            refuted_by=FULL_CORE,
        ),
        LookAlike("engine_stalled", distinguish="Requests wait for a step that does not return."),
        LookAlike("engine_underfed", distinguish="There is too little load: the API server idles too."),
    ),
    explains=("engine_underfed", "requests_aborted", "contract_breached"),
    fixes=(
        Fix(
            flag="--api-server-count",
            value=signals.api_servers_needed,
            least=2,
            direction="raise",
            change="Run this number of API servers in front of the engine, with `vllm serve`; each needs a core of "
            "its own.",
            effect="latency outside the engine falls to a few percent of the end-to-end latency; GPU utilisation rises",
            risk="process_* metrics disappear from /metrics and the periodic statistics line from the log; "
            "the metric of LoRA requests is no longer correct",
            rollback="remove the flag",
            why=documented("scale out the API server where the CPU is the bottleneck", SCALE_OUT),
        ),
        Fix(
            flag="--stream-interval",
            value=signals.tokens_in_100_ms,
            least=2,
            most=16,
            direction="raise",
            change="Send the tokens of a stream in groups: as many as are generated within 0.1 s.",
            effect="the CPU use of the API servers falls where responses are streamed",
            risk="streamed text arrives in small bursts",
            rollback="--stream-interval 1",
            why=judged("every event costs the same, whether it holds one token or several"),
        ),
        Fix(
            flag="--disable-log-requests",
            value="",
            versions=("", "0.10.0"),
            change="Stop logging every prompt.",
            effect="the CPU use of the API servers falls",
            risk="the log no longer contains prompts",
            rollback="remove the flag",
            why=documented("request logging is off by default from 0.10.1 on", SCALE_OUT),
        ),
    ),
    operations=("scale",),
    mitigate=(
        "Move some of the clients to another replica.",
        "Request less work per token: no logprobs, one completion per prompt, no very long prompts.",
    ),
    hand_over=("a profile of the process: `py-spy top --pid <API server>` for 30 s",),
    do_not=(
        "Do not add GPUs and do not raise --max-num-seqs: the engine has capacity to spare.",
        "Do not blame the model: the latency inside the engine is normal.",
    ),
)
