"""The engine woke from a sleep that discarded its weights, and nothing has loaded them again: answers are garbage."""

from diag import signals
from diag.incident import Effect, Fix, Incident, LookAlike, documented, judged, reported

SLEEP = "https://docs.vllm.ai/en/latest/features/sleep_mode.html"
GARBAGE = "https://github.com/vllm-project/vllm/pull/54235"

WOKEN = signals.woken_from_level_2.at_least(
    1, reported("the answer was '!!!!!!!!!!!!' after /sleep?level=2 and /wake_up, without a warning", GARBAGE)
)
NOT_RELOADED = signals.weights_reloaded.at_most(
    0, documented("a wake-up fills the memory of the weights with nothing", SLEEP)
)

incident = Incident(
    id="weights_not_reloaded",
    title="Weights not reloaded after sleep level 2",
    severity="warning",
    per=("instance",),
    window="1m",
    cause="""
        POST /sleep?level=2 discards the weights, and keeps no copy in host memory. POST /wake_up allocates their memory
        again and fills it with nothing: a trainer has to send the weights, or reload_weights has to read them from
        disk. Level 1 keeps a copy in host memory, and wakes up complete.
    """,
    impact="every answer is garbage and ends with HTTP 200, so neither latency nor errors show it",
    symptoms=(
        WOKEN,
        NOT_RELOADED,
        signals.progress.above(0, judged("as long as no request is processed, the weights may still come")),
    ),
    supports=(signals.wake_ups.at_least(1, judged("a call of /wake_up without one that loads weights")),),
    looks_like=(
        LookAlike(
            "a wake-up from level 1",
            distinguish=f"{signals.SLEEP_STATE} showed weights_offloaded.",
            refuted_by=WOKEN,
        ),
        LookAlike(
            "a weight update by a trainer",
            distinguish="A call of /collective_rpc, /update_weights or another route that may load weights was "
            "counted since the start, or the log shows the reload.",
            refuted_by=NOT_RELOADED,
        ),
        LookAlike("output_corrupted", distinguish="Logits are NaN although the weights were never discarded."),
    ),
    may_explain=(Effect("output_corrupted", began_first=True),),
    fixes=(
        Fix.without_restart(
            command="curl -X POST http://HOST:PORT/collective_rpc -H 'Content-Type: application/json' "
            """-d '{"method": "reload_weights"}'""",
            change="Load the weights again from the model's files, without a restart (the route needs "
            "VLLM_SERVER_DEV_MODE=1, as /sleep does; add the server's API key, if it has one). With a trainer: have it "
            "send the weights.",
            effect="answers make sense again: compare one prompt at temperature 0 with a healthy replica",
            while_it_lasts=True,
            risk="the engine answers nothing while it reads them",
            why=documented("after a wake-up from level 2 the weights have to be reloaded", SLEEP),
        ),
        Fix.without_restart(
            command="curl -X POST http://HOST:PORT/reset_prefix_cache",
            change="Then drop the prefix cache: its blocks were computed from what was in place of the weights.",
            effect="no later request continues from a wrong cache",
            while_it_lasts=True,
            why=judged("a block that was computed with other weights is still found by its prompt"),
        ),
        Fix.without_restart(
            change="Wake up in three calls: POST /wake_up?tags=weights, then reload_weights or the trainer's update, "
            "then POST /wake_up?tags=kv_cache. Or sleep at level 1, which keeps the weights in host memory.",
            effect="no request is scheduled before the weights are there",
            why=documented("the scheduler resumes once all memory is back", SLEEP),
        ),
    ),
    operations=("drain", "restart"),
    mitigate=("Take the server out of rotation: every answer since the wake-up is wrong, whatever its status.",),
    hand_over=("the calls of /sleep, /wake_up and /collective_rpc with their times, and one prompt with its answer",),
    do_not=("Do not keep the answers since the wake-up: caches, logs of rollouts and training data have them, too.",),
)
