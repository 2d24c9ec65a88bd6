"""The API server is what limits: one Python process at a full core, and requests wait before and behind the engine."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported
from diag.signals import (
    api_server_cores,
    api_servers_needed,
    front_end_share,
    queue_time_share,
    requests_finished,
    tokens_in_a_blink,
    utilization,
)

SCALE_OUT = "https://docs.vllm.ai/en/latest/configuration/optimization/"
CASE = "https://github.com/vllm-project/vllm/issues/4806"

FULL_CORE = api_server_cores.at_least(0.9, documented("one process of Python computes on one core", SCALE_OUT))
incident = Incident(
    id="api_server_bound",
    title="The API server is at one full core, and the engine waits for it",
    severity="warning",
    per=("instance",),
    hold="2m",
    cause="""
        One process takes requests in, renders and tokenises prompts, and turns each token of each stream into text. It
        is Python and computes on one core. Once that is full, new requests reach the engine late and finished tokens
        lie about unread, while the GPU idles: more GPUs or another --max-num-seqs change nothing.
    """,
    impact="the first token comes late and streams stutter, on hardware that has time to spare",
    symptoms=(
        FULL_CORE,
        front_end_share.above(0.3, measured("at most 0.06 on every server that serves in time", "api_server_bound")),
        requests_finished.at_least(10, judged("of fewer, one may be what took long")),
    ),
    supports=(utilization.below(0.8, reported("100 % of a core beside 60-75 % of the GPU", CASE)),),
    looks_like=(
        LookAlike(
            "queue_saturation",
            distinguish="There, requests wait inside of the engine for their turn.",
            requires=queue_time_share.below(0.25, judged("who queues for the engine does not wait for the API server")),
        ),
        LookAlike(
            "an API server that gets no core",
            distinguish="There, the host has too few cores and others take them: it uses less than one, and more "
            "processes would have to share the same.",
            refuted_by=FULL_CORE,
        ),
        LookAlike("engine_stalled", distinguish="There, requests wait for a step that does not end."),
        LookAlike("engine_underfed", distinguish="There, nobody asks for more: the API server idles too."),
    ),
    explains=("engine_underfed", "contract_breached"),
    fixes=(
        Fix(
            flag="--api-server-count",
            value=api_servers_needed,
            least=2,
            direction="raise",
            change="Run so many API servers in front of the engine, by `vllm serve`; each needs a core of its own.",
            effect="latency outside of the engine falls to a few per cent, GPUs are busier",
            risk="process_* metrics go from the page and the periodic line of statistics from the log; "
            "vllm:lora_requests_info is no longer right",
            rollback="without the flag, and restart",
            why=documented("scale the API server out where the CPU is the bottleneck", SCALE_OUT),
        ),
        Fix(
            flag="--stream-interval",
            value=tokens_in_a_blink,
            least=2,
            most=16,
            direction="raise",
            change="Send the tokens of a stream in groups, as many as come within 0.1 s.",
            effect="cores that an API server uses fall, where answers are streamed",
            risk="text arrives in small jumps",
            rollback="1, and restart",
            why=judged("each event costs as much, whether it holds one token or several"),
        ),
        Fix(
            flag="--disable-log-requests",
            value="",
            versions=("", "0.10.0"),
            change="Do not write every prompt into the log.",
            effect="cores that an API server uses fall",
            risk="prompts are missing from the log",
            rollback="without the flag, and restart",
            why=documented("off by itself from 0.10.1 on", SCALE_OUT),
        ),
    ),
    mitigate=(
        "Move some of the clients to another replica.",
        "Ask for less of what is computed for each token: logprobs, several answers to one prompt, very long prompts.",
    ),
    hand_over=("what the process does: `py-spy top --pid <API server>` for half a minute",),
    do_not=(
        "Do not add GPUs and do not raise --max-num-seqs: the engine has time to spare.",
        "Do not take the wait for a slow model: the engine's own times are as usual.",
    ),
)
