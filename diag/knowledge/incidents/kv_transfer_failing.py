"""KV blocks do not arrive: transfers between prefill and decode instances fail, expire, or never end."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, reported

NIXL_USAGE = "https://docs.vllm.ai/en/latest/features/nixl_connector_usage/"
DISAGGREGATED = "https://docs.vllm.ai/en/latest/features/disagg_prefill/"
WRONG_TOKENS = "https://github.com/vllm-project/vllm/issues/52234"
EFA = "https://github.com/vllm-project/vllm/issues/27055"

ERRORS = signals.error_share.above(0.05, judged("no client causes these errors, and these are not single ones"))
LATE = signals.read_after_expiry.above(
    0, reported("the answer to another prompt was returned with HTTP 200", WRONG_TOKENS)
)
incident = Incident(
    id="kv_transfer_failing",
    title="KV transfers fail (disaggregated prefill)",
    severity="warning",
    per=("instance",),
    window="1m",
    cause="""
        With disaggregated prefill, a decode instance fetches the KV blocks of each prompt from a prefill instance. The
        transfer fails where the two do not reach each other (the side channel's address, RDMA, UCX or libfabric, a
        security group), where a peer was restarted, or where releases, tensor-parallel sizes or block sizes do not fit.
        A prefill instance frees the blocks of a prompt if no decode instance fetches them before their lease ends: the
        lease expires if decode instances are too slow or too few.
    """,
    impact="requests fail with HTTP 500, or their prompts are computed again on the decode instance and TTFT rises",
    symptoms=(
        signals.kv_transfers_lost.above(
            0.05, judged("a transfer over a working network does not fail; single leases expire when clients give up")
        ),
    ),
    supports=(ERRORS, LATE),
    escalates=ERRORS,
    looks_like=(
        LookAlike(
            "kv_offload_ineffective",
            distinguish="Blocks that are not found outside are no failure: they were never stored, or are evicted.",
        ),
        LookAlike(
            "clients that give up",
            distinguish="The lease of a prompt also expires when its client has left before the decode instance took "
            'it: a few per cent, with finished_reason="abort" on the decode instances and no failed transfer.',
        ),
        LookAlike(
            "queue_saturation",
            distinguish="Decode instances that are too slow let leases expire although the network works: their "
            "requests wait for capacity, and failed transfers stay at 0.",
        ),
    ),
    explains=("admission_deadlock", "engine_stalled", "queue_saturation", "requests_failing", "contract_breached"),
    fixes=(
        Fix.without_restart(
            change="Read the failure_type of the first `NIXL transfer failure` (or Mooncake's `pulling kv_caches`) in "
            "the decode instance's log: handshake_failed is the side channel, transfer_failed the data path, "
            "notification_failed a prefill instance that is gone.",
            effect="it names the layer that fails, and the remote host and port",
            why=documented("the line has the type of the failure and its context", NIXL_USAGE),
        ),
        Fix.without_restart(
            change="Check that every decode instance reaches VLLM_NIXL_SIDE_CHANNEL_HOST and its port on every prefill "
            "instance (the port plus one per rank), and that UCX_NET_DEVICES and UCX_TLS name a device both have.",
            effect="handshakes and transfers succeed",
            why=reported("transfers failed over a network device that the back end did not support", EFA),
        ),
        Fix(
            change="If only leases expire, give the decode instances capacity, or raise kv_lease_duration in "
            "kv_connector_extra_config (30 s by default; before 0.22: VLLM_NIXL_ABORT_REQUEST_TIMEOUT; Mooncake: "
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT).",
            effect="prefilled prompts are fetched before their blocks are freed",
            risk="KV blocks that no decode instance fetches occupy the prefill instance for longer",
            why=documented("a prefill instance holds blocks for the length of the lease", NIXL_USAGE),
        ),
        Fix(
            change='Set "kv_load_failure_policy": "recompute" in --kv-transfer-config, so that a failed transfer costs '
            "a prefill on the decode instance instead of the request.",
            effect="requests no longer end in an error",
            risk="decode instances prefill, which stalls their streams; models with several KV cache groups may answer "
            "with wrong tokens instead (vllm#52234)",
            why=documented("the policy chooses what happens to requests whose KV blocks did not arrive", DISAGGREGATED),
        ),
        Fix.without_restart(
            change="Take answers since the first such transfer for wrong: blocks were read after they had been freed.",
            effect="no user relies on answers that came from another prompt's KV blocks",
            only_if=(LATE,),
            why=reported("the previous prompt's answer was returned", WRONG_TOKENS),
        ),
    ),
    operations=("drain",),
    mitigate=(
        "Route around the pair that fails: take the prefill or decode instance that the log names out of the router.",
        "If all pairs fail, serve without disaggregation for the time being.",
    ),
    hand_over=(
        "the failing lines with their context from the decode instance, the prefill instance's log of the same "
        "seconds, releases of vLLM, NIXL and UCX on both, tensor-parallel sizes, and --kv-transfer-config of both",
    ),
    do_not=(
        "Do not restart prefill instances one after the other while decode instances run: each forgets the handshakes "
        "of its peers, and transfers fail until they have shaken hands again.",
    ),
)
