"""After an upgrade of vLLM the same load is served more slowly."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, judged

SLOWER = signals.slower_since_upgrade.above(
    1.3, judged("a quarter of an hour of one load differs from the next by less, and users notice no less")
)
incident = Incident(
    id="version_regression",
    title="Slower since the vLLM upgrade",
    severity="warning",
    per=("instance",),
    window="15m",
    hold="10m",
    cause="""
        Another vLLM release runs than before, and at the same load it is slower: a token takes longer with as many
        requests running, or less is generated while requests wait. Usual reasons: a default changed (the attention
        backend, the token budget, CUDA graphs), a kernel is no longer used for this model or GPU, or the new release
        compiles or quantizes otherwise. Only a Prometheus or a long recording has the time before: a doctor that
        watches for 30 seconds compares with a file of what is normal (--baseline).
    """,
    impact="streams are slower and each server serves fewer requests than before the upgrade",
    symptoms=(SLOWER, signals.upgraded.at_least(1, judged("without another release there is nothing to compare"))),
    supports=(
        signals.flags_changed_with_upgrade.at_least(1, judged("a setting that changed may be what made it slower")),
    ),
    looks_like=(
        LookAlike(
            "more load",
            distinguish="More requests share each step: the ratio is divided by how many more there are, on average or "
            "at the peak, so growth that the load explains leaves nothing.",
            refuted_by=SLOWER,
        ),
        LookAlike(
            "longer or less cached prompts",
            distinguish="Times are only compared while requests have at most 1.33 times as many tokens, and as many "
            "prompt tokens are computed for each output token.",
            refuted_by=SLOWER,
        ),
        LookAlike(
            "caches that are still cold",
            distinguish="The release has run for 20 minutes before it is judged.",
            refuted_by=SLOWER,
        ),
        LookAlike("gpu_thermal_throttling", distinguish="The GPU slows down by heat, whatever release runs."),
        LookAlike("host_cpu_starved", distinguish="Other processes take the CPU from vLLM."),
        LookAlike("kv_eviction_cascade", distinguish="Requests preempt each other, and are computed again."),
        LookAlike("prefill_decode_contention", distinguish="Long prefills hold up the streams."),
    ),
    fixes=(
        Fix(
            change="Start the new release with the values that the changed settings had before the upgrade.",
            effect="ITL at the same load returns to what it was",
            why=judged("defaults change between releases, and are the cheapest thing to undo"),
            only_if=(signals.flags_changed_with_upgrade.at_least(1, judged("only where a setting changed")),),
            rollback="leave the settings to vLLM again",
        ),
        Fix(
            change="Roll back to the release that ran before, one server at a time, and compare: "
            "diag record before, diag verify after.",
            effect="ITL at the same load returns to what it was",
            why=judged("the release is what changed"),
            risk="bugs that the new release fixed are back",
            rollback="upgrade again",
        ),
    ),
    operations=("pause", "rollback"),
    mitigate=("Send part of the traffic to servers that still run the earlier release.",),
    hand_over=(
        "both releases, and both logs of a start: attention backend, compilation, KV cache size",
        "diag export of an hour before and after the upgrade",
        "the output of `vllm bench serve` with the same requests on both releases",
    ),
    do_not=("Do not upgrade further servers until one of them is as fast as before.",),
)
